"""What does computing each prompt once gain (`learner.share_prompts`)? Whole steps with and without it, in turn.

`python -m benchmarks.shared_prompts` needs one GPU: the learner's `Algorithm.step` with a Qwen2.5 shape and random
weights on groups of 16 samples whose prompts are 128, 1,024 and 4,096 tokens long and whose answers 512. Both ways run
on the same policy and the same parts, one step after the other. Counted are the samples' tokens, prompts included, in
both: what sharing leaves out is its gain. Exactness is shown beside a control, the unshared step in microbatches half
as large: the largest difference of a sampled token's log-probability, and the largest norm of a gradient's difference
relative to the gradient's own norm. Without a GPU the shape `tiny` runs. Prints one table; writes JSON.
"""

import argparse
import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.learner.cases import SHAPES
from benchmarks.learner.ours import OURS, profile, timed
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

SAMPLES, ANSWER = 16, 512
CASES = {128: (16, 1.15), 1024: (6, 2.2), 4096: (3, 4.5)}
"""By tokens of the prompt: groups of a batch, and the least gain."""


def groups_of(
    prompt: int, answer: int, groups: int, vocabulary: int, seed: int, version: int, rank: int = 0, world: int = 1
) -> Part:
    """The rank's part of a batch of `groups` groups of 16 samples, each group with a prompt of its own."""
    draw = np.random.default_rng(seed)
    made = []
    for item in range(groups):
        given = draw.integers(0, vocabulary, prompt)
        packed = [
            sample_of(given, draw.integers(0, vocabulary, answer), float(draw.integers(2))) for _ in range(SAMPLES)
        ]
        made.append((item, version, [(data, sample_stats(data)) for data in packed]))
    return parts(version, world, made)[rank]


def sample_of(prompt: np.ndarray, answer: np.ndarray, reward: float) -> bytes:
    """One packed sample of random tokens."""
    sampled = np.arange(len(prompt) + len(answer)) >= len(prompt)
    return Sample(
        tokens=Array.of(np.concatenate([prompt, answer]).astype(np.int32)),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -5.0, 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
        reward=reward,
        finish="stop",
    ).pack()


def exact(policy: Policy, algorithm: Algorithm, part: Part, budget: int, share: bool) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of the sampled tokens, in the order of the samples, and gradients of all parameters."""
    batch = Batch.from_part(part, budget, policy.costs.quadratic, share)
    by_sample: dict[int, Tensor] = {}
    for placed in map(policy.place, batch.microbatches):
        logprobs, rows = policy.score(placed)[placed.scored], placed.sequence[placed.scored]
        by_sample |= {int(row): logprobs[rows == row] for row in rows.unique()}
    algorithm.backward(policy, batch)
    gradients = [p.grad.full_tensor().clone() for p in policy.model.parameters()]  # type: ignore[union-attr]
    algorithm.optimizer.adamw.zero_grad()
    return torch.cat([by_sample[row] for row in sorted(by_sample)]), gradients


def differences(policy: Policy, algorithm: Algorithm, part: Part, budget: int) -> dict[str, float]:
    """Largest differences of the shared step and of the control, both against the unshared step."""
    found: dict[str, float] = {}
    plain = exact(policy, algorithm, part, budget, False)
    for name, half, share in (("control", 2, False), ("shared", 1, True)):
        logprobs, gradients = exact(policy, algorithm, part, budget // half, share)
        found[f"{name}: log-probabilities"] = float((logprobs - plain[0]).abs().max())
        relative = [float((a - b).norm() / b.norm().clamp(min=1e-12)) for a, b in zip(gradients, plain[1], strict=True)]
        found[f"{name}: gradients"] = max(relative)
    return found


def compare(policy: Policy, algorithm: Algorithm, prompt: int, args: argparse.Namespace) -> list[ResultRow]:
    """The rows of one length of prompts."""
    groups, least = CASES[prompt]
    vocabulary, answer = policy.model.config.vocab_size, args.answer
    label = f"{prompt} + {answer}: tokens of prompt and answer, {groups} groups of {SAMPLES}"
    label += "" if args.most_copied is None else f", at most {args.most_copied:g} keys copied for a token"
    found: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for step in range(args.steps + 1):  # the first ones compile
        for share in found:
            policy.sharing.prompts = share
            version = 2 * step + share
            part = groups_of(prompt, answer, groups, vocabulary, step, version)
            found[share].append(timed(policy, algorithm, part))
            progress(f"{label}: share_prompts {share}: {found[share][-1]['seconds']:.2f} s")
    if args.profile:
        for share in found:
            policy.sharing.prompts = share
            part = groups_of(prompt, answer, groups, vocabulary, 0, 2 * args.steps + 2 + share)
            print(f"{label}: share_prompts {share}")
            profile(partial(algorithm.step, policy, part))
    rate = {share: median(row["tokens"] / row["seconds"] for row in rows[1:]) for share, rows in found.items()}
    memory = {share: max(row["gib"] for row in rows[1:]) for share, rows in found.items()}
    gained = f"limit {least:g}" if args.shape == "1.5b" else ""
    rows = [
        ResultRow("samples' tokens/s, each prompt once", rate[True], "1/s", "each sample whole", rate[False], label),
        ResultRow("  ratio", rate[True] / rate[False], "", gained, case=label),
        ResultRow("peak memory, each prompt once", memory[True], "GiB", "each sample whole", memory[False], label),
    ]
    part = groups_of(prompt, answer, min(groups, 2), vocabulary, 99, 99)
    apart = differences(policy, algorithm, part, algorithm.budget)
    for what, unit in (("log-probabilities", "1e-6 nat"), ("gradients", "1e-6")):
        ours, control = (1e6 * apart[f"{name}: {what}"] for name in ("shared", "control"))
        against = "whole samples in other microbatches"
        rows.append(ResultRow(f"largest difference of {what}", ours, unit, against, control, label))
    return rows


def main() -> int:
    gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="1.5b" if gpu else "tiny")
    parser.add_argument("--prompts", default=",".join(map(str, CASES)), help="tokens of the prompts")
    parser.add_argument("--answer", type=int, default=ANSWER)
    parser.add_argument("--steps", type=int, default=3, help="measured of each kind, after one that warms up")
    parser.add_argument("--tokens", type=int, default=32768, help="of a microbatch")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of `learner`, as JSON")
    parser.add_argument(
        "--most-copied", type=float,
        help="keys that a row copies at most, as a multiple of its tokens, if not as a run; 0: two calls of attention",
    )  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step of each kind, by time")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "shared_prompts.json")
    args = parser.parse_args()
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1,))
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(SHAPES[args.shape] | {"dtype": "bfloat16"}))
        model = ModelConfig(path=folder, dtype="bfloat16" if gpu else "float32")
        learner = LearnerConfig(**(OURS | {"tokens_per_microbatch": args.tokens} | args.learner))
        room = RankRoom(1, gpu_memory(torch.device(mesh.device_type)), args.tokens)
        learner = choose_gather(model, learner, room)
        policy = Policy(model, learner, mesh, random=True)
    policy.sharing.most_copied = policy.sharing.most_copied if args.most_copied is None else args.most_copied
    algorithm = Algorithm(AlgorithmConfig(), Optimizer(policy, learner, 100), args.tokens, args.answer)
    lines = [ResultRow(f"attention {policy.attention}", args.tokens, "tokens", "of a microbatch").line()]
    for prompt in map(int, args.prompts.split(",")):
        lines += [row.line() for row in compare(policy, algorithm, prompt, args)]
        write(args.out, "shared_prompts", lines, show=False)
    write(args.out, "shared_prompts", lines)
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
