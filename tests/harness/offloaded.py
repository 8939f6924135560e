"""A learner that keeps its optimizer's state in host memory beside one that does not: shared by tests in one process
and by `tests.harness.world.together`'s case `offloaded`."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from configs.schema import LearnerConfig, ModelConfig
from learner.mesh import make_mesh
from learner.model.master_weights import rows_of
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm
from tests.harness import world

FIGURES = ("gradient/norm", "lr", "entropy/mean", "tokens_sampled")
START = 3


def learner_of(offload: Any, **keys: Any) -> LearnerConfig:
    return world.LEARNER.model_copy(update={"cpu_offload": offload, "weight_decay": 0.1} | keys)


def parts_of(model: ModelConfig, mesh: DeviceMesh, learner: LearnerConfig, **options: Any) -> tuple[Policy, Algorithm]:
    """`options`: of the algorithm."""
    policy = world.policy_of(model, mesh, learner)
    optimizer = Optimizer(policy, learner, versions=10)
    config = world.ALGORITHM.model_copy(update=options)
    return policy, Algorithm(config, optimizer, 64, max_tokens=30)


def step(policy: Policy, algorithm: Algorithm, versions: range, cuts: list[int], rank: int = 0) -> list[Any]:
    """Train; some figures of each version, which has several microbatches."""
    found = []
    for version in versions:
        figures = algorithm.step(policy, world.cut(world.make_samples(version), version, cuts, rank))
        found.append({name: figures[name] for name in FIGURES if name in figures})
    return found


def rows(policy: Policy, algorithm: Algorithm) -> dict[str, torch.Tensor]:
    """This rank's rows of the fp32 weights, in host memory or not, and of both moments."""
    named = [(name, p) for name, p in policy.model.named_parameters() if p.requires_grad]
    masters = policy.masters.views(policy.masters.values) if policy.masters else [rows_of(p) for _, p in named]
    found = {name: one.clone() for (name, _), one in zip(named, masters, strict=True)}
    for name, parameter in named:
        state = algorithm.optimizer.adamw.state[parameter]
        found |= {f"{name} {kind}": rows_of(state[kind]).clone() for kind in ("exp_avg", "exp_avg_sq")}
    return found


def offloaded(folder: Path, model: dict[str, Any], on: int, cuts: list[int]) -> None:
    """For each way, on `on` ranks for each copy: figures, whole weights, and whether this rank's rows are those of the
    way without offloading; `offloaded.pt`."""
    rank, mesh, found = dist.get_rank(), make_mesh("cpu", on), []
    first: dict[str, torch.Tensor] = {}
    for offload in (False, "optimizer"):
        policy, algorithm = parts_of(ModelConfig.model_validate(model), mesh, learner_of(offload))
        figures = step(policy, algorithm, range(START, START + 2), cuts, rank)
        held = rows(policy, algorithm)
        first = first or held
        same = all(torch.equal(first[name], held[name]) for name in first)
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, same)
        found.append((figures, world.weights(policy), every))
    if rank == 0:
        torch.save(found, folder / "offloaded.pt")
