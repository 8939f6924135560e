"""How fast are documents trained that several GPUs share (`learner.context_parallel`)? Tokens/s, MFU, memory.

`torchrun --standalone --nproc-per-node 4 -m benchmarks.long_documents` trains a 7B shape with random weights on
documents of 131,072 tokens, in each way of `--ways`: `4` has four ranks to a document, compiled; `4-eager` is the same
without torch.compile; `1` gives each rank a document of its own. Each way makes two short steps first, then `--steps`
measured ones of one document for each group of ranks; its rows are printed as soon as they are measured. After
`--limit` seconds no other way begins. Memory stands beside the learner's own estimate; a way that the estimate does not
fit is left out. The ways `4` and `4-eager` train the same documents, so the norms of their gradients must agree.
Without GPUs it runs on gloo: `--shape speck --tokens 64 --ways 2-eager,1-eager`. Writes JSON with --out.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.learner.cases import part_of, sample_of
from benchmarks.learner.ours import H200, timed
from benchmarks.weights.shapes import EXPERTS, SHAPES, text_config
from benchmarks.weights.table import ResultRow, progress, write
from buffer.wire.protocol import Part
from configs.schema import AlgorithmConfig, LearnerConfig, ModelConfig
from learner.model.flops import peak
from learner.model.memory import GIB, Estimate, estimate, gpu_memory
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm

WARM = 4096
"""Tokens of a document of the first steps, for each rank: they compile, and fill the allocator."""
PROMPT = 1024


class Way:
    """A way to train, by its name on the command line. Examples: `4`, `2-eager`."""

    def __init__(self, name: str, args: argparse.Namespace, world: int) -> None:
        self.name, self.size = name, int(name.partition("-")[0])
        if world % self.size:
            raise SystemExit(f"--ways {name}: {self.size} does not divide the {world} ranks")
        keys = {
            "activation_checkpointing": args.checkpointing,
            "compile": not name.endswith("-eager"),
            "gather": "pass",
        }
        self.learner = LearnerConfig(
            context_parallel=self.size, attention=args.attention, head_chunk_tokens=args.head_chunk, **keys
        )


def run(way: Way, folder: Path, mesh: DeviceMesh, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in one way; returns its rows on rank 0, which prints them too."""
    gpu, first = mesh.device_type == "cuda", mesh.get_rank() == 0
    model = ModelConfig(path=str(folder), dtype="bfloat16" if gpu else "float32")
    expected = estimate(model, way.learner, mesh.size(), alone=True)
    memory = gpu_memory(torch.device(mesh.device_type))
    if memory is not None and expected.total(args.tokens) > memory:
        if first:
            progress(f"{way.name}: not run, a GPU has {memory / GIB:.1f} GiB: {expected.describe(args.tokens)}")
        return []
    policy = Policy(model, way.learner, mesh, random=True)
    # one sample has no advantage, so the penalty alone makes a gradient
    algorithm = Algorithm(
        AlgorithmConfig(behaviour_kl=0.1), Optimizer(policy, way.learner, 100), args.tokens, args.tokens
    )
    lengths = [*[min(WARM * way.size, args.tokens)] * 2, *[args.tokens] * args.steps]
    steps = []
    for version, length in enumerate(lengths):
        steps.append(timed(policy, algorithm, documents(policy, way.size, length, version, mesh)))
        if first:
            progress(f"{way.name}: step {version}, documents of {length:,} tokens, {steps[-1]['seconds']:.2f} s")
    rows = table(way, steps[2:], expected, mesh, args, policy.attention)
    del policy, algorithm
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
    for row in rows if first else []:
        beside = "" if row["against_value"] is None else f"{row['against']} {row['against_value']:g}"
        print(f"{row['case']:<44} {row['what']:<22} {row['value']:>12g} {row['unit']:<6} {beside}", flush=True)
    return rows


def documents(policy: Policy, size: int, length: int, seed: int, mesh: DeviceMesh) -> Part:
    """This rank's part of a batch with one document for each group of ranks."""
    import numpy as np

    draw, parts = np.random.default_rng(seed), mesh.size() // size
    made = [sample_of(draw, length, min(PROMPT, length // 4), policy.model.config.vocab_size) for _ in range(parts)]
    return part_of(made, seed, mesh.get_rank() // size, parts)


def table(
    way: Way,
    steps: list[dict[str, Any]],
    expected: Estimate,
    mesh: DeviceMesh,
    args: argparse.Namespace,
    attention: str,
) -> list[dict[str, Any]]:
    """Medians of the measured steps, and the largest memory of any rank."""
    gpu = mesh.device_type == "cuda"
    highest = torch.tensor(max(step["gib"] for step in steps), dtype=torch.float64)
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    seconds = median(step["seconds"] for step in steps)
    speed = median(step["flops"] / step["seconds"] for step in steps) / mesh.size()
    limit = (peak(torch.cuda.get_device_name()) if gpu else None) or H200
    case = f"{args.shape}, {args.tokens}, way {way.name} of {mesh.size()}, {attention}"
    rows = [
        ResultRow("tokens/s", median(step["tokens"] / step["seconds"] for step in steps), "1/s", case=case),
        ResultRow("seconds a step", seconds, "s", case=case),
        ResultRow("MFU", speed / limit, "", "target", 0.45, case),
        ResultRow("memory of a GPU, peak", float(highest), "GiB", "estimate", expected.total(args.tokens) / GIB, case),
        ResultRow("norm of the gradient", steps[0]["norm"], "", case=case),
    ]
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=[*SHAPES, *EXPERTS], default="Qwen2.5-7B")
    parser.add_argument("--tokens", type=int, default=131072, help="of a document")
    parser.add_argument("--ways", default="4-eager,4", help="one after the other")
    parser.add_argument("--steps", type=int, default=2, help="measured steps of a way")
    parser.add_argument("--limit", type=float, default=150.0, help="seconds after which no other way begins")
    parser.add_argument("--attention", default="auto", choices=["auto", "flash4", "flash", "varlen", "sdpa"])
    parser.add_argument("--checkpointing", default="block", choices=["block", "offload", "selective", "none"])
    parser.add_argument("--head-chunk", type=int, default=1024, help="learner.head_chunk_tokens")
    parser.add_argument("--out", type=Path, help="JSON of the rows")
    args = parser.parse_args()
    began, gpu = time.monotonic(), torch.cuda.is_available()
    os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    if gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=240))
    mesh = init_device_mesh("cuda" if gpu else "cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place:
        shape = text_config(args.shape) | {"max_position_embeddings": max(args.tokens, 32768)}
        (Path(place) / "config.json").write_text(json.dumps(shape))
        for way in [Way(name, args, mesh.size()) for name in args.ways.split(",")]:
            late = torch.tensor(float(time.monotonic() - began > args.limit))
            dist.broadcast(late, src=0)
            if late:
                progress(f"{way.name}: not run, {args.limit:g} s are over")
                continue
            rows += run(way, Path(place), mesh, args)
    if args.out and mesh.get_rank() == 0:
        write(args.out, "long_documents", rows, show=False)
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)  # as a learner ends: torch's threads sometimes abort while the interpreter shuts down


if __name__ == "__main__":
    main()
