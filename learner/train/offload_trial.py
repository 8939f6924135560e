"""Tries `learner.cpu_offload: optimizer` at the start, before a weight of the model is loaded. Two bfloat16 layers with
offloading, in one portion and in many, must be trained bit for bit as fp32 layers without, also by a step that is
clipped and past one that is skipped. A collective."""

import gc
import logging
import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.optim import AdamW

from configs.load import ConfigError
from configs.schema import LearnerConfig
from learner.model.master_weights import PORTION, MasterWeights, keep_wide_gradients, narrow, rows_of, unlock
from learner.train import collectives
from learner.train.offloaded_adam import OffloadedAdamW
from learner.train.optimizer import step_clipped

log = logging.getLogger(__name__)
WIDTH, FACTOR, TOKENS = 512, 4, 16
MICROBATCHES = 2
NORMS = 0.5, 2.0, math.inf, 4.0
"""Gradient norms given to the four steps. The limit is 1: the second step halves gradients, the third is skipped."""
SMALL = 1 << 14
"""Numbers in a small portion, 64 KiB: two layers lie in many of them."""
OPTIONS: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
KEY, REMEDY = "learner.cpu_offload: optimizer", "set it to true or false"


def check_offload(learner: LearnerConfig, mesh: DeviceMesh, device: torch.device) -> None:
    """Raise ConfigError if the run offloads its optimizer and the trial fails. If it fails on one rank alone, the
    watchdog ends the others."""
    if learner.cpu_offload == "optimizer" and device.type == "cuda":
        try_offload(mesh, device)
        gc.collect()
        torch.cuda.empty_cache()  # what is free is counted next
        log.info(
            "cpu_offload: optimizer trained two layers bit for bit as without it, with torch %s", torch.__version__
        )


def try_offload(
    mesh: DeviceMesh, device: torch.device, optimizer: type[OffloadedAdamW] = OffloadedAdamW, width: int = WIDTH
) -> None:
    """Raise ConfigError unless the trial succeeds."""
    problem = f"{KEY}: with torch {torch.__version__}"
    try:
        expected = _trained_plainly(mesh, device, width)
        found = [_trained_apart(mesh, device, width, portion, optimizer) for portion in (PORTION, SMALL)]
    except (AttributeError, TypeError, RuntimeError) as error:  # torch has changed, or memory is not locked
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        raise ConfigError([f"{problem} the trial of a step failed ({why}); {REMEDY}"]) from None
    differences = [_difference(one, other) for each in found for one, other in zip(expected, each, strict=True)]
    (largest,) = collectives.all_reduce_max(max(differences))
    if largest:
        differs = f"weights of a trial differ from those without offloading, by {largest:.3g} at most"
        raise ConfigError([f"{problem} {differs}; {REMEDY}"])


def _trained_plainly(mesh: DeviceMesh, device: torch.device, width: int) -> list[Tensor]:
    model = _sharded(mesh, width, narrowed=False)
    _fill(model, device, width)
    _train(model, AdamW(model.parameters(), fused=True, **OPTIONS), device, width)
    weights = [rows_of(parameter) for parameter in model.parameters()]
    return [*weights, *(rows.bfloat16() for rows in weights)]


def _trained_apart(
    mesh: DeviceMesh, device: torch.device, width: int, portion: int, optimizer: type[OffloadedAdamW]
) -> list[Tensor]:
    model = _sharded(mesh, width, narrowed=True)
    masters = MasterWeights(model, device, portion)
    _fill(model, device, width, masters)
    keep_wide_gradients(model, masters.parameters)  # type: ignore[arg-type]  # fully_shard has made it an FSDPModule
    adamw = optimizer(masters, **OPTIONS)
    _train(model, adamw, device, width)
    found = [rows.clone() for rows in masters.views(masters.values)]
    for memory in adamw.held:
        unlock(memory, device)
    return [*found, *(rows_of(parameter) for parameter in model.parameters())]


def _sharded(mesh: DeviceMesh, width: int, narrowed: bool) -> nn.Module:
    layers = nn.Linear(width, FACTOR * width, device="meta"), nn.Linear(FACTOR * width, width, device="meta")
    model = nn.Sequential(*layers)
    if narrowed:
        narrow(model, torch.bfloat16)
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for module in (*layers, model):
        fully_shard(module, mesh=mesh, mp_policy=mixed)
    return model


def _fill(model: nn.Module, device: torch.device, width: int, masters: MasterWeights | None = None) -> None:
    filled, draw = {}, torch.Generator(device).manual_seed(0)
    for name, parameter in model.named_parameters():
        whole = torch.randn(parameter.shape, generator=draw, device=device) / math.sqrt(width)
        shard = distribute_tensor(whole, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]
        if masters:
            masters.keep(name, rows_of(shard))
        filled[name] = nn.Parameter(shard.to(parameter.dtype))
    model.load_state_dict(filled, assign=True)


def _train(model: nn.Module, optimizer: AdamW, device: torch.device, width: int) -> None:
    draw = torch.Generator(device).manual_seed(1)
    for norm in NORMS:
        for _ in range(MICROBATCHES):
            model(torch.randn(TOKENS, width, generator=draw, device=device)).float().square().sum().backward()
        step_clipped(optimizer, torch.tensor(norm, device=device), 1.0)
        optimizer.zero_grad()


def _difference(one: Tensor, other: Tensor) -> float:
    if one.dtype != other.dtype:
        return math.inf
    if one.numel() == 0 or torch.equal(one.cpu(), other.cpu()):
        return 0.0
    largest = float((one.cpu().double() - other.cpu().double()).abs().max())
    return largest if math.isfinite(largest) else math.inf
