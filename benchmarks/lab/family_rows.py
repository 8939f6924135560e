"""Is a shape of another family computed exactly, how fast, in how much memory? A learner alone, on one GPU or a CPU.

`python -m benchmarks.lab.family_rows SHAPE --work FOLDER`: first documents packed in one row against transformers' own
eager forward pass of each alone, from the same weights in float32; then the learner's steps on random batches
(`benchmarks/learner/ours.py`). Says which kernels layers that keep a state take. Prints each figure at once.
"""

import argparse
import gc
import importlib.util
import json
import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.learner import ours
from benchmarks.learner.cases import Case
from benchmarks.runs.models import weights_of
from benchmarks.weights.family_shapes import FAMILIES, text_alone, vocabulary_of
from configs.schema import LearnerConfig, ModelConfig
from learner.model import loading, state
from learner.model.exactness import packed_row
from learner.model.policy import Policy

LENGTHS, SHORT = (300, 1500, 37, 640, 333), (30, 70, 4, 64, 33)
"""Tokens of the compared documents, on a GPU and on a CPU."""
PLAIN: dict[str, Any] = {"compile": False, "activation_checkpointing": "block", "gather": "pass"}
"""Keys of the learner: the least memory, and no minute of compilation."""


def show(what: str, figure: Any, unit: str = "") -> None:
    """Print one figure."""
    print(f"{what:66} {figure if isinstance(figure, str) else f'{figure:.4g}'} {unit}", flush=True)


@torch.no_grad()
def compare(folder: Path, shape: str, mesh: DeviceMesh) -> None:
    """Show how far the learner's log-probabilities are from transformers' ones, packed and alone."""
    gpu = mesh.device_type == "cuda"
    model = ModelConfig(path=str(folder), dtype="bfloat16" if gpu else "float32", text_alone=text_alone(shape))
    policy = Policy(model, LearnerConfig(**PLAIN, head_chunk_tokens=1024), mesh)
    kinds = state.kinds(policy.model)
    installed = [name for name in state.KERNELS if importlib.util.find_spec(name)]
    way = "document by document, documents of similar length as a batch" if kinds else "none"
    show("layers that keep a state", ", ".join(kinds) or "none")
    show("  computed", f"{way}; kernels installed: {', '.join(installed) or 'none, torch alone'}")
    show("attention", str(policy.attention))
    draw = np.random.default_rng(0)
    texts = [
        draw.integers(3, policy.model.config.get_text_config().vocab_size, length)
        for length in (LENGTHS if gpu else SHORT)
    ]
    scores = []
    for some in ([*texts], *([text] for text in texts)):
        row = packed_row(some)
        scores.append(policy.score(policy.place(row), 1.0)[row.scored].float().cpu())
    packed, alone = scores[0], torch.cat(scores[1:])
    apart("packed against alone, both the learner's", packed, alone)
    del policy
    gc.collect()
    auto: Any = loading.auto_class(loading.read_config(model))
    read = auto.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").to(mesh.device_type).eval()
    theirs = []
    for text in texts:
        ids = torch.tensor(text, device=mesh.device_type)[None]
        logits = read(input_ids=ids, use_cache=False).logits[0, :-1].float()
        theirs.append(logits.log_softmax(-1).gather(-1, ids[0, 1:, None])[:, 0].cpu())
    apart(f"packed {model.dtype} against transformers' eager in float32", packed, torch.cat(theirs))
    uniform = -np.log(vocabulary_of(json.loads((folder / "config.json").read_text())))
    show("  mean log-probability; of a uniform policy", float(packed.mean()), f"nat; {uniform:.4g} nat")


def apart(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Show how far two sets of log-probabilities are apart."""
    difference = (a - b).abs()
    k3 = ((b - a).exp() - 1 - (b - a)).mean()
    show(f"{what}: mean", float(difference.mean()), "nat")
    show(f"{what}: largest", float(difference.max()), "nat")
    show(f"{what}: k3", float(k3), "nat")


def steps(folder: Path, shape: str, samples: int, mesh: DeviceMesh) -> None:
    """Show speed and memory of the learner's steps."""
    case = Case("ours", shape, samples=samples, steps=2, learner=PLAIN)
    found = ours.run(case, folder, mesh)
    show("tokens per microbatch", float(found["budget"]))
    show("learner's step", found["seconds"], "s")
    show("tokens/s", found["tokens_per_s"], "1/s")
    show("MFU", found["flops_per_s"] / found["peak"])
    show("memory, peak", found["gib"], f"GiB; the estimate of that microbatch is {found['estimate_gib']:.4g} GiB")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=FAMILIES)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-families"))
    parser.add_argument("--samples", type=int, default=64)
    args = parser.parse_args()
    gpu = torch.cuda.is_available()
    print(f"== {args.shape}: {torch.cuda.get_device_name() if gpu else 'cpu'}, torch {torch.__version__}", flush=True)
    folder = weights_of(args.shape, args.work.resolve() / "models", 0.0)
    gc.collect()
    if gpu:
        torch.cuda.empty_cache()
        torch.cuda.set_device(0)
    else:
        torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if gpu else "gloo"
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=120))
    mesh = init_device_mesh("cuda" if gpu else "cpu", (1,), mesh_dim_names=("shard",))
    for part in (lambda: compare(folder, args.shape, mesh), lambda: steps(folder, args.shape, args.samples, mesh)):
        try:
            part()
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            show("FAILED", f"{type(error).__name__}: {' '.join(str(error).split())[:600]}")
        gc.collect()
        if gpu:
            torch.cuda.empty_cache()
    os._exit(0)


if __name__ == "__main__":
    main()
