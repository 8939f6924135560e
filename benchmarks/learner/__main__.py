"""The learner's whole step on GPUs: MFU, tokens/s, phases, memory, against transformers with padding and all logits.

`python -m benchmarks.learner [--only NAME,NAME] [--steps 2]` prints one table and writes
`benchmarks/results/learner.json`. The names: ours-1.5b, ours-1.5b-pass, naive-1.5b, ours-7b-2, ours-7b-4, ours-7b-lora,
naive-7b-4, head. Qwen2.5 shapes with random weights, log-normal lengths (median 1,000, at most 8,192 tokens), 512
samples per batch, split as the buffer splits them; ours runs the learner's `Algorithm.step`, `ours-7b-lora` with an
adapter of rank 32, `ours-1.5b-pass` with `learner.gather: pass`, beside `ours-1.5b` for what gathering once a batch
gains. The naive one gets the same model, sharding, precision and samples (the first ones of the batch, as many as the
case says), in the largest microbatches that fit.
FLOPs: `learner/model/flops.py`. Cases run side by side if there are enough GPUs. Without a GPU the shape `tiny` runs:
`--cases '{"ours-tiny": {"kind": "ours", "model": "tiny", "samples": 16}}'`.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks.learner import heads, matmuls, naive, ours
from benchmarks.learner.cases import CASES, SHAPES, Case
from benchmarks.runs.ports import free_port

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
KINDS: dict[str, Callable[[Case, Path, DeviceMesh], dict[str, Any]]] = {
    "ours": ours.run,
    "naive": naive.run,
    "head": heads.run,
    "matmuls": matmuls.run,
    "rounding": matmuls.rounding,
}
PHASES = ("pack", "backward", "update")


def rank(folder: Path) -> None:
    """One rank of one case."""
    case = Case(**json.loads((folder / "case.json").read_text()))
    gpu = torch.cuda.is_available()
    if gpu:
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if gpu else "gloo", timeout=timedelta(seconds=240))
    mesh = init_device_mesh("cuda" if gpu else "cpu", (case.gpus,))
    answer = KINDS[case.kind](case, folder, mesh)
    if mesh.get_rank() == 0:
        (folder / "answer.json").write_text(json.dumps(answer))
    dist.destroy_process_group()
    sys.stdout.flush()
    os._exit(0)


def begin(case: Case, folder: Path, first: int, port: int) -> list[subprocess.Popen[bytes]]:
    """Start the ranks of `case` on the GPUs from `first` on."""
    folder.mkdir(parents=True)
    shape = SHAPES[case.model]
    layers = min(case.layers, int(str(shape["num_hidden_layers"])))
    (folder / "config.json").write_text(json.dumps(shape | {"num_hidden_layers": layers, "dtype": "bfloat16"}))
    (folder / "case.json").write_text(json.dumps(asdict(case)))
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(64)))).split(",")
    shared = {
        "WORLD_SIZE": str(case.gpus), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "CUDA_VISIBLE_DEVICES": ",".join(seen[first : first + case.gpus]),
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "OMP_NUM_THREADS": "4",
    }  # fmt: skip
    command = [sys.executable, "-m", "benchmarks.learner", "--rank", str(folder)]
    return [
        subprocess.Popen(command, cwd=ROOT, env=os.environ | shared | {"RANK": str(number), "LOCAL_RANK": str(number)})
        for number in range(case.gpus)
    ]


Started = dict[str, list[subprocess.Popen[bytes]]]


def together(cases: dict[str, Case], folder: Path, gpus: int, limit_s: float) -> dict[str, dict[str, Any]]:
    """Run `cases`, as many at a time as the GPUs allow; those that fail or exceed `limit_s` have no answer."""
    answers: dict[str, dict[str, Any]] = {}
    waiting = dict(cases)
    while waiting:
        first, started, deadline = 0, Started(), time.monotonic() + limit_s
        for name, case in list(waiting.items()):
            if first + case.gpus <= gpus:
                started[name] = begin(waiting.pop(name), folder / name, first, free_port())
                first += case.gpus
        if not started:
            print(f"not run, too few GPUs: {', '.join(waiting)}", flush=True)
            break
        answers |= ended(started, folder, deadline, limit_s)
    return answers


def ended(started: Started, folder: Path, deadline: float, limit_s: float) -> dict[str, dict[str, Any]]:
    """The answers of the running cases, once they have ended or were killed at `deadline`."""
    answers = {}
    for name, processes in started.items():
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.1))
            except subprocess.TimeoutExpired:
                print(f"{name}: not done in {limit_s:.0f} s", flush=True)
                process.kill()
        path = folder / name / "answer.json"
        if path.exists():
            answers[name] = json.loads(path.read_text())
    return answers


Row = dict[str, Any]


def row(what: str, value: float, unit: str, against: str, other: float | None) -> Row:
    return {"what": what, "value": value, "unit": unit, "against": against, "against_value": other}


def table(answers: dict[str, dict[str, Any]], speed: float) -> list[Row]:
    """The rows of the result: each value with the value that it is compared with."""
    rows = []
    for name, found in answers.items():
        if "flops_per_s" in found and "rows" in found:
            rows += ours_rows(name, found, answers.get(name.replace("ours", "naive")), speed)
    if {"ours-7b-2", "ours-7b-4"} <= answers.keys():
        two, four = (answers[f"ours-7b-{n}"]["tokens_per_s"] for n in (2, 4))
        rows.append(row("7b: scaling from 2 to 4 GPUs", four / two / 2, "", "target", 0.9))
    return rows + head_rows(answers.get("head", {}).get("heads", {}))


def ours_rows(name: str, found: dict[str, Any], naive: dict[str, Any] | None, speed: float) -> list[Row]:
    spent = {phase: median(step[f"time/{phase}_s"] for step in found["rows"][2:]) for phase in PHASES}
    other = naive["tokens_per_s"] if naive else None
    return [
        row(f"{name}: MFU of the whole step", found["flops_per_s"] / found["peak"], "", "target", 0.5),
        row(f"{name}: TFLOP/s per GPU", found["flops_per_s"] / 1e12, "TFLOP/s", "matmul measured", speed),
        row(f"{name}: peak memory", found["gib"], "GiB", "estimate", found["estimate_gib"]),
        row(f"{name}: tokens/s", found["tokens_per_s"], "tokens/s", "naive", other),
        *(row(f"{name}: {phase}", spent[phase], "s", "whole step", found["seconds"]) for phase in PHASES),
    ]


def head_rows(heads: dict[str, dict[str, float]]) -> list[Row]:
    """Every head against the naive one, and ours against each of the others."""
    rows = []
    for name, found in heads.items():
        kind, tokens = name.split()
        rivals = [rival for rival in ("naive", "twice", "liger") if f"{rival} {tokens}" in heads]
        for rival in rivals if kind == "ours" else rivals[:1]:
            other = heads[f"{rival} {tokens}"]
            rows.append(row(f"head {name} tokens", found["ms"], "ms", rival, other["ms"]))
            rows.append(row(f"head {name} tokens: memory", found["gib"], "GiB", rival, other["gib"]))
    return rows


def matmul_tflops() -> float:
    """bf16 TFLOP/s of an 8192-cubed matmul on random data, measured now; 0 without a GPU."""
    code = (
        "import torch,time\na,b=(torch.randn(8192,8192,device='cuda',dtype=torch.bfloat16) for _ in 'ab')\n"
        "for n in (3,30):\n torch.cuda.synchronize();t=time.perf_counter()\n for _ in range(n): a@b\n"
        " torch.cuda.synchronize()\nprint(2*8192**3*30/(time.perf_counter()-t)/1e12)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return float(ended.stdout) if ended.returncode == 0 else 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(CASES))
    parser.add_argument("--cases", type=json.loads, help='other cases: {"name": {"kind": "ours", "samples": 128}}')
    parser.add_argument("--steps", type=int)
    parser.add_argument("--limit", type=float, default=240.0, help="seconds for each set of cases")
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank:
        return rank(chosen.rank)
    cases = {name: CASES[name] for name in chosen.only.split(",")}
    cases = {name: Case(**options) for name, options in chosen.cases.items()} if chosen.cases else cases
    for case in cases.values():
        case.steps = chosen.steps or case.steps
    gpus = torch.cuda.device_count()
    hardware = f"{gpus} x {torch.cuda.get_device_name()}" if gpus else "CPU"
    with tempfile.TemporaryDirectory() as folder:
        speed = matmul_tflops()
        answers = together(cases, Path(folder), gpus or 2, chosen.limit)
    rows = table(answers, speed)
    write({"hardware": hardware, "product_tflops": speed, "rows": rows, "cases": answers})
    show(answers, rows, f"{hardware}; 8192-cubed bf16 matmul {speed:.0f} TFLOP/s; peak by datasheet 989")


def write(found: dict[str, Any]) -> None:
    """`learner.json`, under $OUT where that is set."""
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "command": "python -m " + " ".join(["benchmarks.learner", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }
    place = Path(os.environ.get("OUT", RESULTS)) / "learner.json"
    place.parent.mkdir(exist_ok=True)
    place.write_text(json.dumps(record | found, indent=1))


def show(answers: dict[str, dict[str, Any]], rows: list[Row], title: str) -> None:
    """The table, for people."""
    for name, found in answers.items():
        if "estimate" in found:
            print(f"{name}: {found['budget']} tokens per microbatch, {found['attention']}: {found['estimate']}")
    print(title)
    for line in rows:
        other = "not run" if line["against_value"] is None else f"{line['against_value']:.4g}"
        print(f"{line['what']:<45}{line['value']:>12.4g} {line['unit']:<9} {line['against']}: {other}")


if __name__ == "__main__":
    main()
