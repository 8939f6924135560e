"""What `needs_first_pass` says is what the learner's step does: a forward pass more for m2po, for no other loss."""

from pathlib import Path

import pytest
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms.losses import LOSSES, needs_first_pass
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.train.batch import Batch
from tests.harness.world import LEARNER, algorithm_of, cut, make_samples, tiny_model


class Counting(Policy):
    """Counts the passes without gradient."""

    passes = 0

    def score(self, microbatch: Microbatch, temperature: float | None = None) -> Tensor:
        self.passes += 1
        return super().score(microbatch, temperature)


@pytest.mark.parametrize("proximal", ["recompute", "loglinear"])
def test_only_m2po_costs_a_pass(tmp_path: Path, mesh, proximal: str) -> None:
    entries, policy = make_samples(), Counting(tiny_model(tmp_path), LEARNER, mesh)
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 64, policy.costs.quadratic)
    assert len(batch.microbatches) > 1
    for loss in LOSSES:
        config, before = AlgorithmConfig(loss=loss, proximal=proximal), policy.passes
        algorithm_of(policy, 64, config).backward(policy, batch)
        assert policy.passes - before == (len(batch.microbatches) if needs_first_pass(config) else 0), loss
