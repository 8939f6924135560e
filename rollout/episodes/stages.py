"""Counts samples in their task, in vLLM and in scoring: a function that hangs shows early."""

import time

from rollout.tasks.trajectory import Generate

STAGES = ("task", "generating", "scoring")


class Stay:
    """Samples in a stage. A generator's context manager takes twice as long."""

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
        return Stay(self._stays[stage], samples)

    def around(self, generate: Generate) -> Generate:
        async def counted(*args: object, **kwargs: object) -> object:
            with self("generating"):
                return await generate(*args, **kwargs)  # type: ignore[arg-type]

        return counted  # type: ignore[return-value]

    def stats(self) -> dict[str, float]:
        found = {stage: float(sum(each.samples for each in self._stays[stage])) for stage in STAGES}
        # a task may call generate several times in parallel
        found["task"] = max(0.0, found["task"] - found["generating"])
        now = time.monotonic()
        if self._stays["scoring"]:
            found["scoring_s"] = now - min(each.since for each in self._stays["scoring"])
        if found["task"]:
            found["task_s"] = now - min(each.since for each in self._stays["task"])
        return found
