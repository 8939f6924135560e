"""For how long is the learner's GPU idle within a version, while the CPU does what, and which kernels does it run?

`python -m benchmarks.idle` needs one GPU, `torchrun --nproc-per-node 2 -m benchmarks.idle --shape 7b` two, of which it
shows rank 0's: whole versions without servers and buffer, at what `auto` takes for a run file without keys for speed.
Each version judges its batch, packs it, trains on it and copies the weights for servers, as the learner's loop does.
Batches have 16 groups of 16 samples, prompts of 128 tokens and answers of 512; weights are random. First `--versions`
are timed, then `--traced` are recorded by torch's profiler, after one more, at whose end the GPU has work queued as at
the end of any other: idle is the GPU when no kernel and no copy runs. Exchanges of ranks run beside other kernels.
`--gather pass,auto` measures these values of `learner.gather` one after the other. Without a GPU the shape `tiny` runs,
and nothing is traced. Prints one table; writes JSON.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.learner.cases import SHAPES
from benchmarks.shared_prompts import SAMPLES, groups_of
from benchmarks.weights.table import ResultRow, progress, write
from buffer.keys import load_server_keys, make_keys
from buffer.wire.protocol import Part
from configs.publishing import copies_over, publishes_rows
from configs.schema import Config
from learner.__main__ import sending_ranks
from learner.model.flops import peak
from learner.model.memory import GIB, gpu_memory
from learner.model.policy import Policy
from learner.sound import bounds_of, judged
from learner.starting import decide_budget, decide_gather, decide_speed
from learner.train.batch import Batch
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm
from learner.weights.sender.publish import Follower, Sender
from learner.weights.sender.row_rank import RowRank

GROUPS, PROMPT, ANSWER = 16, 128, 512
WARM_UP, BATCHES = 5, 4
REST = "ends the step, or logs"
MFU = 0.55
KERNELS = {"products of matrices": ("nvjet", "gemm"), "attention": ("flash", "attn"), "exchanges of ranks": ("nccl",)}
"""Parts of the names of kernels."""
H200 = 989e12
"""The peak FLOP/s assumed without a GPU."""
Span = tuple[int, int]
"""Nanoseconds since 1970: begin and end."""


class Phases:
    """What the CPU did when."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Span]] = []

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        began = time.time_ns()
        yield
        self.spans.append((name, (began, time.time_ns())))

    def idle(self, busy: Sequence[Span]) -> dict[str, float]:
        """Seconds between the GPU's `busy` spans, by what the CPU did."""
        found = dict[str, float]()
        for (_, begin), (end, _) in pairwise(busy):
            left = (end - begin) / 1e9
            for name, (first, last) in self.spans:
                if (both := min(end, last) - max(begin, first)) > 0:
                    found[name] = found.get(name, 0.0) + both / 1e9
                    left -= both / 1e9
            found[REST] = found.get(REST, 0.0) + left
        return found


def busy_within(spans: Sequence[Span], window: Span) -> list[Span]:
    """Join `spans` that touch, cut to `window`, whose two ends count as busy."""
    first, last = window
    busy = [(first, first)]
    for begin, end in sorted([*spans, (last, last)]):
        begin, end = (min(max(edge, first), last) for edge in (begin, end))
        if begin <= busy[-1][1]:
            busy[-1] = busy[-1][0], max(busy[-1][1], end)
        else:
            busy.append((begin, end))
    return busy


class TimedAlgorithm(Algorithm):
    phases: Phases

    def pack(self, policy: Policy, part: Part) -> Batch:
        with self.phases.of("packs"):
            return super().pack(policy, part)

    def backward(self, *args: Any, **options: Any) -> Any:
        with self.phases.of("launches the passes"):
            return super().backward(*args, **options)


