"""Whole weights from their shards: exact for every shape and number of ranks, and few collectives for many weights."""

from pathlib import Path

import pytest
import torch

from learner.model.microbatch import one_document
from learner.weights.buckets import Buckets
from learner.weights.plan import Plan
from learner.weights.rows import RowPool
from tests.harness import world
from tests.harness.counted_calls import CountedCalls
from tests.harness.world import policy_of, tiny_model

SHAPES = {
    "even": [12, 5],
    "uneven": [7, 4],
    "fewer rows than ranks": [1, 3],
    "last rank has none": [4, 2],
    "vector": [5],
    "experts": [6, 2, 3],
}
GATHERS = {1 << 20: 1, 2 * 60: 3}
"""All-gathers for all of them, by bytes together: with those of the first in bfloat16 it goes alone, the last too."""


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(("ranks", "on"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_each_rank_gets_each_weight(tmp_path: Path, ranks: int, on: int) -> None:
    """Exactly, in order, scaled before it is rounded. (4, 2): two copies, of which one gathers."""
    world.together("wholes", ranks, tmp_path, shapes=SHAPES, on=on, limits=list(GATHERS))
    want = {name: values * (1 + 2 * (at % 2)) for at, (name, values) in enumerate(world.random_weights(SHAPES).items())}
    every = torch.load(tmp_path / "wholes.pt")
    assert every[on:] == [[]] * (ranks - on)
    for found in every[:on]:
        assert [gathers for _, gathers in found] == [number * (on > 1) for number in GATHERS.values()]
        for got, _ in found:
            assert list(got) == list(want)
            assert all(torch.equal(got[name], values.bfloat16()) for name, values in want.items())


def test_what_a_forward_pass_has_gathered_is_refused(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    before = {name: weight.clone() for name, weight in policy.full_weights()}
    policy(one_document([1, 2, 3]))
    with pytest.raises(AssertionError, match="publish after a backward pass or a score"):
        list(policy.full_weights())
    policy.gathering.reshard()
    assert all(torch.equal(weight, before[name]) for name, weight in policy.full_weights())


def test_publishing_takes_few_launches(tmp_path: Path, mesh) -> None:
    """Not one for each weight."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    copy = Buckets(Plan.of(policy.weight_specs(), 1 << 20), policy.device)
    rows = RowPool(Plan.of(policy.weight_specs(), 1 << 20, (), 1), 0, policy.device)
    copy.fill(policy.full_weights())
    rows.fill(policy.local_weights())
    with CountedCalls() as calls:
        copy.fill(policy.full_weights())
        rows.fill(policy.local_weights())
    copies = [name for name in calls.names if "copy" in name]
    assert copies == ["aten::_foreach_copy_"] * 3
