"""What do rollouts in FP8 gain, and how far are their log-probabilities from the learner's? GPUs.

`python -m benchmarks.fp8 --shape Qwen2.5-7B`: what they gain. Two engines of vLLM as a rollout server starts them, with
random weights on one GPU, one in bfloat16 and one in FP8, which take turns: 512 sequences run, in groups of 16 whose
lengths are geometric (`benchmarks/runs/engine_load.py`), and each window is compared with the two around it, of the
other engine. After each window the GPU is traced for TRACE_S: time by kind of kernel, and at work.

`python -m benchmarks.fp8 --model FOLDER`: how far they are off. Two short runs of a real model in step with its server
(`max_staleness: 0`), started by hand: buffer, server and learner, first with bfloat16 weights in the server, then with
each policy rounded to FP8 as it is loaded (`rollout.engine.quantization: fp8`). The learner's weights hardly move. The
mismatch is the learner's own metric: k1, k3 and m2 between its log-probabilities and those recorded at sampling, on
tokens of the current policy. Needs two GPUs; on one, server and learner share it, and tokens/s are a bound.

Prints one table; writes JSON.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.runs.engine_load import LOADS, SAMPLES, EngineLoad, beside_neighbours
from benchmarks.runs.processes import Died, Processes, Watch, engine_keys, run_file, sequences
from benchmarks.runs.profiled_worker import AT_WORK
from benchmarks.runs.trained import figures_of, versions_of
from benchmarks.weights.table import ResultRow, progress, write
from configs.load import load as load_config
from rollout.engine.arguments import can_fp8, engine_arguments, environment, on_cpu
from rollout.engine.vllm_engine import Engine

MISMATCH = ("mismatch/k1_fresh", "mismatch/k3_fresh", "mismatch/m2_fresh")
SHOWN = ("tokens_per_s", "running", "gpu rollout", "weights/probe", "weights/load_s", "versions")
GROUPS, WARM_UP = 32, 2
SETTLE_S, TRACE_S = 1.0, 1.0
"""From an engine's turn to the count, and of a trace."""
TRACED = "benchmarks.runs.profiled_worker.ProfiledWorker"
US = " us a token"


def quantised_run(args: argparse.Namespace, quantization: str | None) -> dict[str, float]:
    """One run; its figures after the warm-up."""
    name = f"{quantization or 'bfloat16'}-{int(time.time())}"
    shared = torch.cuda.device_count() == 1
    engine = engine_keys(args.length, {"quantization": quantization} if quantization else {}, shared)
    draw, problems = random.Random(0), args.work / "sums.jsonl"
    sums = (f"{draw.randrange(100)} + {draw.randrange(100)} is" for _ in range(1000))
    problems.write_text("".join(json.dumps({"problem": row, "answer": ""}) + "\n" for row in sums))
    file = run_file(
        args.work, name, "speck",
        model={"path": str(args.model)},
        data={"train": str(problems)},
        sampling={"max_tokens": args.length},
        batch={"groups": GROUPS, "samples": SAMPLES, "max_staleness": 0},
        rollout={**sequences(GROUPS * SAMPLES, SAMPLES), "engine": engine, "heartbeat_s": 1.0},
        learner={"tokens_per_microbatch": 16384},
        weights={"probe_every": 1, "probe_tolerance": 1.0},
    )  # fmt: skip
    with Processes(file, {"rollout": 0, "learner": 0 if shared else 1}) as run:
        for part in ("buffer", "rollout", "learner"):
            run.start(part, part)
        run.wait("warm-up", lambda: versions_of(run) >= WARM_UP, args.start_s)
        with Watch(run) as watch:
            run.wait("the versions", lambda: versions_of(run) >= WARM_UP + args.versions, args.start_s)
        records = run.records()[WARM_UP - 1 :]
    known = {key: mean(record[key] for record in records if key in record) for key in (*MISMATCH, *SHOWN[3:5])}
    return figures_of(records) | watch.figures() | known


def gain(args: argparse.Namespace) -> list[ResultRow]:
    """Medians of each engine's windows, and how many times as fast the one in FP8 is."""
    windows = asyncio.run(turns(args))
    running = args.running or LOADS[args.shape]["running"]
    label = f"{args.shape}: {running} sequences, {args.quantization or 'bfloat16'} and bfloat16 in turns"
    times = beside_neighbours([one["rate"] for one in windows], [bool(one["second"]) for one in windows])
    plain, quantised = ([one for one in windows if one["second"] == second] for second in (0.0, 1.0))
    rows = [
        ResultRow(key, middle(quantised, key), "", "bfloat16", middle(plain, key), label)
        for key in ("rate", "running", "kv_usage", "preempted", *traced_keys(windows))
    ]
    ratio = ResultRow("  ratio to the windows around it, median", median(times), "", "smallest", min(times), label)
    return [ratio, *rows]


def middle(windows: Sequence[dict[str, float]], key: str) -> float:
    """A kind of kernel that a window lacks took no time there."""
    return median(one.get(key, 0.0) for one in windows)


def traced_keys(windows: Sequence[dict[str, float]]) -> list[str]:
    """What the traces saw: share of the time at work, then time by kind of kernel, for a sampled token."""
    found = {key for one in windows for key in one if key == AT_WORK or key.endswith(US)}
    return sorted(found, key=lambda key: (key != AT_WORK, key))


