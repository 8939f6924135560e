"""Ranks that share rows on NVIDIA GPUs, over NCCL in bfloat16, and inputs of blocks in pinned host memory.

What two GPUs compute of shared rows is compared with one GPU's, beside a control: one GPU that packs other rows."""

from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from learner.model import attention
from learner.model.host_copies import HostCopies
from learner.train.batch import Batch
from tests.harness import shared_rows, world
from tests.harness.shared_rows import Case
from tests.harness.world import LEARNER, algorithm_of, cut, make_samples, policy_of, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs")
KERNEL = next((name for name in ("flash4", "flash") if attention.installed(name)), "varlen")
CASES: dict[str, Case] = {
    "eager": {"model": "wide", "budget": 97},
    "whole samples": {"model": "wide", "budget": 97, "algorithm": {"loss": "gspo"}},
    "fastest kernel": {"model": "wide", "budget": 97, "learner": {"attention": KERNEL}},
    "joined prompts": {"model": "wide", "batch": "groups", "budget": 161, "copied": 0.0},
    "copied prompts": {"model": "wide", "batch": "groups", "budget": 161, "copied": float("inf")},
    "one key head": {"model": "wide_key", "budget": 97},
    "compiled": {
        "model": "wide", "budget": 97, "learner": {"compile": True, "activation_checkpointing": "none"},
    },
    "compiled, offload": {
        "model": "wide", "budget": 97, "learner": {"compile": True, "activation_checkpointing": "offload"},
    },
}  # fmt: skip
BF16 = {"dtype": "bfloat16"}
TIMES = 3.0
"""The gradients of two GPUs may be so many times as far from those of one GPU as the control's are. All round in
bfloat16."""


def distance(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    """Distance of all gradients together, relative to their norm."""
    apart = sum(float((ours[name].double() - wanted.double()).square().sum()) for name, wanted in theirs.items())
    whole = sum(float(wanted.double().square().sum()) for wanted in theirs.values())
    return (apart / whole) ** 0.5


@two_gpus
def test_two_gpus_that_share_rows_train_as_one(tmp_path: Path) -> None:
    shared_rows.write_models(tmp_path)
    cases = [BF16 | {"learner": {"attention": "varlen"}} | case for case in CASES.values()]
    cases = [case | {"learner": {"attention": "varlen"} | case["learner"]} for case in cases]
    others = [case | {"budget": case["budget"] + 60} for case in cases]
    world.together("share_rows", 1, tmp_path, cases=[*cases, *others], size=1, device="cuda")
    alone = torch.load(tmp_path / "shared_rows-0.pt")
    world.together("share_rows", 2, tmp_path, cases=cases, size=2, device="cuda")
    for rank in range(2):
        for number, (name, found) in enumerate(
            zip(CASES, torch.load(tmp_path / f"shared_rows-{rank}.pt"), strict=True)
        ):
            theirs, control = alone[number], alone[number + len(cases)]
            ours, limit = (
                distance(found["gradients"], theirs["gradients"]),
                distance(control["gradients"], theirs["gradients"]),
            )
            print(f"rank {rank}, {name}: gradients {ours:.2g}, control {limit:.2g}")
            assert ours <= TIMES * max(limit, 5e-3), name
            assert found["crossed"] > 0
            near = (found["logprobs"] - theirs["logprobs"]).abs()
            assert float(near.mean()) < 0.05, name
            for key in ("tokens", "tokens_computed", "samples", "flops"):
                assert found["metrics"][key] == theirs["metrics"][key], (name, key)
            assert found["metrics"]["gradient/norm"] == pytest.approx(theirs["metrics"]["gradient/norm"], rel=0.03)


@pytest.fixture
def gpu() -> Iterator[DeviceMesh]:
    """A world of one rank on the first GPU."""
    torch.cuda.set_device(0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60)
    )
    yield init_device_mesh("cuda", (1,))
    dist.destroy_process_group()


def test_inputs_in_host_memory_change_nothing(tmp_path: Path, gpu: DeviceMesh) -> None:
    """Every bit of the gradients is that of `block`, over several microbatches."""
    model, found = tiny_model(tmp_path, dtype=torch.bfloat16), []
    for way in ("block", "offload"):
        keys = {"activation_checkpointing": way, "attention": "varlen"}
        policy = policy_of(model, gpu, LEARNER.model_copy(update=keys))
        batch = Batch.from_part(cut(make_samples(), 3, [24], 0), 64, policy.costs.quadratic)
        assert len(batch.microbatches) > 2
        algorithm_of(policy, 64).backward(policy, batch)
        found.append({name: gradient.clone() for name, gradient in world.gradients(policy).items()})
    block, offload = found
    assert block.keys() == offload.keys()
    for name, gradient in block.items():
        torch.testing.assert_close(offload[name], gradient, rtol=1e-3, atol=1e-5)


def test_inputs_leave_the_gpu(gpu: DeviceMesh) -> None:
    """About three of eight blocks' inputs of 64 MiB are there at a time, and those that come back are the ones that
    went."""
    copies, size, width = HostCopies(), 64 << 20, 1024
    weights = [torch.nn.Parameter(torch.eye(width, device="cuda") * (1 + i / 8)) for i in range(8)]
    start = torch.randn(size // 4 // width, width, device="cuda", requires_grad=True)

    def passed(run) -> tuple[int, list[torch.Tensor]]:
        hidden = start.clone()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for weight in weights:
            hidden = run(lambda x, weight=weight: (x @ weight).sin(), hidden)
        torch.cuda.synchronize()
        kept = torch.cuda.memory_allocated() - before
        return kept, list(torch.autograd.grad(hidden.square().sum(), [start, *weights]))

    kept, wanted = passed(partial(checkpoint, use_reentrant=False))
    left, got = passed(copies.checkpoint)
    assert kept > 7 * size and left < 3.5 * size
    for ours, theirs in zip(got, wanted, strict=True):
        assert torch.equal(ours, theirs)