class Learner:
    """What the learner's loop calls, without servers and buffer."""

    def __init__(self, shape: str, folder: Path, groups: int, answer: int, gather: str | int = "auto") -> None:
        gpu = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
        world = dist.get_world_size()
        self.mesh = mesh = init_device_mesh(self.device.type, (world,), mesh_dim_names=("shard",))
        config = decide_speed(run_file(shape, folder, groups, answer, gather), gpu_memory(self.device), mesh, 0)
        self.config = config = decide_gather(config, self.device, mesh, 0)
        self.estimate, self.budget = decide_budget(
            config, self.device, mesh, False, copies_over(config, world, mesh.get_rank()), 0
        )
        self.policy, self.phases = Policy(config.model, config.learner, mesh, random=True), Phases()
        optimizer = Optimizer(self.policy, config.learner, 1000)
        self.algorithm = TimedAlgorithm(config.algorithm, optimizer, self.budget, answer)
        self.algorithm.phases = self.phases
        self.sender = sender_of(config, self.policy, mesh, folder)
        self.bounds = bounds_of(self.policy, None)

    def version(self, part: Part, number: int) -> dict[str, float]:
        """Metrics of one version."""
        with self.phases.of("judges"):
            if found := judged(part, self.bounds):
                raise AssertionError(f"groups that cannot be trained: {found}")
        stats = self.algorithm.step(self.policy, part)
        with self.phases.of("publishes"):
            self.sender.publish(self.policy, number)
        return stats


def sender_of(config: Config, policy: Policy, mesh: DeviceMesh, folder: Path) -> Sender | RowRank | Follower:
    """This rank's end of the weights wire, to which no server comes."""
    specs, frozen, given = policy.weight_specs(), policy.frozen_names(), config.weights
    ranks = sending_ranks(policy, mesh) if publishes_rows(config, mesh.size()) else None
    if mesh.get_rank() == 0:
        keys = load_server_keys(make_keys(folder / "keys"), "learner")
        return Sender(specs, given, 0, policy.device, frozen=frozen, ranks=ranks, keys=keys)
    if ranks:
        return RowRank(specs, given, 0, policy.device, ranks, frozen=frozen)
    return Follower(specs, given, 0, frozen=frozen)


def run_file(shape: str, folder: Path, groups: int, answer: int, gather: str | int) -> Config:
    """A run file without other keys for speed than `gather`."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return Config.model_validate(
        {"model": {"path": str(folder)}, "data": {"train": "none", "max_prompt_tokens": PROMPT},
         "reward": {"function": "none"}, "sampling": {"max_tokens": answer}, "run": {"versions": 1000},
         "batch": {"groups": groups, "samples": SAMPLES},
         "learner": {"ranks": dist.get_world_size(), "gather": gather},
         "weights": {"publish": "rows" if dist.get_world_size() > 1 else "auto"}}  # as `auto` if it sees weights' files
    )  # fmt: skip


def timed(learner: Learner, batches: Sequence[Part], versions: int) -> tuple[list[float], dict[str, float]]:
    """Seconds of each version, as the CPU sees them, and the last one's metrics."""
    seconds, stats = list[float](), dict[str, float]()
    for number in range(WARM_UP + versions):
        began = time.perf_counter()
        stats = learner.version(batches[number % len(batches)], number)
        seconds.append(time.perf_counter() - began)
        progress(f"version {number}: {seconds[-1]:.3f} s")
    return seconds[WARM_UP:], stats


def traced(
    learner: Learner, batches: Sequence[Part], versions: int
) -> tuple[float, dict[str, float], dict[str, float]]:
    """Mean seconds of a version; of its idle GPU, by what the CPU did; of its kernels, by their kind."""
    from torch.profiler import ProfilerActivity

    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as found:
        learner.version(batches[-1], WARM_UP)
        learner.phases.spans.clear()
        began = time.time_ns()
        for number in range(versions):
            learner.version(batches[number % len(batches)], WARM_UP + 1 + number)
        ended = time.time_ns()
        torch.cuda.synchronize()
    events = [e for e in found.profiler.kineto_results.events() if "CUDA" in str(e.device_type())]  # type: ignore[union-attr]
    spans = [(e.start_ns(), e.start_ns() + e.duration_ns()) for e in events]
    idle = learner.phases.idle(busy_within(spans, (began, ended)))
    kinds = dict[str, float]()
    for event in events:
        if event.start_ns() >= began:
            kind = kind_of(event.name())
            kinds[kind] = kinds.get(kind, 0.0) + event.duration_ns() / 1e9
    each = [{name: spent / versions for name, spent in parts.items()} for parts in (idle, kinds)]
    return (ended - began) / 1e9 / versions, each[0], each[1]


