"""Requests that keep a rollout engine busy while `benchmarks.weights` updates it.

`RequestTraffic` keeps a number of sequences running and checks each token's version stamp; `Lag` measures the delay of
the event loop. Both run in the server's event loop and wait for the engine and the clock only.
"""

import asyncio
import itertools
import json
import random
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.weights.known import logprobs_of

WINDOW_S = 3.0
AWAY_S = 0.5
"""Tokens are counted over windows of WINDOW_S seconds, one that ends AWAY_S before a swap and one that begins AWAY_S
after it."""
PROMPT_TOKENS = 128
SAME = 5e-4
"""Log-probabilities within this are equal: those of two versions differ by 2e-3 or more (`known.py`)."""


class RequestTraffic:
    """`running` sequences of `length` tokens; each that ends is replaced at once. The first ones have random lengths,
    so that ends are spread evenly. Under the weights of `known.mark` each token's log-probability tells its version.
    """

    def __init__(self, engine: Any, vocabulary: int, running: int, length: int) -> None:
        self.engine, self.running, self.length, self.vocabulary = engine, running, length, vocabulary
        self.finished = self.lost = self.wrong = self.tokens = 0
        self.examples: list[dict[str, Any]] = []
        self.arrivals: list[tuple[float, int]] = []

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start all sequences and the recording of arrivals; cancel the tasks to end them."""
        requests = [tasks.create_task(self._request(number)) for number in range(self.running)]
        return [*requests, tasks.create_task(self._record_arrivals())]

    async def _request(self, number: int) -> None:
        draw = random.Random(number)
        length = draw.randrange(1, self.length)
        while True:
            prompt, images = self.next_prompt(draw)
            try:
                self.count(await self.engine.generate(prompt, length, 1.0, images=images), length)
            except RuntimeError as error:
                self.lost += 1
                print(f"lost: {error}", file=sys.stderr, flush=True)
            length = self.length

    def next_prompt(self, draw: random.Random) -> tuple[list[int], list[Any]]:
        """Tokens of a prompt, and the images that it shows."""
        return [draw.randrange(3, self.vocabulary) for _ in range(PROMPT_TOKENS)], []

    def count(self, completion: Any, length: int) -> None:
        """Count a sequence that has ended, and those of its tokens whose log-probability is not one of their
        version's."""
        self.finished += 1
        if completion.finish == "length" and len(completion.tokens) != length:
            self.lost += 1
        self.tokens += len(completion.tokens)
        self.wrong += self._wrong_stamps(completion, length)

    def _wrong_stamps(self, completion: Any, length: int) -> int:
        versions, logprobs = np.array(completion.versions), np.array(completion.logprobs)
        wrong = np.ones(len(versions), bool)
        for version in np.unique(versions):
            near = [np.abs(logprobs - logprob) < SAME for logprob in logprobs_of(int(version), self.vocabulary)]
            wrong &= (versions != version) | ~(near[0] | near[1])
        for at in wrong.nonzero()[0][:3]:
            near_it = slice(max(at - 3, 0), at + 4)
            seen = [*zip(versions[near_it].tolist(), logprobs[near_it].tolist(), strict=True)]
            self.examples.append({"token": int(at), "of": length, "ended": time.monotonic(), "around": seen})
            print(f"stamped wrong: {self.examples[-1]}", file=sys.stderr, flush=True)
        return int(wrong.sum())

    def counts(self) -> dict[str, int]:
        """What was counted until now, of sequences that have ended."""
        return {key: getattr(self, key) for key in ("finished", "lost", "wrong", "tokens")}

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

    def around(self, began: float, swapped: float) -> dict[str, float | None]:
        """Tokens per second before and after a swap."""
        before = self.rate(began - AWAY_S - WINDOW_S, began - AWAY_S)
        return {"before": before, "after": self.rate(swapped + AWAY_S, swapped + AWAY_S + WINDOW_S)}


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
    config = json.loads(Path(folder, "config.json").read_text())
    return int(config.get("text_config", config)["vocab_size"])
