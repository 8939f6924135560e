"""Reward workers: processes that score answers and can be killed, whatever a reward function does.

A rollout server owns one pool. `score` waits for a free worker and then for the function, at most `reward.timeout_s`
per call. A function that takes longer, ends its process or raises ends in RewardError, never in a reward. Workers
import neither torch nor vllm, and die with the server, however it dies (`rollout/cage/`).
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import RewardConfig
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Score


class RewardPool:
    """An async context manager around the workers. Entering raises ValueError for a reward that cannot be loaded.

    `log`: path without its end of the files that get what the workers print.
    """

    def __init__(self, config: RewardConfig, log: Path | None = None) -> None:
        self.function = CagedFunction(
            name=config.function,
            loader="rollout.rewards.workers:load",
            arguments=[config.model_dump(mode="json")],
            timeout_s=config.timeout_s,
            memory_gib=config.memory_gib,
            max_calls=config.max_calls,
            log=f"{log}-reward" if log else None,
        )
        self._cage = Cage(self.function, config.workers)

    async def __aenter__(self) -> "RewardPool":
        await self._cage.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._cage.close()

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer of a group. Raises RewardError with the reason; a cancelled call must end."""
        calls = [answers] if self._cage.about["batch"] else [[answer] for answer in answers]
        scoring = [asyncio.create_task(self._score(call)) for call in calls]
        try:
            return [score for scores in await asyncio.gather(*scoring) for score in scores]
        finally:
            for task in scoring:
                task.cancel()

    async def _score(self, answers: Sequence[Answer]) -> list[Score]:
        try:
            scores = await self._cage.call([vars(answer) for answer in answers])
        except CagedError as error:
            failed = RewardError(str(error), error.permanent, error.origin)
            failed.returned = error.returned
            for note in getattr(error, "__notes__", ()):
                failed.add_note(note)
            raise failed from None
        return [Score(**score) for score in scores]


def load(config: dict[str, Any]) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    """In a worker: the run's reward, as a function of plain values. Raises ValueError in one line."""
    reward = load_reward(RewardConfig(**config))

    def score(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [asdict(score) for score in reward.score([Answer(**answer) for answer in answers])]

    score.about = {"batch": reward.batch}  # type: ignore[attr-defined]
    return score
