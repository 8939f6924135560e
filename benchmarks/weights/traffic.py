"""Requests that keep a rollout engine busy while `benchmarks.weights` and `benchmarks.weights_pause` update it.

`RequestTraffic` keeps a number of sequences running, judges each token's version and notes when tokens came; `Lag`
notes how late the event loop is. Both run in the server's loop and wait for the engine and the clock only.
"""

import asyncio
import itertools
import json
import math
import random
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

WINDOW_S = 3.0
AWAY_S = 0.5
"""Tokens are counted over WINDOW_S seconds that end, or begin, so long before and after a pause."""
PROMPT_TOKENS = 128
FLAT, SAME = 1e-5, 2e-6
"""So near to -log(vocabulary) a log-probability is meant to be that; so near to each other, two are one kernel's."""


class RequestTraffic:
    """`running` sequences of `length` tokens: one that ends is followed by another at once. The first ones are of any
    length, so that ends are spread evenly.

    At odd versions every token has log-probability `-log(vocabulary)`, so each tells whether its stamp is right.
    """

    def __init__(self, engine: Any, vocabulary: int, running: int, length: int) -> None:
        self.engine, self.running, self.length = engine, running, length
        self.vocabulary, self.flat = vocabulary, -math.log(vocabulary)
        self.finished = self.lost = self.early = self.late = self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """All sequences, and the watch; cancel them to end."""
        requests = [tasks.create_task(self._request(number)) for number in range(self.running)]
        return [*requests, tasks.create_task(self._watch())]

    async def _request(self, number: int) -> None:
        draw = random.Random(number)
        length = draw.randrange(1, self.length)
        while True:
            prompt = [draw.randrange(3, self.vocabulary) for _ in range(PROMPT_TOKENS)]
            try:
                self._on_all_staged(await self.engine.generate(prompt, length, 1.0), length)
            except RuntimeError as error:
                self.lost += 1
                print(f"lost: {error}", file=sys.stderr, flush=True)
            length = self.length

    def _on_all_staged(self, completion: Any, length: int) -> None:
        """Count tokens whose log-probability belies their version."""
        self.finished += 1
        if completion.finish == "length" and len(completion.tokens) != length:
            self.lost += 1
        self.tokens += len(completion.tokens)
        logprobs = completion.logprobs
        flat = [abs(logprob - self.flat) < FLAT for logprob in logprobs]
        for at, version in enumerate(completion.versions):
            if version % 2 and not flat[at]:
                self.early += 1
            elif (
                version % 2 == 0
                and flat[at]
                and any(
                    flat[other] and abs(logprobs[other] - logprobs[at]) < SAME
                    for other in range(max(at - 1, 0), min(at + 2, len(flat)))
                    if other != at
                )
            ):
                self.late += 1  # by chance one in 10^6 beside an odd version
            else:
                continue
            near = slice(max(at - 3, 0), at + 4)
            seen = [*zip(completion.versions[near], logprobs[near], strict=True)]
            print(f"stamped wrong: token {at} of {length}, around it {seen}", file=sys.stderr, flush=True)

    async def _watch(self) -> None:
        while True:
            tokens = self.engine.tokens
            if not self.arrivals or self.arrivals[-1][1] != tokens:
                self.arrivals.append((time.monotonic(), tokens))
            await asyncio.sleep(0.004)

    def rate(self, start: float, end: float) -> float | None:
        """Tokens a second between two moments; None where they were not all watched."""
        inside = [arrival for arrival in self.arrivals if start <= arrival[0] <= end]
        if not inside or self.arrivals[0][0] > start or self.arrivals[-1][0] < end:
            return None
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def around(self, paused: float, resumed: float) -> dict[str, float | None]:
        """Tokens a second before and after a pause, the longest time without any in it, and the usual time."""
        before = self.rate(paused - AWAY_S - WINDOW_S, paused - AWAY_S)
        after = self.rate(resumed + AWAY_S, resumed + AWAY_S + WINDOW_S)
        near = [t for t, _ in self.arrivals if paused - AWAY_S <= t <= resumed + AWAY_S]
        gaps = [b - a for a, b in itertools.pairwise(near)]
        return {"before": before, "after": after, "silence_s": max(gaps, default=0.0), "step_s": median(gaps or [0.0])}


class Lag:
    """How late the event loop comes to what is due, and how much of a CPU this process takes."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []
        self._since, self._cpu_s = time.monotonic(), time.process_time()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            now = time.monotonic()
            self.late.append((now, now - due))

    def worst(self, start: float, end: float) -> float:
        """The longest delay that ended between two moments, or is in progress at the end."""
        inside = [late for _, late in itertools.takewhile(lambda noted: noted[0] >= start, reversed(self.late))]
        unfinished = end - self.late[-1][0] if self.late else 0.0
        return max([*inside, unfinished])

    def busy(self) -> float:
        """Share of one CPU since the last call."""
        now, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / (now - self._since)
        self._since, self._cpu_s = now, cpu_s
        return share


def vocabulary_of(folder: str) -> int:
    """Of the model in `folder`."""
    return int(json.loads(Path(folder, "config.json").read_text())["vocab_size"])
