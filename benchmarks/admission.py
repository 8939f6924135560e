"""What does a server gain from room for whole groups in vLLM? One GPU, or CPU.

`python -m benchmarks.admission --shapes Qwen2.5-1.5B,Qwen2.5-7B`: vLLM as a rollout server starts it, alone and with
random weights; 512 sequences run, lengths are geometric (mean 1,000 and 512, cut at 4,096 and 2,048), prompts of 128
tokens in groups of 16, and a group comes whenever a place is free, as in `rollout/loop.py`. If vLLM has 512 places, up
to 15 requests wait for one, and each sequence that ends lets one in: such a step reads a prompt beside what decodes,
and does not run as one CUDA graph. A server gives vLLM room for the rest of the group. In one engine, window by window,
both are compared (`benchmarks/runs/switched.py`): each window with the two around it, of the other way, so a speed that
rises or falls steadily drops out. Contexts are those of the steady state after some 80 s; until then they grow, for
both ways alike. Prints one table; writes JSON. `--shapes speck` is the small form for CPU.
"""

import argparse
import asyncio
import json
import os
import sys
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.runs.engine_load import LOADS, SAMPLES, EngineLoad, beside_neighbours
from benchmarks.runs.processes import engine_keys, run_file, sequences
from benchmarks.runs.switched import FILE
from benchmarks.weights.table import ResultRow, progress, write
from configs.load import load as load_config
from rollout.engine.arguments import engine_arguments, environment, on_cpu
from rollout.engine.vllm_engine import Engine

SETTLE_S = 1.0
"""From the switch to the count."""


async def measure(shape: str, args: argparse.Namespace) -> list[dict[str, float]]:
    """What each window saw, in order: no room beyond the sequences, then room for a whole group, and so on."""
    wanted, work = LOADS[shape], args.work.resolve() / shape
    work.mkdir(parents=True, exist_ok=True)
    file = run_file(
        work, f"run-{int(time.time())}", shape,
        sampling={"max_tokens": wanted["cut"]}, batch={"samples": SAMPLES},
        rollout={**sequences(wanted["running"], SAMPLES), "engine": engine_keys(wanted["cut"], args.engine)},
    )  # fmt: skip
    config, switch = load_config([str(file)]), work / "admission"
    own, (few, enough) = "benchmarks.runs.switched.scheduler", (wanted["running"], wanted["running"] + SAMPLES)
    arguments = engine_arguments(config, 0, on_cpu(config)) | {"scheduler_cls": own, "max_num_seqs": enough}
    os.environ.update({**environment(on_cpu(config)), FILE: str(switch)})
    say(switch, few)
    engine = await Engine.launch(arguments)
    progress(f"{shape}: vLLM has started")
    load, windows = EngineLoad(engine, wanted), []
    running = asyncio.create_task(load.run())
    try:
        await asyncio.sleep(args.warm_up_s)
        for places in [few, enough] * args.rounds:
            say(switch, places)
            await asyncio.sleep(SETTLE_S)
            windows.append({"room": float(places - few), **await window(load, switch, args.seconds)})
            if running.done():
                running.result()  # the engine failed, and nothing runs any more
            progress(f"{shape}: {windows[-1]}")
    finally:
        running.cancel()
        await asyncio.wait([running])
        await engine.close()
    return windows


def say(switch: Path, number: int) -> None:
    """Tell the scheduler how many places there are; it reads the file at any time."""
    part = switch.with_suffix(".part")
    part.write_text(str(number))
    part.replace(switch)


async def window(load: EngineLoad, switch: Path, seconds: float) -> dict[str, float]:
    """Tokens and ended requests per second, sequences that ran, and steps of both kinds: number, ms, tokens."""

    def now() -> tuple[float, int, int, dict[str, list[float]]]:
        counts = json.loads(switch.with_suffix(".counts").read_text())
        return time.monotonic(), load.engine.tokens, load.ended, counts

    load.engine.stats()
    since, tokens, ended, before = now()
    await asyncio.sleep(seconds)
    until, tokens_after, ended_after, after = now()
    found = {"rate": (tokens_after - tokens) / (until - since), "ends": (ended_after - ended) / (until - since)}
    found["running"] = load.engine.stats()["running"]
    counted_s = after["at"][0] - before["at"][0]
    for kind in ("pure", "mixed"):
        steps, spent_s, read = (new - old for new, old in zip(after[kind], before[kind], strict=True))
        found |= {f"{kind} steps/s": steps / counted_s, f"{kind} ms": 1e3 * spent_s / max(steps, 1)}
        found[f"{kind} tokens"] = read / max(steps, 1)
    return found


def rows_of(shape: str, windows: list[dict[str, float]]) -> list[ResultRow]:
    """Medians by kind of window, and how much faster it is with room for whole groups: each window but the first and
    the last compared with the geometric mean of its two neighbours."""
    label = f"{shape}: {LOADS[shape]['running']} sequences, mean {LOADS[shape]['mean']}"
    ratios = beside_neighbours([one["rate"] for one in windows], [bool(one["room"]) for one in windows])
    each = [[one for one in windows if bool(one["room"]) == roomy] for roomy in (True, False)]
    whole, single = ({key: median(one[key] for one in kind) for key in kind[0]} for kind in each)
    rows = [
        ResultRow("tokens/s, room for whole groups", whole["rate"], "1/s", "one by one", single["rate"], label),
        ResultRow("  ratio to the windows around it, median", median(ratios), "", "smallest", min(ratios), label),
        ResultRow("  mean", mean(ratios), "", "windows", float(len(windows)), label),
    ]
    for key in ("running", "ends", "mixed steps/s", "pure steps/s", "mixed ms", "pure ms", "mixed tokens"):
        rows.append(ResultRow(f"  {key}", whole[key], "", "one by one", single[key], label))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="speck", help=f"of {', '.join(LOADS)}")
    parser.add_argument("--rounds", type=int, default=4, help="windows of each kind")
    parser.add_argument("--seconds", type=float, default=6.0, help="of a window")
    parser.add_argument("--warm-up-s", type=float, default=15.0)
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-admission"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "admission.json")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds: {args.rounds} has no window with two others around it; take 2 or more")
    rows: list[dict[str, Any]] = []
    for shape in (shapes := args.shapes.split(",")):
        if shape not in LOADS:
            parser.error(f"--shapes: {shape!r} is not one of {', '.join(LOADS)}")
    for shape in shapes:
        rows += [row.line() for row in rows_of(shape, asyncio.run(measure(shape, args)))]
        write(args.out, "admission", rows, show=False)
    write(args.out, "admission", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
