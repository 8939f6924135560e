"""Does a judge that takes its time slow training? The share of the learner's time that it waits, with a reward function
that answers at once and with an HTTP judge that answers after five seconds. CPU.

`python -m benchmarks.slow_judge` runs the real processes with the real vLLM, started by hand, one run after the other
from the same weights and seed: a tiny model, lengths geometric (mean 24, cut at 96), 16 groups of 8 a version,
staleness 8. The judge is a server in this process that keeps each request for `--judge-s` and then says a score; the
reward `judge` asks it. After `WARM_UP` versions, in which the buffer fills, `--versions` are counted. Prints one table
and the load of the machine; writes `benchmarks/results/slow_judge.json`.

Scoring holds no place of a server, so a slow judge costs age, not speed, as long as the bound on the age leaves room:
groups that wait for it are open, `judge_s` / (seconds of a version) batches of them. What it may cost: the learner's
wait is within a tenth of its time of what it is without.
"""

import argparse
import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from benchmarks.runs.processes import Died, free_port
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, progress, write

SHAPE, MEAN, CUT, RUNNING, GROUPS, SAMPLES, STALENESS = "speck", 24, 96, 64, 16, 8, 8
WARM_UP = 2 * STALENESS
LIMIT = 0.1
"""Most that the share of waiting may grow by."""
SHOWN = ("versions/h", "waits s/version", "train s/version", "age mean", "age max", "length", "versions", "failed")


class SlowJudge:
    """Keeps each question for `judge_s`, then answers with a score that depends on it. Counts how many it keeps."""

    def __init__(self, judge_s: float) -> None:
        self.judge_s, self.asked, self.kept, self.most_kept = judge_s, 0, 0, 0

    async def answer(self, request: web.Request) -> web.Response:
        """A chat completion."""
        question = (await request.json())["messages"][-1]["content"]
        self.asked, self.kept = self.asked + 1, self.kept + 1
        self.most_kept = max(self.most_kept, self.kept)
        await asyncio.sleep(self.judge_s)
        self.kept -= 1
        verdict = f"[[{sum(question.encode()) % 11}]]"
        return web.json_response({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """In a thread of its own; the address that the reward `judge` takes."""
        port, loop = free_port(), asyncio.new_event_loop()

        async def start() -> None:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app, access_log=None)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()

        loop.run_until_complete(start())
        thread = threading.Thread(target=loop.run_forever, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            loop.call_soon_threadsafe(loop.stop)
            thread.join()


def measure(args: argparse.Namespace, name: str, overrides: list[str]) -> dict[str, float]:
    """The figures of one run, all of whose processes get `overrides` of the run file."""
    engine = {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    learner = {"device": "cpu", "threads": 1}
    words = [f"--batch.max_staleness={STALENESS}", "--rollout.device=cpu", *overrides]
    before = os.getloadavg()[0]
    run = trained_run(args.work.resolve(), f"{name}-{int(time.time())}", SHAPE, MEAN, CUT, RUNNING, GROUPS, SAMPLES,
                      engine, learner)  # fmt: skip
    with run:
        for process in ("buffer", "rollout", "learner"):
            run.start(process, process, *words)
        run.wait(f"{WARM_UP} versions of warm-up", lambda: versions_of(run) >= WARM_UP, args.start_s)
        run.wait(f"{args.versions} versions", lambda: versions_of(run) >= WARM_UP + args.versions, args.start_s)
    found = figures_of(run.records()[WARM_UP - 1 :])
    found["waits, share"] = found["waits s/version"] * found["versions"] / found["seconds"]
    return found | {"load of the machine before": before, "after": os.getloadavg()[0]}


def rows_of(instant: dict[str, float], slow: dict[str, float], judge: SlowJudge, args: argparse.Namespace) -> list[Any]:
    """What is compared, then what each run was."""
    grown = slow["waits, share"] - instant["waits, share"]
    rows = [
        ResultRow("learner's wait, share of its time", slow["waits, share"], "", "at once", instant["waits, share"]),
        ResultRow("  more than at once", grown, "", "limit", LIMIT),
        ResultRow("versions/h", slow["versions/h"], "1/h", "at once", instant["versions/h"]),
        ResultRow("answers judged", judge.asked, "", f"at {args.judge_s:g} s each"),
        ResultRow("most answers with the judge at a time", judge.most_kept, ""),
    ]
    keys = (*SHOWN, "load of the machine before", "after")
    for case, found in (("at once", instant), ("judge", slow)):
        rows += [ResultRow(key, found[key], "", case=case) for key in keys]
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge-s", type=float, default=5.0)
    parser.add_argument("--versions", type=int, default=40)
    parser.add_argument("--start-s", type=float, default=400.0, help="most seconds for warm-up, and for the versions")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-judge"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "slow_judge.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    judge = SlowJudge(args.judge_s)
    try:
        with judge.serving() as url:
            asks = {"url": url, "model": "judge", "template": "{{ answer }}", "pattern": r"\[\[(\d+)\]\]", "scale": 10}
            function = ["--reward.function=judge", f"--reward.kwargs={json.dumps(asks)}", "--reward.concurrency=1024"]
            instant = measure(args, "at-once", [])
            progress(f"at once: {instant}")
            slow = measure(args, "judge", [*function, "--reward.timeout_s=60"])
            progress(f"judge: {slow}")
    except (Died, TimeoutError) as error:
        progress(f"FAILED: {type(error).__name__}: {error}")
        return 1
    write(args.out, "slow_judge", rows_of(instant, slow, judge, args))
    return int(slow["waits, share"] - instant["waits, share"] > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
