"""Whole weights from their shards: exact for every shape and number of ranks, and few collectives for many weights."""

from pathlib import Path

import pytest
import torch

from learner.model import unshard
from learner.model.lora.adapter import Factor
from tests.harness import world

SHAPES = {
    "even": [12, 5],
    "uneven": [7, 4],
    "fewer rows than ranks": [1, 3],
    "last rank has none": [4, 2],
    "vector": [5],
    "experts": [6, 2, 3],
}


@pytest.mark.parametrize(("ranks", "on"), [(1, 1), (2, 2), (3, 3), (4, 2)])
def test_each_rank_gets_each_weight(tmp_path: Path, ranks: int, on: int) -> None:
    """Exactly, in order, scaled before it is rounded; all of them with one all-gather. (4, 2): two copies."""
    world.together("wholes", ranks, tmp_path, shapes=SHAPES, on=on)
    for got, gathers in torch.load(tmp_path / "wholes.pt"):
        assert list(got) == list(SHAPES)
        for at, (name, values) in enumerate(world.numbered(SHAPES).items()):
            assert torch.equal(got[name], (values * (1 + at % 2)).bfloat16()), name
        assert gathers == (on > 1)


def test_what_one_gather_brings_is_bounded(mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go together up to a number of bytes, in order; a larger one goes alone."""
    runs: list[list[str]] = []
    gathered = unshard._gathered

    def watched(run: list[Factor], *where: object):
        runs.append([weight.name for weight in run])
        return gathered(run, *where)

    monkeypatch.setattr(unshard, "_gathered", watched)
    monkeypatch.setattr(unshard, "RUN_BYTES", 2 * 30)
    rows = {"a": 10, "b": 20, "c": 1, "d": 40, "e": 30, "f": 1}
    module = world.sharded({name: torch.ones(n) for name, n in rows.items()}, mesh)
    weights = [Factor(name, parameter, 1.0) for name, parameter in module.named_parameters()]
    assert {name: len(x) for name, x in unshard.whole(weights, torch.device("cpu"), torch.bfloat16)} == rows
    assert runs == [["a", "b"], ["c"], ["d"], ["e"], ["f"]]
    assert list(unshard.whole([], torch.device("cpu"), torch.bfloat16)) == []
