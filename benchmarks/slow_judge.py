"""Does a judge that takes its time slow training? The share of the learner's time that it waits, with an HTTP judge
that answers at once and with one that answers after five seconds. CPU.

`python -m benchmarks.slow_judge` runs the real processes with the real vLLM, started by hand: a tiny model, lengths
geometric (mean 48, cut at 192), 8 groups of 8 a version, staleness 12, the reward `judge`. The judge is a server in
this process that keeps each request before it says a score: for `--judge-s`, no time, `--judge-s`, no time and so on,
`--rounds` pairs in one run, so that a machine with other work is the same for both of a pair. After each change
`WARM_UP` versions pass before `--versions` are counted. Prints one table with the load of the machine; writes
`benchmarks/results/slow_judge.json`. Takes less than four minutes on two cores with nothing else to do.

Scoring holds no place of a server, so a slow judge costs age, not speed, as long as the bound on the age leaves room:
groups that wait for it are open, `judge_s` / (seconds of a version) batches of them. What it may cost is judged by the
median of the pairs' ratios: a version, with the learner's wait for it, takes a tenth longer at most.
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
from statistics import median
from typing import Any

from aiohttp import web

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import Died
from benchmarks.runs.trained import figures_of, trained_run, versions_of
from benchmarks.weights.table import ResultRow, progress, write

SHAPE, MEAN, CUT, RUNNING, GROUPS, SAMPLES, STALENESS = "speck", 48, 192, 128, 8, 8, 12
WARM_UP = STALENESS + 4
LIMIT = 1.1
"""Largest ratio of the time of a version, with the slow judge to without."""
SHOWN = ("s/version", "waits, share", "versions/h", "waits s/version", "train s/version", "age mean", "age max",
         "length", "versions", "failed", "load of the machine")  # fmt: skip


class SlowJudge:
    """Keeps each question for `judge_s`, then answers with a score that depends on it. Counts how many it keeps."""

    def __init__(self) -> None:
        self.judge_s, self.asked, self.kept, self.most_kept = 0.0, 0, 0, 0

    async def answer(self, request: web.Request) -> web.Response:
        """A chat completion."""
        question = (await request.json())["messages"][-1]["content"]
        self.asked, self.kept = self.asked + 1, self.kept + 1
        self.most_kept = max(self.most_kept, self.kept)
        try:
            await asyncio.sleep(self.judge_s)
        finally:
            self.kept -= 1
        verdict = f"[[{sum(question.encode()) % 11}]]"
        return web.json_response({"choices": [{"message": {"content": verdict}, "finish_reason": "stop"}]})

    @contextmanager
    def serving(self) -> Iterator[str]:
        """In a thread of its own; the address that the reward `judge` takes."""
        port, ready, ended = free_port(), threading.Event(), asyncio.Event()

        async def serve() -> None:
            app = web.Application()
            app.router.add_post("/v1/chat/completions", self.answer)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", port).start()
            ready.set()
            await ended.wait()
            await runner.cleanup()

        loop = asyncio.new_event_loop()
        thread = threading.Thread(target=loop.run_until_complete, args=[serve()], daemon=True)
        thread.start()
        ready.wait()
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            loop.call_soon_threadsafe(ended.set)
            thread.join()
            loop.close()


def measure(args: argparse.Namespace, url: str, judge: SlowJudge) -> list[tuple[float, dict[str, float]]]:
    """The judge's delay and the figures of each phase of one run."""
    asks = {"url": url, "model": "judge", "template": "{{ answer }}", "pattern": r"\[\[(\d+)\]\]", "scale": 10}
    words = ["--reward.function=judge", f"--reward.kwargs={json.dumps(asks)}", "--reward.concurrency=1024"]
    words += ["--reward.timeout_s=60", f"--batch.max_staleness={STALENESS}", "--rollout.device=cpu"]
    engine = {"kv_cache_memory_bytes": 256 << 20, "enforce_eager": True}
    run = trained_run(args.work.resolve(), f"judge-{int(time.time())}", SHAPE, MEAN, CUT, RUNNING, GROUPS, SAMPLES,
                      engine, {"device": "cpu", "threads": 1})  # fmt: skip
    phases = []
    with run:
        for process in ("buffer", "rollout", "learner"):
            run.start(process, process, *words)
        run.wait("the first version", lambda: versions_of(run) > 0, args.start_s)
        for judge.judge_s in (args.judge_s, 0.0) * args.rounds:
            first = versions_of(run) + WARM_UP
            last = first + args.versions
            what = f"{args.versions} versions at {judge.judge_s:g} s an answer"
            run.wait(what, lambda last=last: versions_of(run) >= last, args.start_s)  # type: ignore[misc]
            found = figures_of(run.records()[first - 1 : last])
            found["s/version"] = found["seconds"] / found["versions"]
            found["waits, share"] = found["waits s/version"] / found["s/version"]
            phases.append((judge.judge_s, found | {"load of the machine": os.getloadavg()[0]}))
            progress(f"{judge.judge_s:g} s: {phases[-1][1]}")
    return phases


def rows_of(phases: list[tuple[float, dict[str, float]]], judge: SlowJudge) -> tuple[list[dict[str, Any]], bool]:
    """What is compared, then what each phase was; and whether the limit is kept."""

    def over(key: str, slow: bool) -> float:
        return median(found[key] for judge_s, found in phases if bool(judge_s) == slow)

    ratios = [
        slow["s/version"] / quick["s/version"] for (_, slow), (_, quick) in zip(phases[::2], phases[1::2], strict=True)
    ]
    what, ratio = "learner's wait, share of its time", median(ratios)
    rows = [
        ResultRow("time of a version", over("s/version", True), "s", "answers at once", over("s/version", False)),
        ResultRow("  with / at once, median of the pairs", ratio, "", "limit", LIMIT),
        *(ResultRow(f"  with / at once, pair {number}", one, "") for number, one in enumerate(ratios)),
        ResultRow(what, over("waits, share", True), "", "answers at once", over("waits, share", False)),
        ResultRow("versions/h", over("versions/h", True), "1/h", "answers at once", over("versions/h", False)),
        ResultRow("answers judged", judge.asked, ""),
        ResultRow("most answers with the judge at a time", judge.most_kept, ""),
    ]
    for number, (judge_s, found) in enumerate(phases):
        rows += [ResultRow(key, found[key], "", case=f"{number}: {judge_s:g} s") for key in SHOWN]
    return [row.line() for row in rows], ratio <= LIMIT


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--judge-s", type=float, default=5.0)
    parser.add_argument("--versions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--start-s", type=float, default=400.0, help="most seconds for the start, and for each phase")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-judge"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "slow_judge.json")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    judge = SlowJudge()
    try:
        with judge.serving() as url:
            phases = measure(args, url, judge)
    except (Died, TimeoutError) as error:
        progress(f"FAILED: {type(error).__name__}: {error}")
        return 1
    rows, kept = rows_of(phases, judge)
    write(args.out, "slow_judge", rows)
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
