"""Compares the speed of a run file without keys for speed with hand-tuned keys, and checks that the choices of `auto`
fit.

`python -m benchmarks.defaults` needs GPUs and has two parts.
`--parts runs`: whole runs of 1.5B, one GPU serves and one learns, answers of 512, 16 groups of 16 a version. Two run
files run at the same time on one host of four GPUs and then change places: one has no key for speed (`silent`), one has
the best hand-tuned keys (`tuned`). `--against before` compares with the earlier defaults.
`--parts fit`: one rank trains a step of each shape of FITS at the settings that `auto` chooses: peak memory against its
estimate, and how many run out of memory. Each shape is a process of its own, as many at a time as there are GPUs.
`--card-gib 79.2` makes a larger GPU as small as an 80 GB card: another process holds the rest of its memory.
Random weights. Prints one table and writes JSON after each part.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import Queue
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from benchmarks.learner.cases import COMMON, part_of, sample_of
from benchmarks.runs.trained import FAST, figures_of, trained_run, versions_of
from benchmarks.weights.shapes import EXPERTS, MIXTURE
from benchmarks.weights.table import ResultRow, progress, write

if TYPE_CHECKING:
    from buffer.wire.sample import Sample
    from configs.schema import Config
    from learner.model.policy import Policy
    from learner.train.step import Algorithm

ROOT = Path(__file__).parents[1]
BEFORE = {
    "compile": False,
    "activation_checkpointing": "block",
    "tokens_per_microbatch": 8192,
    "head_chunk_tokens": 1024,
}
KEYS: dict[str, dict[str, Any]] = {"silent": {}, "tuned": FAST, "before": BEFORE}
LIMIT = 0.97
HOLDER = """
import sys, torch
free, _ = torch.cuda.mem_get_info()
held = torch.empty(max(free - int(float(sys.argv[1]) * 2**30), 0), dtype=torch.uint8, device="cuda")
print(held.numel(), flush=True)
sys.stdin.read()
"""
SETTINGS = ("compile", "activation_checkpointing", "gather", "head_chunk_tokens")


def shape(hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool = True, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv}
    return COMMON | sizes | heads_ | {"vocab_size": 151936, "tie_word_embeddings": tied} | more


MODELS = {
    "0.5B": shape(896, 4864, 24, 14, 2),
    "1.5B": shape(1536, 8960, 28, 12, 2),
    "3B": shape(2048, 11008, 36, 16, 2),
    "4B": shape(2560, 9728, 36, 32, 8, head_dim=128, model_type="qwen3", architectures=["Qwen3ForCausalLM"]),
    "7B": shape(3584, 18944, 28, 28, 4, tied=False),
    "14B": shape(5120, 13824, 48, 40, 8, tied=False),
    "32B": shape(5120, 27648, 64, 40, 8, tied=False),
    "30B-A3B, 8 layers": COMMON | MIXTURE | EXPERTS["Qwen3-30B-A3B-8"],
}


@dataclass(frozen=True)
class Fit:
    """A shape of the part `fit`: longest answer in tokens, and sections of its run file."""

    model: str
    tokens: int
    sections: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        more = "".join(f", {key} {value}" for keys in self.sections.values() for key, value in keys.items())
        return f"{self.model}, answers of {self.tokens:,}{more}"


ADAPTER = {"model": {"lora": {"rank": 32}}}
FITS = [
    *(Fit(model, tokens) for model in ("0.5B", "1.5B", "3B") for tokens in (1024, 8192, 32768)),
    *(Fit("4B", tokens) for tokens in (1024, 8192)),
    *(Fit("7B", tokens, ADAPTER) for tokens in (1024, 8192, 32768)),
    *(Fit("14B", tokens, ADAPTER) for tokens in (1024, 8192)),
    *(Fit("1.5B", 8192, {"learner": keys}) for keys in ({"compile": False}, {"gather": "batch"})),
    Fit("1.5B", 4096, {"algorithm": {"reference_kl": 0.01}}),
    Fit("30B-A3B, 8 layers", 4096),
]


def whole_run(args: argparse.Namespace, keys: str) -> dict[str, float]:
    """One run on the two GPUs from FIRST_GPU on: figures of its versions after `--warm-up`."""
    name, began = f"{keys}-{os.environ.get('FIRST_GPU', '0')}", time.monotonic()
    work = args.work.resolve() / name
    work.mkdir(parents=True, exist_ok=True)
    run = trained_run(work, f"{name}-{int(time.time())}", args.shape, 0.0, 512, 512, 16, 16, {}, KEYS[keys], fast=False)
    with run:
        for process in ("buffer", "rollout", "learner"):
            run.start(process, process)
        run.wait("the first version", lambda: versions_of(run) >= 1, args.start_s)
        first = time.monotonic() - began
        run.wait("warm-up", lambda: versions_of(run) >= args.warm_up, args.start_s)
        wanted = args.warm_up + args.versions
        run.wait(f"{args.versions} versions", lambda: versions_of(run) >= wanted, args.start_s)
        records = run.records()[args.warm_up - 1 : wanted]
        log = (run.folder / "learner.log").read_text(errors="replace")
    for line in log.splitlines():
        if "auto takes" in line or "tokens per microbatch" in line or "is kept" in line:
            progress(f"{name}: {line}")
    mfu = [record["mfu"] for record in records[1:] if "mfu" in record]
    return figures_of(records) | {"first version s": first, **({"mfu": median(mfu)} if mfu else {})}


def both(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run `silent` and the other run file at the same time, then swap their GPUs."""
    pair = ("silent", args.against)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in pair}
    gpus = torch.cuda.device_count()
    for turn in range(args.turns):
        order = pair[:: 1 if turn % 2 == 0 else -1]
        places = [(keys, place * 2) for place, keys in enumerate(order)]
        at_once = [places] if gpus >= 4 else [[place] for place in ((keys, 0) for keys in order)]
        for together in at_once:
            started = [(keys, start(["--one", keys], first, args)) for keys, first in together]
            for keys, process in started:
                found[keys].append(answer(process))
    rows = []
    for turn, (ours, other) in enumerate(zip(found["silent"], found[args.against], strict=True)):
        failed = [
            f"{keys}: {run['error']}" for keys, run in (("silent", ours), (args.against, other)) if "error" in run
        ]
        if failed:
            rows.append(ResultRow("FAILED", 0.0, "", "; ".join(failed)))
            continue
        case = f"turn {turn + 1}"
        for key in ("sampled tokens/s", "mfu", "first version s", "learner works", "waits s/version"):
            if key in ours:
                rows.append(ResultRow(key, ours[key], "", args.against, other[key], case))
        ratio = ours["sampled tokens/s"] / other["sampled tokens/s"]
        rows.append(ResultRow("ratio of trained tokens/s", ratio, "", "limit", LIMIT, case))
    return [row.line() for row in rows]


