"""What the learner's tests share: tiny models, batches, a process group of one rank here or of several processes."""

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from buffer.ledger.types import SampleStats
from buffer.wire.batches import sample_rows
from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats
from configs.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

ROOT = Path(__file__).parents[2]
VOCABULARY = 64
FORKS = multiprocessing.get_context("forkserver")
"""Context of one process that imports all that ranks need, once, and forks each of them."""
FORKS.set_forkserver_preload(["tests.harness.rank", "tests.harness.forked_learner"])
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs the usual way forbids that it forks
ALGORITHM = AlgorithmConfig(is_cap=1.5)
GATHERS: tuple[str | int, ...] = ("pass", 0, 1, "batch")
"""Values of `learner.gather`, of which each gathers and reduces less often than the one before."""
LEARNER = LearnerConfig(lr=1e-2, warmup_versions=2, head_chunk_tokens=7, max_grad_norm=0.1)


def tiny_model(folder: Path, tied: bool = False, dtype: torch.dtype = torch.float32, **changes: int) -> ModelConfig:
    """A random Qwen2 with 2 layers and grouped heads of dimension 32, in `folder`. `changes`: of its config."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
        "initializer_range": 0.2,
    }
    config = Qwen2Config(**shape | changes)
    Qwen2ForCausalLM(config).to(dtype).save_pretrained(folder)
    return ModelConfig(path=str(folder), dtype=str(dtype).removeprefix("torch."))


def plain(model: ModelConfig) -> Any:
    """The same model, run by transformers."""
    return AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="eager").train()


def policy_of(model: ModelConfig, mesh: DeviceMesh, learner: LearnerConfig = LEARNER, **options: Any) -> Policy:
    return Policy(model, learner, mesh, **options)


def algorithm_of(policy: Policy, budget: int, algorithm: AlgorithmConfig = ALGORITHM, **options: Any) -> Algorithm:
    return Algorithm(algorithm, Optimizer(policy, LEARNER, versions=10), budget, max_tokens=30, **options)


class Entry(NamedTuple):
    """A sample of a batch: its item, dispatch version, the rewards of its group, and its packed bytes."""

    item: int
    dispatched: int
    rewards: list[float]
    sample: bytes


def make_samples(version: int = 3, groups: int = 6, size: int = 4, long: int = 24) -> list[Entry]:
    """A batch of groups with prompts and answers of many lengths, some tokens stale."""
    draw = np.random.default_rng(version)
    entries = []
    for item in range(groups):
        rewards = [float(x) for x in draw.integers(0, 3, size) / 2]
        for index in range(size):
            prompt, answer = int(draw.integers(1, 6)), int(draw.integers(1, long))
            sample = make_sample(draw, prompt, answer, version, rewards[index])
            entries.append(Entry(item, max(version - 2, 0), rewards, sample.pack()))
    return entries


def scaled(entries: list[Entry], scale: float) -> list[Entry]:
    """The same batch with all rewards multiplied by `scale`."""
    found = []
    for entry in entries:
        sample = Sample.unpack(entry.sample)
        sample = sample.model_copy(update={"reward": scale * sample.reward})
        found.append(Entry(entry.item, entry.dispatched, [scale * one for one in entry.rewards], sample.pack()))
    return found


def make_groups(version: int = 3) -> list[Entry]:
    """A batch of groups of 1 to 7 whose samples share their prompts of 1 to 39 tokens: one group has two prompts, one a
    prompt of one token, some samples have several turns, some answers one token."""
    draw = np.random.default_rng(1)
    entries = []
    for item, size in enumerate((5, 1, 7, 3, 4, 2, 6)):
        prompts = [draw.integers(0, VOCABULARY, n) for n in draw.integers(1, 40, 1 + (item == 4))]
        if item == 5:
            prompts = [prompts[0][:1]]
        rewards = [float(x) for x in draw.integers(0, 3, size) / 2]
        for index in range(size):
            answer = 1 if (item, index) in ((0, 2), (3, 0), (3, 1)) else int(draw.integers(1, 6 if item == 5 else 24))
            prompt = prompts[index % len(prompts)]
            turns = (slice(answer // 3, answer // 2),) if item in (2, 3) and answer > 6 else ()
            sample = make_sample(draw, len(prompt), answer, version, rewards[index], prompt, turns)
            entries.append(Entry(item, max(version - 2, 0), rewards, sample.pack()))
    return entries


def make_sample(
    draw: np.random.Generator,
    prompt: int,
    answer: int,
    version: int,
    reward: float,
    text: np.ndarray | None = None,
    given: Sequence[slice] = (),
) -> Sample:
    """`text`: the prompt, if not a random one; `given`: parts of the answer that the policy did not sample."""
    sampled = np.array([0] * prompt + [1] * answer, np.uint8)
    for part in given:
        sampled[prompt:][part] = 0
    behaviour = np.where(sampled, -draw.exponential(2.0, len(sampled)), 0)
    versions = np.where(sampled, version - draw.integers(0, 3, len(sampled)).clip(max=version), -1)
    tokens = draw.integers(0, VOCABULARY, len(sampled)).astype(np.int32)
    tokens[:prompt] = tokens[:prompt] if text is None else text
    return Sample(
        tokens=Array.of(tokens),
        sampled=Array.of(sampled),
        behaviour_logprobs=Array.of(behaviour.astype(np.float32)),
        versions=Array.of(versions.astype(np.int32)),
        reward=reward,
        finish="length" if answer > 20 else "stop",
        metrics={"right": reward},
    )


def cut(entries: Sequence[Entry], version: int, cuts: Sequence[int], rank: int) -> Part:
    """Part `rank` of the batch `entries`; rank r gets `cuts[r]` samples."""
    start = sum(cuts[:rank])
    positions = range(start, start + cuts[rank])
    groups = [(one.item, one.dispatched, [(one.sample, figures(one.sample))]) for one in entries]
    return Part(
        version=version,
        rank=rank,
        world=len(cuts),
        rows=sample_rows(groups),
        positions=Array.of(np.array(positions, np.int64)),
        samples=[entries[position].sample for position in positions],
    )


def figures(data: bytes) -> SampleStats:
    """Figures of a sample, also of one whose reward is larger than any may be."""
    sample = Sample.unpack(data)
    return replace(
        sample_stats(sample.model_copy(update={"reward": 0.0, "turn_rewards": []}).pack()), reward=sample.reward
    )


def gradients(policy: Policy) -> dict[str, torch.Tensor]:
    """Unsharded gradients, on every rank."""
    return {name: p.grad.full_tensor().clone() for name, p in policy.model.named_parameters() if p.grad is not None}


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in policy.full_weights()}


@contextmanager
def alone() -> Iterator[DeviceMesh]:
    """A process group of one rank in this process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=60))
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def random_weights(shapes: dict[str, list[int]]) -> dict[str, torch.Tensor]:
    """A random tensor of each shape, the same in every process."""
    draw = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def sharded(weights: dict[str, torch.Tensor], mesh: DeviceMesh) -> torch.nn.Module:
    """A module with these parameters, under FSDP."""
    module = torch.nn.Module()
    for name, values in weights.items():
        module.register_parameter(name, torch.nn.Parameter(values))
    fully_shard(module, mesh=mesh)
    return module


