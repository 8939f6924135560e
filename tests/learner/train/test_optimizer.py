"""An update is torch's AdamW behind torch's clipping, and is queued before anybody knows the norm."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.overrides import TorchFunctionMode

from configs.load import ConfigError
from learner.train.optimizer import OPTIONS, Optimizer, try_clipping
from tests.harness.world import LEARNER, policy_of, tiny_model


@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_an_update_is_that_of_torch(tmp_path: Path, mesh, scale: float) -> None:
    """Also the second one, which has moments; equal to the bit if nothing is clipped."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    optimizer = Optimizer(policy, LEARNER.model_copy(update={"weight_decay": 0.1}), versions=10)
    ours = [parameter.to_local() for parameter in policy.parameters()]
    theirs = [torch.nn.Parameter(weights.clone()) for weights in ours]
    reference = torch.optim.AdamW(theirs, fused=True, **{name: getattr(optimizer.config, name) for name in OPTIONS})
    random = torch.Generator().manual_seed(0)
    for version in range(2):
        for parameter, other in zip(policy.parameters(), theirs, strict=True):
            other.grad = scale * torch.randn(other.shape, generator=random)
            parameter.grad = torch.full_like(parameter, 0.0)
            parameter.grad.to_local().copy_(other.grad)
        norm = torch.nn.utils.clip_grad_norm_(theirs, optimizer.config.max_grad_norm)
        assert (norm > optimizer.config.max_grad_norm) == (scale > 1)
        reference.param_groups[0]["lr"] = optimizer.learning_rate(version)
        reference.step()
        metrics = optimizer.update(version)
        assert metrics["gradient/norm"] == pytest.approx(float(norm), rel=1e-6)
        for weights, expected in zip(ours, theirs, strict=True):
            torch.testing.assert_close(weights, expected.detach(), rtol=1e-6 * (scale > 1), atol=1e-7 * (scale > 1))


def test_a_queued_update_keeps_the_gradients_until_it_is_finished(tmp_path: Path, mesh) -> None:
    """They tell whether a part of them is not finite, or their norm alone."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    optimizer = Optimizer(policy, LEARNER, versions=10)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    before = [parameter.to_local().clone() for parameter in policy.parameters()]
    queued = optimizer.queue(3)
    assert all(bool((parameter.grad.to_local() == 1e30).all()) for parameter in policy.parameters())
    metrics = optimizer.finish(queued)
    assert (metrics["gradient/skipped"], metrics["gradient/overflowed"]) == (1, 1)
    assert all(torch.equal(p.to_local(), old) for p, old in zip(policy.parameters(), before, strict=True))
    assert all(parameter.grad is None for parameter in policy.parameters())


class IgnoresScale(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del self.grad_scale  # type: ignore[has-type]
        super().step(closure)
        self.grad_scale = None


class IgnoresFlag(torch.optim.AdamW):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        del self.found_inf  # type: ignore[has-type]
        super().step(closure)
        self.found_inf = None


def test_a_torch_that_does_not_clip_or_skip_is_refused() -> None:
    try_clipping(torch.device("cpu"))
    for broken in (IgnoresScale, IgnoresFlag):
        with pytest.raises(ConfigError) as error:
            try_clipping(torch.device("cpu"), broken)
        (line,) = error.value.problems
        assert line.startswith(f"torch {torch.__version__}: AdamW does not clip or skip a step")


def test_a_checkpoint_during_a_warm_up_counts_no_step(tmp_path: Path, mesh) -> None:
    """torch would count one, and the first update would be smaller."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    optimizer = Optimizer(policy, LEARNER, versions=10, held=1)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    before = [parameter.to_local().clone() for parameter in policy.parameters()]
    optimizer.hold()
    get_state_dict(policy.model, optimizer.adamw)
    assert {float(state["step"]) for state in optimizer.adamw.state.values()} == {0.0}
    assert all(torch.equal(p.to_local(), old) for p, old in zip(policy.parameters(), before, strict=True))


class WaitsOnce(TorchFunctionMode):
    """The first number that is read waits for as long as a GPU computes what was queued before."""

    def __init__(self) -> None:
        super().__init__()
        self.waited = False

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in (torch.Tensor.item, torch.Tensor.__bool__) and not self.waited:
            self.waited = True
            time.sleep(0.5)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("offload", [False, "optimizer"])
def test_an_update_does_not_take_the_time_of_the_passes(tmp_path: Path, mesh, offload: Any) -> None:
    """Also where it waits for them."""
    learner = LEARNER.model_copy(update={"cpu_offload": offload})
    policy = policy_of(tiny_model(tmp_path), mesh, learner)
    optimizer = Optimizer(policy, learner, versions=10)
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    optimizer.update(0)  # what the first one allocates
    for parameter in policy.parameters():
        parameter.grad = torch.full_like(parameter, 1.0)
    with WaitsOnce() as waits:
        queued = optimizer.queue(1)
    assert waits.waited == bool(offload) and queued.seconds < 0.4