def start(words: list[str], first: int, args: argparse.Namespace) -> "subprocess.Popen[str]":
    """Start this benchmark as a process that measures one case on the GPUs from `first` on."""
    flags = [f"--shape={args.shape}", f"--versions={args.versions}", f"--warm-up={args.warm_up}", f"--work={args.work}"]
    command = [sys.executable, "-m", "benchmarks.defaults", *words, *flags, f"--start-s={args.start_s}"]
    seen = {"FIRST_GPU": str(first)} if words[0] == "--one" else only_gpu(first)
    environment = os.environ | seen | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def only_gpu(gpu: int) -> dict[str, str]:
    """The variable that shows a process the GPU that has number `gpu` here, alone."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return {"CUDA_VISIBLE_DEVICES": given.split(",")[gpu] if given else str(gpu)}


def answer(process: "subprocess.Popen[str]") -> dict[str, Any]:
    """Return the last line of the process; `error` if there is none."""
    out, _ = process.communicate()
    lines = out.splitlines()
    if process.returncode or not lines:
        return {"error": f"exit code {process.returncode}: {lines[-1] if lines else 'it printed nothing'}"}
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def run_file_of(fit: Fit, folder: Path) -> "Config":
    """The settings of a run that trains the shape; its config.json is written into `folder`."""
    from configs.schema import Config

    sizes = MODELS[fit.model] | {"max_position_embeddings": 65536, "dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(sizes))
    given: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)}, "data": {"train": "none", "max_prompt_tokens": 512},
        "reward": {"function": "none"}, "sampling": {"max_tokens": fit.tokens}, "run": {"versions": 1000},
        "batch": {"groups": 64, "samples": 16},
    }  # fmt: skip
    return Config.model_validate(given | {key: given.get(key, {}) | keys for key, keys in fit.sections.items()})


def one_step(index: int) -> dict[str, Any]:
    """Train three steps of FITS[index] on one rank, set up as in `learner/__main__.py`."""
    import torch.distributed as dist
    from torch.distributed import HashStore  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    from learner.model.memory import GIB, gpu_memory, memory_budget
    from learner.model.policy import Policy
    from learner.model.settled import keeps_reference
    from learner.starting import decide_gather, decide_speed
    from learner.train.optimizer import Optimizer
    from learner.train.step import Algorithm

    fit = FITS[index]
    config = run_file_of(fit, Path(tempfile.mkdtemp()))
    torch.cuda.set_device(0)
    device = torch.device("cuda", 0)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,))
    config = decide_gather(decide_speed(config, gpu_memory(device), mesh, 0), device, mesh, 0)
    with_reference = keeps_reference(config)
    expected, budget = memory_budget(config, device, 1, with_reference, True)
    # rank 0's copies for servers are not made here, so their size is subtracted from the memory
    copies = expected.candidates[0].fixed.get("copies to send", 0)
    held = torch.empty(copies, dtype=torch.uint8, device=device)
    policy = Policy(config.model, config.learner, mesh, random=True)
    reference = Policy(config.model, config.learner, mesh, frozen=True, random=True) if with_reference else None
    algorithm = Algorithm(config.algorithm, Optimizer(policy, config.learner, 1000), budget, fit.tokens, reference)
    samples = filled(budget, 512 + fit.tokens, MODELS[fit.model]["vocab_size"])
    seconds = timed_steps(algorithm, policy, samples)
    return {
        "budget": budget, "estimate": expected.total(budget) / GIB, "peak": torch.cuda.max_memory_allocated() / GIB,
        "reserved": torch.cuda.max_memory_reserved() / GIB, "held": held.numel() / GIB,
        "tokens/s": 2 * budget / seconds[-1],
        "settings": {key: getattr(config.learner, key) for key in SETTINGS},
    }  # fmt: skip


def timed_steps(algorithm: "Algorithm", policy: "Policy", samples: list["Sample"]) -> list[float]:
    """Seconds of each of three steps on the same samples. The GPU's peak memory afterwards is that of the last one."""
    seconds = []
    for version in range(3):
        torch.cuda.reset_peak_memory_stats()
        began = time.perf_counter()
        algorithm.step(policy, part_of(samples, version, 0, 1))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return seconds


