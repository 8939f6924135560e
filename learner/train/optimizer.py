"""AdamW over the sharded master weights; the learning rate depends only on the version. All ranks have the same global
norm, so all skip a step whose gradient is not finite."""

import math
import time
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm

from configs.load import ConfigError
from configs.schema import LearnerConfig
from learner.model.host_copies import Fetched
from learner.model.policy import Policy
from learner.train import collectives
from learner.train.garbage import exempt_long_lived
from learner.train.offloaded_adam import OffloadedAdamW

OPTIONS = ("lr", "betas", "eps", "weight_decay")
FLOOR = 0.1
"""Share of the learning rate at which `linear` and `cosine` end."""
CLIP_EPS = 1e-6
"""torch's `clip_grad_norm_` divides by the norm plus this."""


class QueuedUpdate(NamedTuple):
    """An update that the GPU applies when it comes to it."""

    norm: Fetched
    """[] float32"""
    rate: float
    seconds: float
    """Spent in queueing it."""


def step_clipped(adamw: torch.optim.AdamW, norm: Tensor, most: float) -> None:
    """Apply gradients of `norm`, [] float32 on their device, divided so that it is at most `most`; change nothing if it
    is not finite. torch's GradScaler hands both to a fused optimizer in the same way."""
    adamw.grad_scale = ((norm + CLIP_EPS) / most).clamp(min=1.0)  # type: ignore[attr-defined]
    adamw.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    adamw.step()
    del adamw.grad_scale, adamw.found_inf  # type: ignore[attr-defined]


def try_clipping(device: torch.device, optimizer: type[torch.optim.AdamW] = torch.optim.AdamW) -> None:
    """Raise ConfigError unless this torch's AdamW clips and skips a step as `step_clipped` asks it to. A release with
    other names for the attributes would not clip, and raise no error."""
    weight = torch.nn.Parameter(torch.ones(1, device=device))
    adamw = optimizer([weight], lr=0.5, betas=(0.5, 0.5), fused=True)
    for norm in (math.inf, 4.0):
        weight.grad = torch.full_like(weight, 3.0)
        step_clipped(adamw, torch.tensor(norm, device=device), 1.0)
    step, first = (float(adamw.state[weight][name]) for name in ("step", "exp_avg"))
    if step != 1 or not math.isclose(first, 0.5 * 3.0 / 4.0, rel_tol=1e-5):
        problem = f"torch {torch.__version__}: AdamW does not clip or skip a step of a trial ({step:g}, {first:.3g})"
        raise ConfigError([f"{problem}; install a torch between the versions that pyproject.toml names"])


class Optimizer:
    """Each version is one `update`, applied or skipped, or a `hold`. The schedule begins after `held` versions."""

    def __init__(self, policy: Policy, config: LearnerConfig, versions: int, held: int = 0) -> None:
        self.config, self.versions, self.held = config, versions - held, held
        options: dict[str, Any] = {name: getattr(config, name) for name in OPTIONS}
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
        try_clipping(policy.device)
        self.adamw: torch.optim.AdamW = (
            OffloadedAdamW(policy.masters, **options)
            if policy.masters
            else torch.optim.AdamW(trained, fused=True, **options)
        )

    def learning_rate(self, version: int) -> float:
        warmup, version = self.config.warmup_versions, version - self.held
        if version < warmup:
            return self.config.lr * (version + 1) / warmup
        progress = min((version - warmup) / max(self.versions - 1 - warmup, 1), 1.0)
        decay = {"constant": 1.0, "linear": 1 - progress, "cosine": (1 + math.cos(math.pi * progress)) / 2}
        return self.config.lr * (FLOOR + (1 - FLOOR) * decay[self.config.schedule])

    def update(self, version: int) -> dict[str, float]:
        """Apply and clear the gradients; all ranks have the same metrics. A collective."""
        return self.finish(self.queue(version))

    def queue(self, version: int) -> QueuedUpdate:
        """Queue an update, which the GPU skips if the norm is not finite, and do not wait for it. A collective."""
        began, norm, rate = time.perf_counter(), self._norm(), self.learning_rate(version)
        fetched = Fetched(norm)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        if isinstance(self.adamw, OffloadedAdamW):
            norm.item()  # waits for the passes, whose time is not the update's
            began = time.perf_counter()
        step_clipped(self.adamw, norm, self.config.max_grad_norm)
        return QueuedUpdate(fetched, rate, time.perf_counter() - began)

    def finish(self, queued: QueuedUpdate) -> dict[str, float]:
        """Clear the gradients; the metrics of the update. Waits for the norm alone. A collective."""
        norm = queued.norm.wait()
        finite = bool(norm.isfinite())
        overflowed = 0.0 if finite else self._overflowed()
        self.adamw.zero_grad()
        exempt_long_lived()  # compiled code and the optimizer's state exist by now
        return {"lr": queued.rate} | _norm_metrics(norm, overflowed)

    def hold(self) -> dict[str, float]:
        norm = self._norm()
        # a skipped step creates AdamW's state; torch would do so for a checkpoint, and count that as a step
        step_clipped(self.adamw, torch.full_like(norm, math.inf), self.config.max_grad_norm)
        self.adamw.zero_grad()
        return {"lr": 0.0} | _norm_metrics(norm.cpu())

    def discard(self) -> bool:
        """Clear the gradients; returns whether their norm is finite, on all ranks alike."""
        finite = bool(self._norm().isfinite())
        self.adamw.zero_grad()
        return finite

    def _parameters(self) -> list[torch.nn.Parameter]:
        return [p for group in self.adamw.param_groups for p in group["params"]]

    def _norm(self) -> Tensor:
        norm = get_total_norm([p.grad for p in self._parameters() if p.grad is not None])
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def restore_options(self) -> None:
        """Take betas, eps and weight decay from the run file in place of the checkpoint's."""
        for group in self.adamw.param_groups:
            group.update({name: self.adamw.defaults[name] for name in ("betas", "eps", "weight_decay")})

    def _overflowed(self) -> float:
        """1 if every part of the gradient is finite on every rank."""
        grads = [p.grad for p in self._parameters() if p.grad is not None]
        parts = [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]
        (unfit,) = collectives.all_reduce_max(not all(bool(part.isfinite().all()) for part in parts))
        return float(not unfit)


def _norm_metrics(norm: Tensor, overflowed: float = 0.0) -> dict[str, float]:
    finite = bool(norm.isfinite())
    found = {"gradient/skipped": float(not finite), "gradient/overflowed": overflowed}
    found["gradient/zero"] = float(finite and not norm)
    return found | ({"gradient/norm": float(norm)} if finite else {})