def together(case: str, ranks: int, folder: Path, **arguments: Any) -> None:
    """Run `case` of tests/harness/rank.py in a process group of `ranks` processes; raises if one fails."""
    ended = outcome(case, ranks, folder, **arguments)
    assert not any(code for code, _ in ended), "\n".join(errors for _, errors in ended)[-4000:]


def outcome(case: str, ranks: int, folder: Path, port: int = 0, **arguments: Any) -> list[tuple[int, str]]:
    """Run it likewise; exit code and stderr of each rank. `port`: of the store to meet in, if there is one already."""
    from tests.harness.rank import main  # imports this module

    store = None if port else TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port if store else port)}
    shared |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    with TemporaryDirectory() as place:
        errors, started = [Path(place, f"{rank}.txt") for rank in range(ranks)], []
        try:
            for rank, file in enumerate(errors):
                environment = dict(os.environ) | shared | {"RANK": str(rank)}
                process = FORKS.Process(target=main, args=(case, folder, arguments, environment, file))
                process.start()
                started.append(process)
            join(started)
            assert any(p.exitcode for p in started) or not any(p.is_alive() for p in started), "a rank did not end"
        finally:  # also where pytest's own limit ends the wait: Python would wait for them at its end, for ever
            for process in started:
                process.kill()
                process.join()
        return [(process.exitcode or 0, file.read_text()) for process, file in zip(started, errors, strict=True)]


def join(processes: Sequence[BaseProcess], limit_s: float = 600, others_s: float = 60) -> None:
    """Wait until all ended. Once one has failed, wait at most `others_s` for those that wait for it."""
    until = time.monotonic() + limit_s
    while (alive := [process.sentinel for process in processes if process.is_alive()]) and time.monotonic() < until:
        wait(alive, until - time.monotonic())
        if any(process.exitcode for process in processes):
            until = min(until, time.monotonic() + others_s)
