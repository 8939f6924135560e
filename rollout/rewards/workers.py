"""Reward workers: processes that score answers and can be killed, whatever a reward function does.

A function that takes longer than `reward.timeout_s`, ends its process or raises gives a RewardError, never a reward.
"""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs.schema import RewardConfig, RewardPart
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.errors import RewardError, all_errors
from rollout.rewards import load_reward
from rollout.rewards.convention import ASKED, Answer, Score
from rollout.rewards.models.http_model import ServerFailed, ServersAway
from rollout.rewards.models.own_servers import OwnServers

MOST_LOSSES = 3
"""A call may be what ends the run's servers."""
LOST = (ServersAway.__name__, ServerFailed.__name__)


class RewardPool:
    """A cage of workers for each reward function. Entering raises ValueError."""

    def __init__(self, config: RewardConfig, log: Path | None = None, keys: Path | None = None) -> None:
        self._several, self._servers = not isinstance(config.function, str), OwnServers(config.urls)
        self._scorers = []
        for number, part in enumerate(config.parts):
            named = f"{log}-reward{f'-{part.metric}' if self._several else ''}" if log else None
            servers = self._servers if part.uses_servers else None
            self._scorers.append(PartScorer(config, number, servers, named, keys))
        self._entered = AsyncExitStack()

    async def __aenter__(self) -> "RewardPool":
        async with AsyncExitStack() as entered:
            for scorer in self._scorers:
                await entered.enter_async_context(scorer.cage)
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._servers.close()
        await self._entered.aclose()

    @property
    def asks(self) -> set[str]:
        return {field for scorer in self._scorers for field in scorer.cage.about["asks"]}

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        try:
            async with asyncio.TaskGroup() as tasks:
                scoring = [tasks.create_task(scorer.score(answers)) for scorer in self._scorers]
        except BaseExceptionGroup as errors:
            found = [error for error in all_errors(errors) if isinstance(error, RewardError)]
            if not found:
                raise
            raise min(found, key=lambda error: error.returned) from None  # what ended a worker, not a call beside it
        by_part = [task.result() for task in scoring]
        if not self._several:
            return by_part[0]
        parts = [scorer.part for scorer in self._scorers]
        return [weighted(parts, scores) for scores in zip(*by_part, strict=True)]


class PartScorer:
    """One reward function and its workers."""

    def __init__(
        self, config: RewardConfig, number: int, servers: OwnServers | None, log: str | None, keys: Path | None
    ) -> None:
        self.part, self._servers = config.parts[number], servers
        function = CagedFunction(
            name=self.part.function,
            loader="rollout.rewards.workers:load",
            arguments=[config.model_dump(mode="json"), number, str(keys.absolute()) if keys else None],
            timeout_s=config.timeout_s,
            memory_gib=config.memory_gib,
            max_calls=config.max_calls,
            concurrency=config.concurrency,
            log=log,
        )
        self.cage = Cage(function, config.workers)

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        calls = [answers] if self.cage.about["batch"] else [[answer] for answer in answers]
        async with asyncio.TaskGroup() as tasks:
            scoring = [tasks.create_task(self._score(call)) for call in calls]
        return [score for task in scoring for score in task.result()]

    async def _score(self, answers: Sequence[Answer]) -> list[Score]:
        losses = 0
        while True:
            if self._servers:
                await self._servers.ready()
            try:
                return await self._call(answers)
            except RewardError as error:
                losses += 1
                if self._servers is None or error.origin not in LOST or losses >= MOST_LOSSES:
                    raise
                self._servers.lost()

    async def _call(self, answers: Sequence[Answer]) -> list[Score]:
        try:
            left_out = ASKED.keys() - set(self.cage.about["asks"])
            sent = [{name: value for name, value in vars(each).items() if name not in left_out} for each in answers]
            scores = await self.cage.call(sent)
        except CagedError as error:
            failed = RewardError(str(error), error.permanent, error.origin)
            failed.returned = error.returned
            for note in getattr(error, "__notes__", ()):
                failed.add_note(note)
            raise failed from None
        return [Score(**score) for score in scores]


def weighted(parts: Sequence[RewardPart], scores: Sequence[Score]) -> Score:
    """Sum scores by weight, with metrics such as `{"format": 1.0, "format/solved": 0.0}`."""
    metrics: dict[str, float] = {}
    for part, score in zip(parts, scores, strict=True):
        metrics[part.metric] = score.reward
        metrics |= {f"{part.metric}/{name}": value for name, value in score.metrics.items()}
    return Score(sum(part.weight * score.reward for part, score in zip(parts, scores, strict=True)), metrics)


def load(config: dict[str, Any], number: int, keys: str | None) -> Any:
    """In a worker. Raises ValueError."""
    reward = load_reward(RewardConfig(**config), number, Path(keys) if keys else None)

    def score(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [asdict(score) for score in reward.score([Answer(**answer) for answer in answers])]

    async def score_async(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [asdict(score) for score in await reward.score_async([Answer(**answer) for answer in answers])]

    loaded: Any = score_async if reward.is_async else score
    loaded.about = {"batch": reward.batch, "async": reward.is_async, "asks": reward.asks}
    loaded.close = getattr(reward.function, "close", None)
    return loaded