@contextmanager
def smaller_card(gpu: int, gib: float) -> Iterator[None]:
    """Another process holds all memory of `gpu` but `gib` GiB, as long as this lasts. 0: no process holds any."""
    if not gib:
        yield
        return
    environment = os.environ | only_gpu(gpu)
    words = [sys.executable, "-c", HOLDER, str(gib)]
    with subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin and holder.stdout
        try:
            if not holder.stdout.readline():
                raise SystemExit(f"--card-gib {gib}: GPU {gpu} has less memory, or another process uses it")
            yield
        finally:
            holder.stdin.close()


def filled(budget: int, length: int, vocabulary: int) -> list["Sample"]:
    """Make samples that fill two microbatches of `budget` tokens each with documents of at most `length`."""
    full, rest = divmod(budget, length)
    draw = np.random.default_rng(0)
    sizes = 2 * [*(full * [length]), *([rest] if rest else [])]
    return [sample_of(draw, size, size // 4 if size < 512 else 128, vocabulary) for size in sizes]


def fits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure each shape of FITS: its peak and estimate, and how many shapes failed."""
    free: Queue[int] = Queue()
    for gpu in range(max(torch.cuda.device_count(), 1)):
        free.put(gpu)

    def measure(index: int) -> dict[str, Any]:
        gpu = free.get()
        try:
            with smaller_card(gpu, args.card_gib):
                found = answer(start(["--fit", str(index)], gpu, args))
        finally:
            free.put(gpu)
        progress(f"{FITS[index].name}: {found}")
        return found

    named = args.only.split(";")
    chosen = [index for index, fit in enumerate(FITS) if any(part in fit.name for part in named)]
    with ThreadPoolExecutor(max(torch.cuda.device_count(), 1)) as pool:
        measured = list(pool.map(measure, chosen))
    rows, failed = [], 0
    for index, found in zip(chosen, measured, strict=True):
        name = FITS[index].name
        if "error" in found:
            failed += 1
            rows.append(ResultRow("FAILED", 0.0, "", found["error"], case=name))
            continue
        settings = ", ".join(f"{key} {value}" for key, value in found["settings"].items())
        what = f"peak memory, {found['budget']:,} tokens per microbatch, {settings}"
        rows.append(ResultRow(what, found["peak"], "GiB", "estimate", found["estimate"], name))
        rows.append(ResultRow("tokens/s of the last step", found["tokens/s"], "1/s", case=name))
    rows.append(ResultRow(f"of {len(chosen)} shapes ran out of memory or failed", failed, "", "limit", 0))
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="runs,fit")
    parser.add_argument("--against", default="tuned", choices=[keys for keys in KEYS if keys != "silent"])
    parser.add_argument("--turns", type=int, default=2, help="how often the two run; they swap GPUs each time")
    parser.add_argument("--shape", default="Qwen2.5-1.5B")
    parser.add_argument("--only", default="", help="shapes of `fit` whose names contain one of these, apart by ;")
    parser.add_argument(
        "--card-gib", type=float, default=0.0, help="GiB that each GPU shows to a shape of `fit`; 0: all"
    )
    parser.add_argument("--versions", type=int, default=16)
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--start-s", type=float, default=300.0, help="longest time of each part of a run")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-defaults"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "defaults.json")
    parser.add_argument("--one", choices=KEYS, help=argparse.SUPPRESS)
    parser.add_argument("--fit", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one or args.fit is not None:
        print(json.dumps(whole_run(args, args.one) if args.one else one_step(args.fit)))
        return 0
    if not torch.cuda.is_available():
        parser.error("no GPU is found; on a CPU `auto` has no choice")
    rows: list[dict[str, Any]] = []
    for part in args.parts.split(","):
        rows += {"runs": both, "fit": fits}[part](args)
        write(args.out, "defaults", rows, show=False)
    write(args.out, "defaults", rows)
    return int(any(row["what"] == "FAILED" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
