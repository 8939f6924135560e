"""What does computing each shared prefix once gain on agents' episodes? Whole steps three ways, in turn, on one policy.

`python -m benchmarks.trees` needs one GPU: the learner's `Algorithm.step` with a Qwen2.5 shape and random weights, on
a group of episodes. `forks`: 12 turns each, of which three sets of two turns begin again from an earlier turn.
`tau`: the calls of a recorded episode of tau-bench, each with thinking that the next call's history lacks, so that each
call is a segment of its own (`TRACE`). The ways: each segment apart, each prompt once (`learner.share_prompts:
prompts`), each prefix once (`true`). All run on the same samples; their tokens are counted alike. Exactness is shown
beside a control, segments apart in microbatches half as large. Without a GPU the shape `tiny` runs, with lengths
divided by 16. Prints one table; writes JSON.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.learner.cases import SHAPES
from benchmarks.learner.ours import OURS, timed
from benchmarks.weights.table import ResultRow, progress, write
from buffer.wire.batches import parts
from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats
from configs.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from learner.model.gather_choice import choose_gather
from learner.model.memory import RankRoom, gpu_memory
from learner.model.policy import Policy
from learner.train.batch import Batch
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

CHARACTERS = 4
"""Characters of TRACE that count as one token."""
POLICY = 6219
"""Characters of tau-bench's policy for airlines (`tau_bench/envs/airline/wiki.md` of sierra-research/tau-bench); its
tools, which come with it, are left out."""
ASKED = 72
"""Characters of the user's first message."""
TRACE = (
    *((93, 33), (480, 200), (60, 960), (80, 590), (480, 108), (80, 2700), (830, 46), (35, 5), (270, 50), (470, 73)),
    *((290, 0), (35, 4), (250, 50), (470, 640), (560, 43)),
)
"""Characters of each call's answer and of what came back, rounded: task 0 of `historical_trajectories/
gpt-4o-airline.json` of sierra-research/tau-bench."""
THINKING = 240
"""Tokens of a call's thinking: runs of Qwen3 on tau-bench had 2,610 output tokens in 8.7 calls a task
(`COST_ESTIMATES.md`, commit 1d3bd8d), so 300 a call, of which some 60 can be seen."""
FORK_PROMPT, FORK_ANSWER, FORK_REPLY = 2000, 200, 400
FORKS = (range(6), (0, 1, 6, 7), (0, 1, 2, 3, 8, 9), (0, 1, 2, 3, 4, 10, 11))
"""The turns on each path of the other episode: its first path has six turns, each fork begins after one of them."""
TARGETS = {"tau": 2.5}
"""Least gain over segments apart."""


class TokenRun(NamedTuple):
    """Tokens of a segment that were sampled, or were given."""

    tokens: np.ndarray
    sampled: bool


class SharingWay(NamedTuple):
    """How a step shares."""

    prompts: bool
    trees: bool


WAYS = {
    "apart": SharingWay(False, False),
    "prompts once": SharingWay(True, False),
    "prefixes once": SharingWay(True, True),
}
Segment = list[TokenRun]


