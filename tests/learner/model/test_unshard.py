"""Whole weights from their shards: exact for every shape and number of ranks, and few collectives for many weights."""

from pathlib import Path

import pytest
import torch

from learner.model.microbatch import one_document
from tests.harness import world
from tests.harness.world import policy_of, tiny_model

SHAPES = {
    "even": [12, 5],
    "uneven": [7, 4],
    "fewer rows than ranks": [1, 3],
    "last rank has none": [4, 2],
    "vector": [5],
    "experts": [6, 2, 3],
}
FIRST = 2 * 60
"""Bytes of the first of them in bfloat16: with so many together the first goes alone, the last too, and the others at
once."""


@pytest.mark.parametrize(("limit", "gathers"), [(1 << 20, 1), (FIRST, 3)], ids=["together", "bounded"])
@pytest.mark.parametrize(("ranks", "on"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_each_rank_gets_each_weight(tmp_path: Path, ranks: int, on: int, limit: int, gathers: int) -> None:
    """Exactly, in order, scaled before it is rounded. (4, 2): two copies, of which one gathers."""
    world.together("wholes", ranks, tmp_path, shapes=SHAPES, on=on, limit=limit)
    for rank, (got, found) in enumerate(torch.load(tmp_path / "wholes.pt")):
        assert list(got) == (list(SHAPES) if rank < on else [])
        assert found == (gathers if got and on > 1 else 0)
        for at, (name, values) in enumerate(world.numbered(SHAPES).items()):
            assert not got or torch.equal(got[name], (values * (1 + 2 * (at % 2))).bfloat16()), name


def test_what_a_forward_pass_has_gathered_is_refused(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    policy(one_document([1, 2, 3]))
    with pytest.raises(AssertionError, match="publish after a backward pass or a score"):
        list(policy.full_weights())
