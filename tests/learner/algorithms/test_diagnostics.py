"""Measures: sums, their combination, metrics by name, and alerts that fire when and only when they should."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from configs.flow.alerts import ALERTS, K3_BY_AGE, alerts
from configs.load import load
from learner.algorithms.advantages import ADVANTAGES, mask_overlong
from learner.algorithms.diagnostics import (
    AGES,
    BUCKETS,
    MAXIMA,
    MEANS,
    combine,
    is_max,
    limit_sums,
    mismatch_sums,
    per_sample_sums,
    sample_metrics,
    summary,
)
from learner.algorithms.inputs import LossInputs

VERSION = 70
DEFAULTS = load(["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"])


def inputs(log_ratio: list[float], versions: list[int], advantages: list[float] | None = None) -> LossInputs:
    size = len(log_ratio)
    return LossInputs(
        policy_logprobs=torch.tensor(log_ratio) - 1.0,
        behaviour=torch.full((size,), -1.0),
        advantages=torch.tensor(advantages or [1.0] * size),
        sampled=torch.tensor([version >= 0 for version in versions]),
        sequence=torch.arange(size) // 2,
        num_sequences=(size + 1) // 2,
        num_tokens=size,
        entropy=torch.full((size,), 0.5),
        versions=torch.tensor(versions),
        version=VERSION,
    ).clean()


def test_fresh_tokens_are_measured_apart() -> None:
    metrics = summary(mismatch_sums(inputs([0.1, 0.2, 0.3, 9.0], [70, 69, 67, -1])))

    def k3(x: float) -> float:
        return float(np.exp(x) - x - 1)

    assert metrics["mismatch/k3_fresh"] == pytest.approx(k3(0.1), rel=1e-5)
    assert metrics["offpolicy/k3_age_1"] == pytest.approx(k3(0.2), rel=1e-5)
    assert metrics["offpolicy/k1_age_2-3"] == pytest.approx(-0.3, rel=1e-5)
    assert metrics["offpolicy/m2_age_2-3"] == pytest.approx(0.09, rel=1e-5)
    assert metrics["offpolicy/k3"] == pytest.approx((k3(0.1) + k3(0.2) + k3(0.3)) / 3, rel=1e-5)
    assert "offpolicy/k3_age_64+" not in metrics
    assert metrics["age/token_mean"] == pytest.approx(4 / 3)
    assert metrics["age/token_max"] == 3
    assert metrics["entropy/mean"] == pytest.approx(0.5)


def test_each_age_has_its_bucket() -> None:
    ages = range(VERSION + 1)
    sums = mismatch_sums(inputs([0.0] * len(ages), [VERSION - age for age in ages]))
    expected = [sum(low <= age < high for age in ages) for low, high in zip(AGES, [*AGES[1:], 1000], strict=True)]
    assert [int(sums[f"age/{bucket}/tokens"]) for bucket in BUCKETS] == expected
    assert sum(summary(sums)[f"age/share_{bucket}"] for bucket in BUCKETS) == pytest.approx(1)


def test_tokens_of_a_policy_that_a_rewind_undid_are_not_fresh_and_have_no_age() -> None:
    """The learner trains 70 again, after a rewind to 60 from 72: versions 61 to 72 name two policies each."""
    given = replace(inputs([0.1, 5.0, 5.0, 5.0, 0.2, 9.0], [60, 61, 70, 72, 58, -1]), undone=(60, 72))
    sums = mismatch_sums(given)
    metrics = summary(sums)
    assert not [name for name in metrics if name.startswith("mismatch/")], "no token is known to be fresh"
    assert metrics["age/share_undone"] == pytest.approx(3 / 5)
    assert metrics["offpolicy/k1_age_8-15"] == pytest.approx(-0.15, rel=1e-5)
    assert metrics["age/token_mean"] == pytest.approx(11) and metrics["age/token_max"] == 12
    later = summary(mismatch_sums(replace(given, version=73, versions=torch.tensor([60, 61, 73, 72, 73, 73]))))
    assert metrics["offpolicy/k1"] == later["offpolicy/k1"], "all tokens count together, whatever their age"
    assert later["mismatch/k1_fresh"] == pytest.approx(-2.6, rel=1e-5), "later tokens are fresh again"


def test_a_version_that_is_yet_to_come_is_not_fresh() -> None:
    metrics = summary(mismatch_sums(inputs([0.1, 5.0], [70, 71])))
    assert metrics["mismatch/k1_fresh"] == pytest.approx(-0.1, rel=1e-5)
    assert metrics["age/share_undone"] == pytest.approx(1 / 2) and metrics["age/token_mean"] == 0


def test_sequence_weights_are_not_truncated() -> None:
    """Two samples with weights e^20 and 1: only one is effective."""
    metrics = summary(mismatch_sums(inputs([10.0, 10.0, 0.0, 0.0], [70] * 4)))
    assert metrics["ess/sequence"] == pytest.approx(0.5, rel=1e-6)
    assert metrics["ess/token"] == pytest.approx(0.5, rel=1e-3)
    assert metrics["ratio/max"] == pytest.approx(np.exp(10.0), rel=1e-5)


def test_on_policy_data_have_full_effective_size() -> None:
    metrics = summary(mismatch_sums(inputs([0.0] * 5, [70] * 5)))
    assert metrics["ess/sequence"] == metrics["ess/token"] == 1
    assert metrics["mismatch/k3_fresh"] == 0


def test_limits_by_sign_of_the_advantage() -> None:
    part = inputs([0.0] * 5, [70, 70, 70, 70, -1], [1.0, 1.0, -1.0, 0.0, -1.0])
    masked, capped = torch.tensor([True, False, True, True, True]), torch.tensor([False, True, False, False, True])
    metrics = summary(mismatch_sums(part) | limit_sums(part, masked, capped))
    shares = {key: value for key, value in metrics.items() if key.startswith("limit/")}
    assert shares == {
        "limit/masked_positive": 0.25,
        "limit/masked_negative": 0.25,
        "limit/capped_positive": 0.25,
        "limit/capped_negative": 0,
    }


def test_combine_adds_but_for_maxima() -> None:
    ranks = [{"versions": [3, 5], "turns": [1, 1]}, {"versions": [4], "turns": [7]}, {"versions": [], "turns": []}]
    together = combine([per_sample_sums(numbers) for numbers in ranks])
    assert together == {"samples": 3, "versions": 12, "versions_max": 5, "turns": 9, "turns_max": 7}
    assert [key for key in together if is_max(key)] == ["versions_max", "turns_max"]


def test_facts_of_samples_and_groups() -> None:
    rewards = torch.tensor([1.0, 0.1, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    groups = torch.tensor([7, 3, 7, 3, 5, 5, 9, 9])
    lengths, truncated = torch.arange(10, 18), torch.arange(8) % 4 == 0
    metrics = sample_metrics(rewards, groups, lengths, truncated)
    counted = {"versions": [1, 3], "turns": [2, 4], "segments": [1, 2]}
    metrics |= summary(per_sample_sums(counted))
    assert metrics["reward/mean"] == pytest.approx(3.1 / 8) and metrics["reward/std"] == pytest.approx(
        0.4754932, rel=1e-5
    )
    assert metrics["length/mean"] == 13.5 and metrics["length/max"] == 17 and metrics["length/truncated"] == 0.25
    assert metrics["age/versions_per_sample"] == 2 and metrics["age/versions_per_sample_max"] == 3
    assert (metrics["turns/mean"], metrics["turns/max"]) == (3, 4)
    assert (metrics["segments/mean"], metrics["segments/max"]) == (1.5, 2)
    assert metrics["groups/solved_all"] == 0.25 and metrics["groups/solved_none"] == 0.5


def test_advantages_do_not_depend_on_the_order() -> None:
    """Samples of a group need not stand together, nor groups be numbered from 0."""
    rng = np.random.default_rng(0)
    rewards, groups = torch.tensor(rng.random(12)), torch.arange(3).repeat_interleave(4) * 5
    lengths, order = torch.tensor(rng.integers(1, 30, 12)), torch.tensor(rng.permutation(12))
    for advantage in ADVANTAGES.values():
        whole = advantage(rewards, groups, lengths)
        shuffled = advantage(rewards[order], groups[order], lengths[order])
        torch.testing.assert_close(shuffled, whole[order], rtol=1e-9, atol=1e-12)


def test_no_advantage_without_a_group() -> None:
    """A lone sample has no baseline, hence no direction."""
    for name in ("group_mean", "group_std", "leave_one_out"):
        assert ADVANTAGES[name](torch.tensor([0.7]), torch.tensor([3])).item() == 0


def test_masked_truncated_answers_have_no_advantage() -> None:
    assert mask_overlong(torch.tensor([1.0, -2.0]), torch.tensor([True, False])).tolist() == [0.0, -2.0]


HEALTHY = {
    "mismatch/k3_fresh": 8e-4,
    "offpolicy/k3": 2e-3,
    "ess/sequence": 0.6,
    "ess/token": 0.99,
    "limit/masked_positive": 0.002,
    "limit/masked_negative": 0.002,
    "limit/capped_positive": 0.001,
    "length/truncated": 0.02,
    "buffer/failed_share": 0.01,
    "problems/left_out_share": 0.02,
    "buffer/quarantined": 0.0,
    "entropy/mean": 0.3,
    "gradient/skipped": 0.0,
    "gradient/zero": 0.0,
    "gradient/norm": 0.2,
    "critic/explained_variance": 0.4,
    "groups/solved_all": 0.2,
    "groups/solved_none": 0.3,
}
ILL = {
    "mismatch/k3_fresh": 2e-3,
    "offpolicy/k3": 0.06,
    "ess/sequence": 0.2,
    "ess/token": 0.4,
    "limit/masked_positive": 0.04,
    "limit/masked_negative": 0.04,
    "limit/capped_positive": 0.04,
    "length/truncated": 0.11,
    "buffer/failed_share": 0.08,
    "problems/left_out_share": 0.26,
    "buffer/quarantined": 1.0,
    "entropy/mean": 0.05,
    "gradient/skipped": 1.0,
    "gradient/zero": 1.0,
    "gradient/norm": 3.0,
    "critic/explained_variance": -0.6,
    "groups/solved_all": 0.9,
    "groups/solved_none": 0.9,
}


def test_a_healthy_run_is_silent() -> None:
    assert alerts(HEALTHY, [HEALTHY] * 30) == []
    assert alerts({}, []) == []


@pytest.mark.parametrize("key", ILL)
def test_alert(key: str) -> None:
    (line,) = alerts(HEALTHY | {key: ILL[key]}, [HEALTHY] * 30)
    assert line.startswith(f"{key} is {ILL[key]:.3g}") and "\n" not in line


def test_alerts_against_a_history_wait_for_one() -> None:
    assert alerts({"mismatch/k3_fresh": 1.0}, [HEALTHY] * 4) == []
    assert len(alerts({"mismatch/k3_fresh": 1.0}, [HEALTHY] * 5)) == 1


def test_alerts_watch_metrics_that_exist() -> None:
    known = set(MEANS) | set(MAXIMA) | {"ess/token", "ess/sequence", "gradient/norm", "length/truncated"}
    known |= {"gradient/skipped", "gradient/zero"}
    known |= {"groups/solved_all", "groups/solved_none", "buffer/failed_share", "buffer/quarantined"}
    known |= {"problems/left_out_share", "critic/explained_variance"}
    assert {key for key, *_ in ALERTS} <= known
    assert list(K3_BY_AGE.values()) == list(BUCKETS)
    assert set(ILL) == {key for key, *_ in ALERTS} - set(K3_BY_AGE) | {"mismatch/k3_fresh"}


def test_remedies_name_keys_that_exist() -> None:
    for *_, remedy in ALERTS:
        for section, key in re.findall(r"\b(batch|learner|algorithm|sampling|weights)\.(\w+)", remedy):
            assert key in type(getattr(DEFAULTS, section)).model_fields, remedy
