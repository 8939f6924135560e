"""AdamW over the sharded master weights; the learning rate depends only on the version. All ranks have the same global
norm, so all skip a step whose gradient is not finite."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from configs.schema import LearnerConfig
from learner.model.policy import Policy
from learner.train import collectives
from learner.train.garbage import exempt_long_lived
from learner.train.offloaded_adam import OffloadedAdamW

OPTIONS = ("lr", "betas", "eps", "weight_decay")
FLOOR = 0.1
"""Share of the learning rate at which `linear` and `cosine` end."""


class Optimizer:
    """Each version is one `update`, applied or skipped, or a `hold`. The schedule begins after `held` versions."""

    def __init__(self, policy: Policy, config: LearnerConfig, versions: int, held: int = 0) -> None:
        self.config, self.versions, self.held = config, versions - held, held
        options: dict[str, Any] = {name: getattr(config, name) for name in OPTIONS}
        trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
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
        parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        finite = bool(norm.isfinite())
        rate = self.learning_rate(version)
        if finite:
            clip_grads_with_norm_(parameters, self.config.max_grad_norm, norm)
            for group in self.adamw.param_groups:
                group["lr"] = rate
            self.adamw.step()
        overflowed = 0.0 if finite else self._overflowed(parameters)
        self.adamw.zero_grad()
        exempt_long_lived()  # compiled code and the optimizer's state exist by now
        skipped = {"gradient/skipped": float(not finite), "gradient/overflowed": overflowed}
        skipped["gradient/zero"] = float(finite and not norm)
        return {"lr": rate} | skipped | ({"gradient/norm": float(norm)} if finite else {})

    def hold(self) -> dict[str, float]:
        norm = self._cleared()
        finite = bool(norm.isfinite())
        skipped = {"gradient/skipped": float(not finite), "gradient/overflowed": 0.0, "gradient/zero": float(not norm)}
        return {"lr": 0.0} | skipped | ({"gradient/norm": float(norm)} if finite else {})

    def discard(self) -> bool:
        """Clear the gradients; returns whether their norm is finite, on all ranks alike."""
        return bool(self._cleared().isfinite())

    def _cleared(self) -> torch.Tensor:
        parameters = [p for group in self.adamw.param_groups for p in group["params"]]
        norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
        self.adamw.zero_grad()
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def restore_options(self) -> None:
        """Take betas, eps and weight decay from the run file in place of the checkpoint's."""
        for group in self.adamw.param_groups:
            group.update({name: self.adamw.defaults[name] for name in ("betas", "eps", "weight_decay")})

    def _overflowed(self, parameters: Sequence[torch.nn.Parameter]) -> float:
        """1 if every part of the gradient is finite on every rank."""
        parts = [p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None]
        (unfit,) = collectives.all_reduce_max(not all(bool(part.isfinite().all()) for part in parts))
        return float(not unfit)
