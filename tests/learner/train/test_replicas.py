"""Several copies of the model, each over some ranks: the same step as one rank, one reduction between copies a batch."""

from pathlib import Path

import pytest
import torch

from learner.train.batch import Batch
from tests.harness import world
from tests.harness.world import algorithm_of, cut, make_samples, policy_of, tiny_model

CUTS = [3, 9, 12, 0]
"""Samples of each rank: the last has nothing."""


def test_copies_change_nothing(tmp_path: Path, mesh) -> None:
    """4 ranks as 1 x 4, 2 x 2 and 4 x 1: gradients, their norm, and the weights after a clipped step of AdamW."""
    model = tiny_model(tmp_path / "model", tied=True)
    policy = policy_of(model, mesh)
    algorithm = algorithm_of(policy, 10**6)
    algorithm.backward(policy, Batch.from_part(cut(make_samples(), 3, [24], 0), 10**6, policy.attention_cost))
    want = world.gradients(policy)
    norm, after = algorithm.optimizer.update(3)["gradient/norm"], world.weights(policy)
    world.together("replicated", 4, tmp_path, copies=[4, 2, 1], cuts=CUTS, budget=40)
    found, every = torch.load(tmp_path / "replicated.pt")
    for shards, (grads, metrics, weights, reduced, microbatches, _) in found.items():
        assert grads.keys() == want.keys() and microbatches > 2
        for name, gradient in grads.items():
            assert (gradient - want[name]).norm() <= 1e-5 * want[name].norm(), (shards, name)
            if "k_proj.bias" not in name:  # attention does not depend on it: Adam blows up the rounding of its gradient
                assert (weights[name] - after[name]).norm() <= 1e-4 * after[name].norm(), (shards, name)
        assert metrics["gradient/norm"] == pytest.approx(norm, rel=1e-5)
        # one for each of two blocks and the rest, whatever the number of microbatches
        assert reduced == (0 if shards == 4 else 3)
    of_copies = [[copy for _, copy in rank] for rank in every]
    assert of_copies == [[0, rank // 2, rank] for rank in range(4)]
    assert all([number for number, _ in rank] == [0, 3, 3] for rank in every)
