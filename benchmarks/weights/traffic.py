"""Requests that keep a rollout engine busy while `benchmarks.weights` and `benchmarks.weights_pause` update it.

`RequestTraffic` keeps a number of sequences running, checks each token's version stamp and records when tokens arrived;
`Lag` measures the delay of the event loop. Both run in the server's event loop and wait for the engine and the clock
only.
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
"""Tokens are counted over windows of WINDOW_S seconds, one that ends AWAY_S before a pause and one that begins AWAY_S
after it."""
PROMPT_TOKENS = 128
FLAT, SAME = 1e-5, 2e-6
"""A log-probability within FLAT of -log(vocabulary) counts as equal to it; two within SAME of each other count as
results of the same kernel."""


class RequestTraffic:
    """`running` sequences of `length` tokens; each that ends is replaced at once. The first ones have random lengths,
    so that ends are spread evenly.

    At odd versions every token has log-probability `-log(vocabulary)`, which shows whether its version stamp is right.
    """

    def __init__(self, engine: Any, vocabulary: int, running: int, length: int) -> None:
        self.engine, self.running, self.length = engine, running, length
        self.vocabulary, self.flat = vocabulary, -math.log(vocabulary)
        self.finished = self.lost = self.early = self.late = self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start all sequences and the recording of arrivals; cancel the tasks to end them."""
        requests = [tasks.create_task(self._request(number)) for number in range(self.running)]
        return [*requests, tasks.create_task(self._record_arrivals())]

    async def _request(self, number: int) -> None:
        draw = random.Random(number)
        length = draw.randrange(1, self.length)
        while True:
            prompt = [draw.randrange(3, self.vocabulary) for _ in range(PROMPT_TOKENS)]
            try:
                self._check_stamps(await self.engine.generate(prompt, length, 1.0), length)
            except RuntimeError as error:
                self.lost += 1
                print(f"lost: {error}", file=sys.stderr, flush=True)
            length = self.length

    def _check_stamps(self, completion: Any, length: int) -> None:
        """Count the tokens whose log-probability contradicts their version stamp."""
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
                self.late += 1  # by chance for one token in 10^6 beside an odd version
            else:
                continue
            near = slice(max(at - 3, 0), at + 4)
            seen = [*zip(completion.versions[near], logprobs[near], strict=True)]
            print(f"stamped wrong: token {at} of {length}, around it {seen}", file=sys.stderr, flush=True)

    async def _record_arrivals(self) -> None:
        while True:
            tokens = self.engine.tokens
            if not self.arrivals or self.arrivals[-1][1] != tokens:
                self.arrivals.append((time.monotonic(), tokens))
            await asyncio.sleep(0.004)

    def rate(self, start: float, end: float) -> float | None:
        """Tokens per second between two moments; None unless the whole interval was recorded."""
        inside = [arrival for arrival in self.arrivals if start <= arrival[0] <= end]
        if not inside or self.arrivals[0][0] > start or self.arrivals[-1][0] < end:
            return None
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def around(self, paused: float, resumed: float) -> dict[str, float | None]:
        """Tokens per second before and after a pause, the longest time without a token around it, and the median time
        between tokens."""
        before = self.rate(paused - AWAY_S - WINDOW_S, paused - AWAY_S)
        after = self.rate(resumed + AWAY_S, resumed + AWAY_S + WINDOW_S)
        near = [t for t, _ in self.arrivals if paused - AWAY_S <= t <= resumed + AWAY_S]
        gaps = [b - a for a, b in itertools.pairwise(near)]
        return {"before": before, "after": after, "silence_s": max(gaps, default=0.0), "step_s": median(gaps or [0.0])}


class Lag:
    """The delay of the event loop, and this process's share of a CPU."""

    def __init__(self) -> None:
        self.late: list[tuple[float, float]] = []
        self._since, self._cpu_s = time.monotonic(), time.process_time()

    async def watch(self) -> None:
        """Record delays until cancelled."""
        while True:
            due = time.monotonic() + 0.002
            await asyncio.sleep(0.002)
            now = time.monotonic()
            self.late.append((now, now - due))

    def worst(self, start: float, end: float) -> float:
        """The longest delay that ended between two moments or was in progress at the end."""
        inside = [late for _, late in itertools.takewhile(lambda delay: delay[0] >= start, reversed(self.late))]
        unfinished = end - self.late[-1][0] if self.late else 0.0
        return max([*inside, unfinished])

    def busy(self) -> float:
        """Share of one CPU since the last call."""
        now, cpu_s = time.monotonic(), time.process_time()
        share = (cpu_s - self._cpu_s) / (now - self._since)
        self._since, self._cpu_s = now, cpu_s
        return share


def vocabulary_of(folder: str) -> int:
    """Vocabulary size of the model in `folder`."""
    return int(json.loads(Path(folder, "config.json").read_text())["vocab_size"])
