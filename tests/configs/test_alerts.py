"""Alerts use the metrics that a run has: not every version trains tokens of the current policy."""

from typing import Any

import pytest

from configs.flow.alerts import FRESH, K3_BY_AGE, alerts, youngest_k3

OLD = "offpolicy/k3_age_4-7"


def fresh(k3: float, share: float = 0.2) -> dict[str, float]:
    """A version with some tokens of the current policy."""
    return {FRESH: k3, "age/share_0": share, "age/share_1": 1 - share, "offpolicy/k3_age_1": 2e-3}


def steady(k3: float) -> dict[str, float]:
    """A version of a run at a steady age of 4."""
    return {"age/share_0": 0.0, "age/share_4-7": 1.0, OLD: k3}


def test_a_drift_at_a_steady_age_is_seen_on_the_youngest_tokens() -> None:
    history: list[dict[str, float]] = [steady(1e-3)] * 30
    (line,) = alerts(steady(6e-3), history)
    assert line.startswith(f"{OLD} is 0.006, 0.001 in the median of 20 versions: servers and learner drift apart")
    assert alerts(steady(2.5e-3), history) == []


def test_the_older_ages_of_a_bucket_are_no_drift() -> None:
    """Versions 40 and 63 of a run whose reward rose from .25 to .84: all tokens of age 3, the median of age 2."""
    key = "offpolicy/k3_age_2-3"
    for now, usual in ((1.09e-2, 2.69e-3), (4.28e-3, 1.16e-3)):
        assert alerts({key: now, "age/share_2-3": 1.0}, [{key: usual, "age/share_2-3": 1.0}] * 20) == []


def test_a_metric_of_one_version_in_five_is_compared_with_its_own_last_values() -> None:
    """11 of 60 versions trained fresh tokens: 3 or 4 of the last 20 did."""
    history = [fresh(8e-4) if version % 5 == 0 else steady(1e-3) for version in range(60)]
    (line,) = alerts(fresh(2e-3), history)
    assert line.startswith(f"{FRESH} is 0.002, 0.0008 in the median of 12 versions: ")


def test_a_few_fresh_tokens_are_chance() -> None:
    rare = fresh(1.0, share=0.001)
    assert youngest_k3(rare) == "offpolicy/k3_age_1" and alerts(rare, [fresh(8e-4)] * 30) == []


@pytest.mark.parametrize("age", K3_BY_AGE.values())
def test_one_line_for_one_drift(age: str) -> None:
    """All ages that are older rise too: only the youngest has a line."""
    ages = list(K3_BY_AGE.values())
    present = ages[ages.index(age) :]

    def version(k3: float) -> dict[str, Any]:
        return {key: k3 for key, found in K3_BY_AGE.items() if found in present} | {f"age/share_{age}": 0.5}

    (line,) = alerts(version(9e-3), [version(1e-3)] * 5)
    assert line.startswith(next(key for key, found in K3_BY_AGE.items() if found == age))


def test_without_versions_of_tokens_there_is_no_age() -> None:
    assert youngest_k3({"offpolicy/k3": 1.0}) is None and youngest_k3({FRESH: 1.0}) == FRESH
