"""How long is each part of a pause, and how busy is the front process meanwhile? One server, no learner; CPU or GPU.

`python -m benchmarks.weights_pause` keeps 256 sequences running on a model of random weights (`--shape`), and pauses
and resumes it `--pauses` times with an empty call in place of the load, first as a rollout server does: one output per
sequence, versions stamped by count. The peer is the usual way, in the same run: one output per token, stamped when it
arrives, and vLLM's `pause_generation`. Prints one table; writes JSON.
"""

import argparse
import asyncio
import dataclasses
import itertools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.weights.shapes import SHAPES, folder_of
from benchmarks.weights.table import ResultRow, write
from benchmarks.weights.traffic import Lag, RequestTraffic, vocabulary_of
from configs.schema import Config
from learner.weights.receiver.staged import PauseTimings

PEER = "one output per token, pause_generation"
PARTS = {
    "paused_s": "paused",
    "stop_s": "  until vLLM has stopped",
    "settle_s": "  until its last tokens have arrived (beside the load)",
    "load_s": "  an empty call in place of the load",
    "resume_s": "  resume",
    "reach_s": "latency of a call to the worker, while generating",
    "back_s": "latency of its answer",
    "late_s": "longest delay of the event loop in the pause",
}


class PerToken:
    """The usual way: every token is an output of its own, and vLLM acknowledges a pause after another 20 ms."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._llm, self.version, self.tokens = engine, engine._llm, 0, 0
        self._numbers = itertools.count()
        self._chunks = 0

    async def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Any:
        """As a server that streams its outputs does."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        from rollout.tasks import Completion

        parameters = SamplingParams(max_tokens=max_tokens, temperature=temperature, logprobs=0, flat_logprobs=True,
                                    detokenize=False, output_kind=RequestOutputKind.DELTA)  # fmt: skip
        tokens, logprobs, versions = [], [], []
        finish: Any = None
        request: Any = {"prompt_token_ids": prompt, "cache_salt": str(self.version)}
        async for output in self._llm.generate(request, parameters, f"peer{next(self._numbers)}"):
            delta = output.outputs[0]
            tokens += delta.token_ids
            logprobs += delta.logprobs.logprobs
            versions += [self.version] * len(delta.token_ids)
            finish = delta.finish_reason
            self.tokens += len(delta.token_ids)
            self._chunks += 1
        return Completion(tokens, logprobs, versions, finish)

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]:
        answers: list[Any] = await self._engine.collective(method, *args, timeout_s=timeout_s)
        return answers

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[PauseTimings]:
        timings, started = PauseTimings(), time.perf_counter()
        await self._llm.pause_generation(mode="keep", clear_cache=False)
        timings.stop_s, settling, idle = time.perf_counter() - started, time.perf_counter(), 0
        while idle < 16:
            seen = self._chunks
            await asyncio.sleep(0)
            idle = idle + 1 if seen == self._chunks else 0
        timings.settle_s = time.perf_counter() - settling
        yield timings
        resuming = time.perf_counter()
        await self._llm.resume_generation()
        now = time.perf_counter()
        timings.resume_s, timings.paused_s = now - resuming, now - started


async def pauses(engine: Any, args: argparse.Namespace, vocabulary: int) -> dict[str, Any]:
    """One half of the benchmark: the timings of each pause, and the front process's load over all of them."""
    traffic, lag = RequestTraffic(engine, vocabulary, args.running, args.length), Lag()
    found: list[dict[str, float]] = []
    async with asyncio.TaskGroup() as tasks:
        running = [*traffic.start(tasks), tasks.create_task(lag.watch())]
        while engine.tokens < args.running:  # until all prompts are prefilled
            await asyncio.sleep(0.1)
        await asyncio.sleep(2 * args.gap)
        lag.busy()
        before, since = engine.tokens, time.monotonic()
        for _ in range(args.pauses):
            await asyncio.sleep(args.gap)
            found.append(await pause(engine, lag))
        busy, rate = lag.busy(), (engine.tokens - before) / (time.monotonic() - since)
        for task in running:
            task.cancel()
    return {"pauses": found, "busy": busy, "rate": rate, "lost": traffic.lost}


async def pause(engine: Any, lag: Lag) -> dict[str, float]:
    """The timings of one pause."""
    sent = time.monotonic()
    (there,) = await engine.collective("rl_ping", timeout_s=60.0)
    figures = {"reach_s": there - sent, "back_s": time.monotonic() - there}
    started = time.monotonic()
    async with engine.paused() as timings:
        loading = time.monotonic()
        await engine.collective("rl_ping", timeout_s=60.0)
        figures["load_s"] = time.monotonic() - loading
    figures["late_s"] = lag.worst(started, time.monotonic())
    return figures | dataclasses.asdict(timings)


async def measure(args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Both halves, on one engine."""
    from rollout.engine.vllm_engine import Engine

    config = Config.model_validate({
        "model": {"path": str(folder)},
        "data": {"train": "none.parquet", "max_prompt_tokens": 256},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": args.length},
        "rollout": {"engine": {"max_num_seqs": args.running + 8}},
    })  # fmt: skip
    engine = await Engine.start(config, seed=1)
    try:
        vocabulary = vocabulary_of(str(folder))
        ours = await pauses(engine, args, vocabulary)
        theirs = await pauses(PerToken(engine), args, vocabulary)
    finally:
        await engine.close()
    return rows_of(ours, theirs)


def rows_of(ours: dict[str, Any], theirs: dict[str, Any]) -> list[dict[str, Any]]:
    """Median and worst of each timing."""
    rows = []
    for key, what in PARTS.items():
        for word, of in (("median", median), ("worst", max)):
            values = [1000.0 * float(of([pause[key] for pause in half["pauses"]])) for half in (ours, theirs)]
            rows.append(ResultRow(f"{what}, {word}", values[0], "ms", PEER, values[1]))
    per_token = [1e6 * half["busy"] / half["rate"] for half in (ours, theirs)]
    rows.append(ResultRow("front process's CPU time per token", per_token[0], "us", PEER, per_token[1]))
    rows.append(ResultRow("tokens/s, pauses included", ours["rate"], "1/s", PEER, theirs["rate"]))
    rows.append(ResultRow("requests lost", ours["lost"], "", PEER, theirs["lost"]))
    return [row.line() for row in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="speck", choices=SHAPES)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--pauses", type=int, default=20)
    parser.add_argument("--gap", type=float, default=0.5, help="seconds between pauses")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weights-pause.json")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        rows = uvloop.run(measure(args, folder_of(args.shape, Path(work))))
    write(args.out, "weights_pause", rows)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # vLLM's objects complain when the interpreter takes them apart