def kind_of(kernel: str) -> str:
    """The kind of `kernel`, a name that the profiler gives it."""
    name = kernel.lower()
    return next((kind for kind, parts in KERNELS.items() if any(part in name for part in parts)), "others, copies")


def rows_of(args: argparse.Namespace, learner: Learner) -> list[ResultRow]:
    """Time whole versions, and trace some."""
    words = SHAPES[args.shape]["vocab_size"]
    own = learner.mesh.get_rank(), learner.mesh.size()
    batches = [groups_of(PROMPT, args.answer, args.groups, words, seed, 0, *own) for seed in range(BATCHES)]
    seconds, stats = timed(learner, batches, args.versions)
    gpu = learner.device.type == "cuda"
    limit = peak(torch.cuda.get_device_name()) if gpu else H200
    case, each = f"gather {learner.config.learner.gather}, {args.shape}", median(seconds)
    mfu = stats["flops"] / each / learner.mesh.size() / (limit or H200)
    rows = [
        ResultRow("a version, median", each, "s", case=case),
        ResultRow("largest microbatch", stats["tokens_microbatch_max"], "tokens", case=case),
        ResultRow("tokens/s", stats["tokens"] / each, "1/s", case=case),
        ResultRow("MFU of whole versions", mfu, "", "wanted", MFU, case),
    ]
    if not gpu:
        return rows
    most = torch.cuda.max_memory_allocated() / GIB
    estimate = learner.estimate.total(int(stats["tokens_microbatch_max"])) / GIB
    rows.append(ResultRow("peak memory", most, "GiB", "estimate", estimate, case))
    whole, idle, kinds = traced(learner, batches, args.traced)
    total = sum(idle.values())
    rows += [
        ResultRow("idle GPU, share of a version", total / whole, "", case=case),
        ResultRow("MFU if it were never idle", mfu / (1 - total / whole), "", "with the above", mfu, case),
    ]
    named = {f"  idle while the CPU: {name}": spent for name, spent in sorted(idle.items(), key=lambda one: -one[1])}
    named |= {f"  kernels: {name}": spent for name, spent in sorted(kinds.items(), key=lambda one: -one[1])}
    return rows + [ResultRow(name, spent * 1e3, "ms", case=case) for name, spent in named.items()]


def measured(args: argparse.Namespace, gather: str) -> list[ResultRow]:
    """Measure one value of `learner.gather`, then free the memory for the next."""
    with tempfile.TemporaryDirectory() as folder:
        way = int(gather) if gather.isdigit() else gather
        learner = Learner(args.shape, Path(folder), args.groups, args.answer, way)
        try:
            return rows_of(args, learner)
        finally:
            learner.sender.close()
            del learner
            gc.unfreeze()  # the step exempted the learner's objects
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()


def main() -> None:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser("python -m benchmarks.idle")
    parser.add_argument("--shape", default="1.5b" if gpu else "tiny", choices=SHAPES)
    parser.add_argument("--groups", type=int, default=GROUPS if gpu else 2)
    parser.add_argument("--answer", type=int, default=ANSWER if gpu else 16, help="tokens of an answer")
    parser.add_argument("--gather", default="auto", help="values of learner.gather, apart by commas")
    parser.add_argument("--versions", type=int, default=12 if gpu else 2)
    parser.add_argument("--traced", type=int, default=4)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/idle.json")
    args = parser.parse_args()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    if gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", **alone)
    rows = [row for gather in args.gather.split(",") for row in measured(args, gather)]
    if dist.get_rank() == 0:
        write(args.out, "idle", [row.line() for row in rows])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
