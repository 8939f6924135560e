"""Checkpoints of several copies of the model: on a shared folder, on the first node alone, and moved between layouts."""

from pathlib import Path

import pytest
import torch

from learner.saved.manifest import complete
from tests.harness import rank, world
from tests.harness.world import tiny_model

CUTS = [3, 9, 12, 0]


def as_undisturbed(folder: Path, whole: dict, versions: int) -> None:
    """The run that moved has the losses and the last weights of the one that did not."""
    moved = torch.load(folder / "moved.pt")
    assert len(moved["records"]) == versions
    for got, want in zip(moved["records"], whole["records"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3, abs=1e-5)
    for name, tensor in whole["weights"].items():
        if "k_proj.bias" not in name:  # attention does not depend on it: Adam blows up the rounding of its gradient
            assert (moved["weights"][name] - tensor).norm() < 1e-3 * tensor.norm(), name


def test_checkpoints_move_between_layouts(tmp_path: Path, mesh) -> None:
    """2 x 2 -> 1 x 4 -> 4 x 1 on a shared folder, then on a disk of each of two nodes: 2 x 2 -> 4 x 1 -> 2 x 2, where
    only the first has any, and a fresh optimizer gets its state over the network."""
    tiny_model(tmp_path / "model", tied=True)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "model").symlink_to(tmp_path / "model")
    whole = rank.run(tmp_path / "alone", mesh, 0, 0, 6, [24])
    shared = [{"start": 2 * i, "stop": 2 * i + 2, "cuts": CUTS, "shards": n} for i, n in enumerate((2, 4, 1))]
    world.together("moved", 4, tmp_path, stages=shared)
    as_undisturbed(tmp_path, whole, 6)
    assert complete(tmp_path / "checkpoints") == [4, 6]
    nodes = [stage | {"shards": n, "node_ranks": 2} for stage, n in zip(shared, (2, 1, 2), strict=True)]
    world.together("moved", 4, tmp_path, stages=nodes)
    as_undisturbed(tmp_path, whole, 6)
    assert complete(tmp_path / "node0" / "checkpoints") == [4, 6]
    assert not any((tmp_path / "node1").iterdir())