def forks(draw: np.random.Generator, prompt: np.ndarray, vocabulary: int, scale: int) -> Iterator[Segment]:
    """The segments of an episode of 12 turns with three forks. A turn is sampled on its last path, or where it ends."""
    turns = [
        [draw.integers(0, vocabulary, max(length // scale, 1)) for length in (FORK_ANSWER, FORK_REPLY)]
        for _ in range(12)
    ]
    seen: set[int] = set()
    for path in FORKS:
        runs = [TokenRun(prompt, False)]
        for turn in path:
            answer, reply = turns[turn]
            runs += [TokenRun(answer, turn not in seen), TokenRun(reply, False)]
        seen |= {*path}
        yield runs[:-1]


def tau(draw: np.random.Generator, prompt: np.ndarray, vocabulary: int, scale: int) -> Iterator[Segment]:
    """The segments of an episode of TRACE, one for each call."""

    def text(tokens: float) -> np.ndarray:
        return draw.integers(0, vocabulary, max(round(tokens / scale), 1))

    history = prompt
    for answer, reply in TRACE:
        visible = text(answer / CHARACTERS)
        yield [TokenRun(history, False), TokenRun(np.concatenate([text(THINKING), visible]), True)]
        history = np.concatenate([history, visible, text(reply / CHARACTERS)])


CASES = {"forks": (forks, FORK_PROMPT), "tau": (tau, (POLICY + ASKED) // CHARACTERS)}
"""Episodes, and tokens of what all episodes of a group begin with."""


def group_of(case: str, samples: int, vocabulary: int, scale: int, version: int) -> Part:
    """A batch of one group of episodes."""
    draw = np.random.default_rng(version)
    make, prompt = CASES[case]
    begin = draw.integers(0, vocabulary, max(prompt // scale, 2))
    packed = [sample_of(list(make(draw, begin, vocabulary, scale)), float(i % 2)) for i in range(samples)]
    return parts(version, 1, [(0, version, [(data, sample_stats(data)) for data in packed])])[0]


def sample_of(segments: Sequence[Segment], reward: float) -> bytes:
    """An episode of random tokens as the buffer stores it."""
    runs = [run for segment in segments for run in segment]
    sampled = np.concatenate([np.full(len(run.tokens), run.sampled) for run in runs])
    lengths = [sum(len(run.tokens) for run in segment) for segment in segments]
    return Sample(
        tokens=Array.of(np.concatenate([run.tokens for run in runs]).astype(np.int32)),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -5.0, 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
        reward=reward,
        finish="stop",
        starts=np.cumsum([0, *lengths[:-1]]).tolist(),
    ).pack()


def exact(
    policy: Policy, algorithm: Algorithm, part: Part, budget: int, way: SharingWay
) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the sampled tokens, by turn and place, and gradients of all parameters."""
    key_room = policy.sharing.key_room if way.trees else None
    batch = Batch.from_part(part, budget, policy.costs.quadratic, way.prompts, key_room=key_room)
    found: dict[tuple[int, int], float] = {}
    for row in batch.microbatches:
        scores = policy.score(policy.place(row)).cpu()[row.scored].tolist()
        keys = zip(row.turn[row.scored].tolist(), row.positions[row.predictor].tolist(), strict=True)
        found |= dict(zip(keys, scores, strict=True))
    algorithm.backward(policy, batch)
    gradients = [p.grad.full_tensor().clone() for p in policy.model.parameters()]  # type: ignore[union-attr]
    algorithm.optimizer.adamw.zero_grad()
    return torch.tensor([found[key] for key in sorted(found)]), gradients


def exactness(policy: Policy, algorithm: Algorithm, part: Part, case: str) -> list[ResultRow]:
    """Rows of the largest differences from segments apart, beside those of the control."""
    budget, apart = algorithm.budget, WAYS["apart"]
    plain = exact(policy, algorithm, part, budget, apart)
    found: dict[str, list[float]] = {"log-probabilities": [], "gradients": []}
    for size, way in ((budget, WAYS["prefixes once"]), (budget // 2, apart)):
        logprobs, gradients = exact(policy, algorithm, part, size, way)
        found["log-probabilities"].append(float((logprobs - plain[0]).abs().max()))
        relative = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(gradients, plain[1], strict=True)]
        found["gradients"].append(max(relative))
    return [
        ResultRow(f"largest difference of {what}", 1e6 * ours, "1e-6", "apart, other microbatches", 1e6 * control, case)
        for what, (ours, control) in found.items()
    ]


def measured(policy: Policy, algorithm: Algorithm, case: str, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of the measured steps of each way; the first step of each warms up."""
    key_room, vocabulary = policy.sharing.key_room, policy.model.config.vocab_size
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    for step in range(args.steps + 1):
        for number, (name, way) in enumerate(WAYS.items()):
            policy.sharing.prompts, policy.sharing.key_room = way.prompts, key_room if way.trees else None
            part = group_of(case, args.samples, vocabulary, args.scale, len(WAYS) * step + number)
            steps[name].append(timed(policy, algorithm, part))
            progress(f"{case}, {name}: {steps[name][-1]['seconds']:.2f} s")
    policy.sharing.prompts, policy.sharing.key_room = True, key_room
    keys = ("seconds", "flops", "tokens", "gib")
    return {name: {key: median(row[key] for row in rows[1:]) for key in keys} for name, rows in steps.items()}


def compare(policy: Policy, algorithm: Algorithm, case: str, args: argparse.Namespace) -> list[ResultRow]:
    """The rows of a case."""
    found = measured(policy, algorithm, case, args)
    apart, trees = found["apart"], found["prefixes once"]
    tokens = f"{case}: {args.samples} episodes, {apart['tokens']:,.0f} tokens"
    rows = []
    for name, figures in found.items():
        rows.append(ResultRow(f"step, {name}", figures["seconds"], "s", "apart", apart["seconds"], tokens))
        rows.append(ResultRow(f"FLOPs, {name}", figures["flops"] / 1e12, "T", "apart", apart["flops"] / 1e12, tokens))
        rows.append(ResultRow(f"peak memory, {name}", figures["gib"], "GiB", "apart", apart["gib"], tokens))
    for name in ("apart", "prompts once"):
        target = TARGETS.get(case) if args.shape == "1.5b" and name == "apart" else None
        gain, fewer = found[name]["seconds"] / trees["seconds"], found[name]["flops"] / trees["flops"]
        rows.append(ResultRow(f"prefixes once, times as fast as {name}", gain, "", "target", target, tokens))
        rows.append(ResultRow(f"prefixes once, times fewer FLOPs than {name}", fewer, "", case=tokens))
    part = group_of(case, min(args.samples, 2), policy.model.config.vocab_size, args.scale, 99)
    return rows + exactness(policy, algorithm, part, tokens)


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b" if gpu else "tiny")
    parser.add_argument("--cases", default=",".join(CASES))
    parser.add_argument("--samples", type=int, default=8, help="episodes of a group")
    parser.add_argument("--steps", type=int, default=3, help="measured of each way, after one that warms up")
    parser.add_argument("--scale", type=int, default=1 if gpu else 16, help="what all lengths are divided by")
    parser.add_argument("--tokens", type=int, default=32768 if gpu else 2048, help="of a microbatch")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of `learner`, as JSON")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "trees.json")
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1,))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape] | {"dtype": "bfloat16"}))
        model = ModelConfig(path=folder, dtype="bfloat16" if gpu else "float32")
        given = OURS | {"tokens_per_microbatch": args.tokens, "compile": gpu} | args.learner
        room = RankRoom(1, gpu_memory(torch.device(mesh.device_type)), args.tokens)
        learner = choose_gather(model, LearnerConfig(**given), room)
        policy = Policy(model, learner, mesh, random=True)
    algorithm = Algorithm(AlgorithmConfig(), Optimizer(policy, learner, 100), args.tokens, args.tokens)
    lines = [ResultRow(f"attention {policy.attention}", args.tokens, "tokens", "of a microbatch").line()]
    for case in args.cases.split(","):
        lines += [row.line() for row in compare(policy, algorithm, case, args)]
        write(args.out, "trees", lines, show=False)
    write(args.out, "trees", lines)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
