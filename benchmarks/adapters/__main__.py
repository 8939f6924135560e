"""What does an adapter cost a rollout server, and how long does a new one take to reach it?

`python -m benchmarks.adapters --shape Qwen2.5-7B` needs two GPUs, one for a server and one for the learner's stand-in;
on one GPU both share it, through sockets, and the figures are bounds. `--shape speck` runs on a CPU in a minute or two.
Each contender is the real engine in a process of its own (`adapter_ends.py`), random weights, `--running` sequences of
`--length` tokens at a time: first policies of whole weights, without `enable_lora`, which is the peer; then an adapter
of `--rank`. While the latter runs, the stand-in publishes `--updates` adapters by the real wire. Prints one table;
writes JSON. Speed only: that the numbers are right is shown by `tests/rollout/engine/lora/`.
"""

import argparse
import asyncio
import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.weights.__main__ import START_S, End
from benchmarks.weights.shapes import SHAPES, folder_of
from benchmarks.weights.sharing import two_ends
from benchmarks.weights.table import ResultRow, progress, write

ENDS = "benchmarks.adapters.adapter_ends"
PAUSE_MS, LAG_MS = 10.0, 60.0
"""Goals for an adapter of rank 32 of 7B."""


def config_of(args: argparse.Namespace, folder: Path, rank: int | None) -> dict[str, Any]:
    """The part of a run file that matters here."""
    gpu = torch.cuda.is_available()
    memory = {"gpu_memory_utilization": 0.6} if gpu else {"kv_cache_memory_bytes": 256 << 20}
    return {
        "model": {"path": str(folder), "lora": {"rank": rank} if rank else None},
        "data": {"train": "none.parquet", "max_prompt_tokens": 128},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": args.length},
        "rollout": {"sequences": args.running, "engine": memory | args.engine},
        "weights": {"probe_every": 0, "timeout_s": 60.0},
    }


async def serve(args: argparse.Namespace, rank: int | None) -> dict[str, Any]:
    """Run one contender; tokens per second, and with an adapter its updates."""
    folder, log = folder_of(args.shape, args.work), args.work / f"{'adapter' if rank else 'whole'}.log"
    (first, of_server), (second, of_learner) = two_ends().values()
    given = {"config": config_of(args, folder, rank), "running": args.running, "length": args.length}
    ends = [await End.start("server", given, [first], log, ENDS, **of_server)]
    try:
        await ends[0].answer("started", START_S)
        updates, events = [], []
        ends[0].tell("measure", args.seconds)
        rate = (await ends[0].answer("rate", START_S + args.seconds))["rate"]
        progress(f"{args.shape}: {rate:.0f} tokens/s")
        if rank:
            learner = {"config": given["config"]}
            ends.append(await End.start("learner", learner, [second], log, ENDS, **of_learner))
            ends[0].tell("follow", (await ends[1].answer("address", START_S))["address"])
            ends[1].tell("updates", args.updates, args.gap)
            updates = (await ends[1].answer("updates", START_S + args.updates * (args.gap + 60)))["updates"]
            ends[0].tell("report")
            events = (await ends[0].answer("events"))["events"]
        return {"rate": rate, "updates": updates, "events": events}
    finally:
        for end in ends:
            await end.end()


def rows_of(args: argparse.Namespace, whole: dict[str, Any], adapter: dict[str, Any]) -> list[ResultRow]:
    """The adapter against whole weights, and its updates against the goals."""
    label = f"{args.shape}, rank {args.rank}, {args.running} sequences"
    against = "the same server without an adapter"
    rows = [
        ResultRow("tokens/s with an adapter", adapter["rate"], "1/s", against, whole["rate"], label),
        ResultRow("  ratio", adapter["rate"] / whole["rate"], "", against, 1.0, label),
    ]
    # the first is loaded by vLLM's loaders, and recorded
    started = {update["version"]: update for update in adapter["updates"] if update["version"] > 0}
    events = [event for event in adapter["events"] if event["version"] in started]
    found = {
        "the call that swaps": ([event["load_s"] for event in events], None),
        "longest time without a token around a swap": ([event["silence_s"] for event in events], None),
        "the same less that without a swap": ([max(0.0, e["silence_s"] - e["quiet_s"]) for e in events], PAUSE_MS),
        "published to swapped": ([e["swapped"] - started[e["version"]]["started"] for e in events], LAG_MS),
    }
    for what, (values, goal) in found.items():
        for word, of in (("median", median), ("worst", max)):
            row = ResultRow(f"{what}, {word}", 1000.0 * of(values), "ms", "goal" if goal else "", goal, label)
            rows.append(row)
    sent = median(1000.0 * update["weights/span_s"] for update in started.values())
    rows.append(ResultRow("  of that the broadcast, median", sent, "ms", case=label))
    size = adapter["updates"][0]["weights/bytes"] / (1 << 20)
    return [*rows, ResultRow("adapter on the wire", size, "MiB", case=label)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="speck")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--running", type=int, default=32)
    parser.add_argument("--length", type=int, default=64, help="tokens per sequence")
    parser.add_argument("--seconds", type=float, default=5.0, help="of the measurement of tokens/s")
    parser.add_argument("--updates", type=int, default=4)
    parser.add_argument("--gap", type=float, default=1.0, help="seconds between updates")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-adapters"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "adapters.json")
    args = parser.parse_args()
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    found = []
    for rank in (None, args.rank):
        progress(f"{args.shape}: {f'adapter of rank {rank}' if rank else 'whole weights'}")
        found.append(asyncio.run(serve(args, rank)))
    write(args.out, "adapters", [row.line() for row in rows_of(args, *found)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
