"""Several copies of the model, each over some ranks: the same steps as one rank takes, one reduction between copies a
batch, and checkpoints that move between layouts."""

import json
from pathlib import Path

import pytest
import torch

from configs.checkpoint_files import complete
from learner.train.batch import Batch
from tests.harness import rank, world
from tests.harness.world import algorithm_of, cut, make_samples, policy_of, tiny_model

CUTS = [3, 9, 12, 0]
"""Samples of each of 4 ranks: the last has nothing."""


@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(1200)  # four ranks
@pytest.mark.parametrize(
    ("copies", "on_shared", "on_nodes"),
    [
        pytest.param([2], (), (2, 1), id="few"),
        pytest.param([4, 2, 1], (2, 4, 1), (2, 1, 2), id="all", marks=pytest.mark.long),
    ],
)
def test_copies_change_nothing(
    tmp_path: Path, mesh, copies: list[int], on_shared: tuple[int, ...], on_nodes: tuple[int, ...]
) -> None:
    """Gradients and a step on four ranks, for several numbers of ranks per copy of the model.

    Then two versions in each of two or three stages. Copies over `on_nodes` ranks are on two nodes without a shared
    folder: only the first node has checkpoints. Copies over `on_shared` ranks share a folder.
    """
    tiny_model(tmp_path / "model", tied=True)
    stages = [{"start": 2 * stage, "stop": 2 * stage + 2, "cuts": CUTS} for stage in range(len(on_nodes))]
    shared = [stage | {"shards": number} for stage, number in zip(stages, on_shared, strict=False)]
    apart = [stage | {"shards": number, "node_ranks": 2} for stage, number in zip(stages, on_nodes, strict=True)]
    world.together(
        "replicas", 4, tmp_path, copies=copies, cuts=CUTS, budget=40, moves=[apart, shared] if shared else [apart]
    )
    a_step_is_that_of_one_rank(tmp_path, mesh, copies)
    (tmp_path / "alone").mkdir()
    (tmp_path / "alone" / "model").symlink_to(tmp_path / "model")
    last = stages[-1]["stop"]
    whole = rank.run(tmp_path / "alone", mesh, 0, 0, last, [24])
    for number in range(1 + bool(shared)):
        stages_are_one_run(torch.load(tmp_path / f"moved{number}.pt"), whole)
    assert complete(tmp_path / "node0" / "checkpoints") == [last - 2, last]
    assert complete(tmp_path / "checkpoints") == ([last - 2, last] if shared else [])
    assert not any((tmp_path / "node1").iterdir())
    for number in range(4):
        shared, newer = json.loads((tmp_path / f"refused-{number}.json").read_text())
        assert "learner.checkpoint_on: shared, but rank 3 does not see what rank 0 writes into" in shared
        assert "first_node" in shared
        assert f"learner.checkpoint_on: first_node, but the node of rank 2 has checkpoint {last}" in newer
        assert "that of rank 0 has 0; start that machine as the first node" in newer


def a_step_is_that_of_one_rank(folder: Path, mesh, copies: list[int]) -> None:
    policy = policy_of(world.ModelConfig(path=str(folder / "model"), dtype="float32"), mesh)
    algorithm = algorithm_of(policy, 10**6)
    algorithm.backward(policy, Batch.from_part(cut(make_samples(), 3, [24], 0), 10**6, policy.costs.quadratic))
    want = world.gradients(policy)
    norm, after = algorithm.optimizer.update(3)["gradient/norm"], world.weights(policy)
    found, every = torch.load(folder / "replicated.pt")
    for layout, (grads, metrics, weights, _, microbatches, _) in found.items():
        assert grads.keys() == want.keys() and microbatches > 2
        for name, gradient in grads.items():
            assert (gradient - want[name]).norm() <= 1e-5 * want[name].norm(), (layout, name)
        close(weights, after, 1e-4)
        assert metrics["gradient/norm"] == pytest.approx(norm, rel=1e-5)
    # one for each of two blocks and one for the rest, whatever the number of microbatches, with each `learner.gather`
    layouts = [number for number in copies for _ in world.GATHERS]
    assert all([number for number, _ in rank] == [0 if on == 4 else 3 for on in layouts] for rank in every)
    assert [[copy for _, copy in rank] for rank in every] == [[rank // on for on in layouts] for rank in range(4)]


def stages_are_one_run(moved: dict, whole: dict) -> None:
    for got, want in zip(moved["records"], whole["records"], strict=True):
        assert got["loss"] == pytest.approx(want["loss"], rel=1e-3, abs=1e-5)
    close(moved["weights"], whole["weights"], 1e-3)


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, tensor in theirs.items():
        if "k_proj.bias" not in name:  # attention does not depend on it: Adam blows up the rounding of its gradient
            assert (ours[name] - tensor).norm() <= tolerance * tensor.norm(), name