async def traced(engine: Engine) -> dict[str, float]:
    """GPU time by kind of kernel for a sampled token, and the share of the time in which any kernel runs."""
    await engine.collective("rl_trace", True, timeout_s=60.0)
    before = engine.tokens
    await asyncio.sleep(TRACE_S)
    found: dict[str, float] = (await engine.collective("rl_trace", False, timeout_s=60.0))[0]
    sampled = engine.tokens - before
    return {AT_WORK: found.pop(AT_WORK)} | {kind + US: 1e6 * time_s / sampled for kind, time_s in found.items()}


async def turns(args: argparse.Namespace) -> list[dict[str, float]]:
    """What the windows saw, in order: tokens per second, sequences that ran in the mean, KV cache, preemptions."""
    wanted = LOADS[args.shape] | ({"running": args.running} if args.running else {})
    loads, running, windows = list[EngineLoad](), list[asyncio.Task[None]](), list[dict[str, float]]()
    async with AsyncExitStack() as stack:
        for quantization in (None, args.quantization):
            async with AsyncExitStack() as quiet:  # the first one, while the second starts and fills up
                for load in loads:
                    await quiet.enter_async_context(load.engine.paused())
                loads.append(EngineLoad(await start(quantization, wanted, args), wanted))
                stack.push_async_callback(loads[-1].engine.close)
                running.append(asyncio.create_task(loads[-1].run()))
                stack.push_async_callback(end, running[-1])
                await asyncio.sleep(args.warm_up_s)
        for second in [0, 1] * args.rounds:
            async with loads[1 - second].engine.paused():
                windows.append({"second": float(second), **await window(loads[second].engine, args.seconds)})
            if running[second].done():
                running[second].result()  # the engine failed, and nothing runs any more
            progress(f"{args.shape}: {windows[-1]}")
    return windows


async def window(engine: Engine, seconds: float) -> dict[str, float]:
    """One engine's figures while the other one is paused."""
    await asyncio.sleep(SETTLE_S)
    before, since = engine.tokens, time.monotonic()
    engine.stats()
    await asyncio.sleep(seconds)
    found = {"rate": (engine.tokens - before) / (time.monotonic() - since), **engine.stats()}
    return found | (await traced(engine) if torch.cuda.is_available() else {})


async def end(load: asyncio.Task[None]) -> None:
    """Its requests are aborted before their engine is closed."""
    load.cancel()
    await asyncio.wait([load])


async def start(quantization: str | None, wanted: dict[str, int], args: argparse.Namespace) -> Engine:
    """An engine as a rollout server starts it, with less than half of the GPU."""
    keys: dict[str, Any] = {"quantization": quantization} if quantization else {}
    keys |= {"gpu_memory_utilization": 0.46} if torch.cuda.is_available() else {}
    name = f"{quantization or 'bfloat16'}-{int(time.time())}"
    file = run_file(
        args.work, name, args.shape,
        sampling={"max_tokens": wanted["cut"]}, batch={"samples": SAMPLES},
        rollout={**sequences(wanted["running"], SAMPLES), "engine": engine_keys(wanted["cut"], keys)},
        weights={"probe_tolerance": 1.0},
    )  # fmt: skip
    config = load_config([str(file)])
    os.environ.update(environment(on_cpu(config)))
    engine = await Engine.launch(engine_arguments(config, 0, on_cpu(config)) | {"worker_extension_cls": TRACED})
    progress(f"{args.shape}: vLLM has started with {quantization or 'bfloat16'}")
    return engine


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a real model, such as SmolLM2-135M")
    parser.add_argument("--shape", choices=LOADS, help="of random weights, for the gain")
    parser.add_argument("--quantization", default="fp8", help="of the second engine; may be empty")
    parser.add_argument("--running", type=int, help="sequences at a time, if not those of the shape")
    parser.add_argument("--rounds", type=int, default=5, help="windows of each engine")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window")
    parser.add_argument("--warm-up-s", type=float, default=15.0, help="of each engine")
    parser.add_argument("--versions", type=int, default=6)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--start-s", type=float, default=240.0, help="longest time of each part")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-fp8"))
    parser.add_argument("--out", type=Path, help="benchmarks/results/fp8.json, or fp8-gain.json with --shape")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("--model FOLDER for the mismatch, or --shape for what FP8 gains: one of the two")
    if args.shape and args.quantization and not can_fp8():
        parser.error(
            f"--quantization: {args.quantization} needs a GPU that computes in FP8; '' is for two engines alike"
        )
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} has no window with two others around it; take 2 or more")
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = gain(args) if args.shape else mismatches(args)
    out = args.out or Path(__file__).parent / "results" / ("fp8-gain.json" if args.shape else "fp8.json")
    write(out, "fp8", [row.line() for row in rows])
    return 1 if any(row.what.startswith("FAILED") for row in rows) else 0


def mismatches(args: argparse.Namespace) -> list[ResultRow]:
    """Both runs, one after the other."""
    found: dict[str, dict[str, float]] = {}
    rows: list[ResultRow] = []
    for quantization in (None, "fp8"):
        try:
            found[quantization or "bfloat16"] = quantised_run(args, quantization)
        except (Died, TimeoutError, KeyError) as error:
            rows.append(ResultRow(f"FAILED: {quantization}", 0.0, "", f"{type(error).__name__}: {error}"))
            progress(f"{quantization} failed: {error}")
    plain = found.get("bfloat16", {})
    for name, figures in found.items():
        for key in (*MISMATCH, *SHOWN):
            if key in figures:
                against = ("bfloat16", plain.get(key)) if name != "bfloat16" else ("", None)
                rows.append(ResultRow(key, figures[key], "", *against, case=name))
    return rows


if __name__ == "__main__":
    sys.exit(main())
