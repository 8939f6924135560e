"""What the samples of a rollout server wait for: their task, vLLM's tokens, or their reward. Sent with each heartbeat.

A reward function or task that hangs shows here long before its timeout. Used by `episode.py`; waits for nothing.
"""

import time

from rollout.tasks.trajectory import Generate

STAGES = ("task", "generating", "scoring")


class Stay:
    """The stay of `samples` in a stage, during a `with` block. It is a class because a context manager made of a
    generator takes more than twice as long, and each sample has two."""

    def __init__(self, others: "set[Stay]", samples: int) -> None:
        self.others, self.samples, self.since = others, samples, time.monotonic()

    def __enter__(self) -> None:
        self.others.add(self)

    def __exit__(self, *_: object) -> None:
        self.others.remove(self)


class Stages:
    """Samples by stage. Example of `stats()`: `{"task": 0, "generating": 12, "scoring": 4, "scoring_s": 7.5}`."""

    def __init__(self) -> None:
        self._stays: dict[str, set[Stay]] = {stage: set() for stage in STAGES}

    def __call__(self, stage: str, samples: int = 1) -> Stay:
        """Count `samples` in `stage` during the `with` block."""
        return Stay(self._stays[stage], samples)

    def around(self, generate: Generate) -> Generate:
        """`generate` of one sample; meanwhile the sample counts as generating, not as in its task."""

        async def counted(*args: object, **kwargs: object) -> object:
            with self("generating"):
                return await generate(*args, **kwargs)  # type: ignore[arg-type]

        return counted  # type: ignore[return-value]

    def stats(self) -> dict[str, float]:
        """Samples by stage, and for task and scoring the longest time in seconds that one has been there."""
        found = {stage: float(sum(each.samples for each in self._stays[stage])) for stage in STAGES}
        # generation is called by the task, and several at a time by one that talks in parallel
        found["task"] = max(0.0, found["task"] - found["generating"])
        now = time.monotonic()
        if self._stays["scoring"]:
            found["scoring_s"] = now - min(each.since for each in self._stays["scoring"])
        if found["task"]:
            found["task_s"] = now - min(each.since for each in self._stays["task"])
        return found
