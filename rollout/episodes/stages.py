"""What the samples of a rollout server wait for: their task, vLLM's tokens, or their reward. Sent with each heartbeat.

A reward function or task that hangs shows here long before its timeout. Used by `episode.py`; waits for nothing.
"""

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollout.tasks.trajectory import Generate

STAGES = ("task", "generating", "scoring")


class Stages:
    """Samples by stage. Example of `stats()`: `{"task": 0, "generating": 12, "scoring": 4, "scoring_s": 7.5}`."""

    def __init__(self) -> None:
        self._ids = itertools.count()
        self._inside: dict[str, dict[int, tuple[int, float]]] = {stage: {} for stage in STAGES}
        """By stage: number of samples, and since when."""

    @contextmanager
    def __call__(self, stage: str, samples: int = 1) -> Iterator[None]:
        """Count `samples` in `stage` during the `with` block."""
        number, inside = next(self._ids), self._inside[stage]
        inside[number] = samples, time.monotonic()
        try:
            yield
        finally:
            del inside[number]

    def around(self, generate: Generate) -> Generate:
        """`generate` of one sample; meanwhile the sample counts as generating, not as in its task."""

        async def counted(*args: object, **kwargs: object) -> object:
            with self("generating"):
                return await generate(*args, **kwargs)  # type: ignore[arg-type]

        return counted  # type: ignore[return-value]

    def stats(self) -> dict[str, float]:
        """Samples by stage, and for task and scoring the longest time in seconds that one has been there."""
        found = {stage: float(sum(samples for samples, _ in self._inside[stage].values())) for stage in STAGES}
        # generation is called by the task, and several at a time by one that talks in parallel
        found["task"] = max(0.0, found["task"] - found["generating"])
        now = time.monotonic()
        if self._inside["scoring"]:
            found["scoring_s"] = now - min(since for _, since in self._inside["scoring"].values())
        if found["task"]:
            found["task_s"] = now - min(since for _, since in self._inside["task"].values())
        return found
