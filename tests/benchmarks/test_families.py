"""Every family of models is trained exactly, or refused by name before anything starts: none wrongly, and none
with a traceback. One process, and two ranks beside it, for all families of a lane."""

from collections.abc import Iterator
from typing import Any

import pytest

from benchmarks.models.families import config_of, families
from configs.schema import ModelConfig
from learner.certify.certifier import certify_config
from learner.certify.ranks import Pair
from tests.harness.certified import two_ranks
from tests.harness.world import alone

FAST = ("llama 3.1 (llama3 rope)", "mistral 0.1 (window)", "qwen3_moe", "granite 3 (multipliers)", "internvl")


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two_ranks() as pair:
        yield pair


def judge(name: str, pair: Pair) -> None:
    """Fail unless the family is exact or refused by name."""
    with alone() as mesh:
        found = certify_config(config_of(name), ModelConfig(path=name), True, mesh, pair)
    if found.refused:
        assert "Traceback" not in found.refused and "\n" not in found.refused
        return
    assert found.faults == []
    compared = [check for check in found.checks if check.verdict == "holds"]
    assert {"two ranks = one", "two ranks = one, gradient"} <= {check.what for check in compared}
    assert len(compared) >= 11, [check.cells() for check in found.checks]
    assert all(check.limit <= 1e-3 for check in compared)


@pytest.mark.parametrize("name", FAST)
def test_a_family_is_exact_or_refused(name: str, pair: Pair) -> None:
    judge(name, pair)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(families().keys() - FAST))
def test_every_family_is_exact_or_refused(name: str, pair: Pair) -> None:
    judge(name, pair)


def test_the_table_has_enough_families() -> None:
    assert len(families()) >= 80


def test_qwen_and_llama_are_exact(pair: Pair) -> None:
    """So that a table in which everything is refused does not pass."""
    for name in ("qwen2.5, tied", "llama with biases"):
        with alone() as mesh:
            found: Any = certify_config(config_of(name), ModelConfig(path=name), True, mesh, pair)
        assert found.holds and sum(check.verdict == "holds" for check in found.checks) == 19
