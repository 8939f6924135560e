"""An episode: what happens between a dispatched item and its group. Run by `loop.roll`, many at a time.

Consumes items of the buffer; waits for the engine's tokens and the reward workers. `Episodes.run` ends with a
`Group` or, if anything of ours went wrong, a `Failure`: never with a reward of zero in its place. All samples of a
group come from here, one server; a lease that the buffer has taken back ends its generation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from buffer.wire.message import Array
from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample
from rollout.interfaces import Prompts, Rewards, Sampler, Samples
from rollout.rewards import Answer, RewardError, Score


@dataclass(frozen=True)
class Completion:
    """What the engine sampled after a prompt, the stop token included: three lists of one length.

    Example: `Completion([9, 2], [-0.7, -0.1], [6, 7], "stop")`: the second token was sampled under version 7.
    """

    tokens: list[int]
    logprobs: list[float]
    versions: list[int]
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Problem:
    """A row of the data set and the tokens of its prompt."""

    row: dict[str, Any]
    prompt: list[int]


Generate = Callable[[list[int]], Awaitable[Completion]]
"""Samples on from these tokens, under the run's sampling settings."""


class EpisodeError(Exception):
    """An item cannot become a group here; the text says why. Tasks may raise it: the item is tried again, elsewhere.

    `permanent`: no other attempt can do better.
    """

    def __init__(self, reason: str, permanent: bool = False) -> None:
        super().__init__(reason)
        self.permanent = permanent


def sampler(engine: Sampler, max_tokens: int, temperature: float, stops: list[int]) -> Generate:
    """`generate` as tasks know it: the engine under these settings; 0 is greedy."""

    async def generate(tokens: list[int]) -> Completion:
        try:
            return await engine.generate(tokens, max_tokens, temperature, stops)
        except ValueError as error:
            raise EpisodeError(f"vLLM refuses {len(tokens)} tokens: {error}", permanent=True) from error

    return generate


class Trajectory:
    """What a task returns: the tokens of one sample, given or sampled, in order."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.start = list(prompt), len(prompt)
        self.sampled, self.logprobs, self.versions = [0] * self.start, [0.0] * self.start, [-1] * self.start
        self.finish: Literal["stop", "length"] = "stop"
        self.metrics: dict[str, float] = {}
        """Numbers the task wants averaged into the batch's metrics."""

    def take(self, completion: Completion) -> None:
        """Append what the policy sampled: these tokens are trained."""
        self.tokens += completion.tokens
        self.sampled += [1] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish = completion.finish

    def give(self, tokens: list[int]) -> None:
        """Append what the environment says: these tokens are read, not trained."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def sample(self, score: Score, answer: str) -> Sample:
        """As it travels."""
        return Sample(
            tokens=Array.of(np.array(self.tokens, np.int32)),
            sampled=Array.of(np.array(self.sampled, np.uint8)),
            behaviour_logprobs=Array.of(np.array(self.logprobs, np.float32)),
            versions=Array.of(np.array(self.versions, np.int32)),
            reward=score.reward,
            finish=self.finish,
            answer=answer,
            metrics=self.metrics | score.metrics,
        )


Task = Callable[[Problem, Generate], Awaitable[Trajectory]]
"""One sample of a problem: `rollout/tasks/` has the built-in ones."""


@dataclass(frozen=True)
class Group:
    """All samples of a problem."""

    samples: list[Sample]

    async def deliver(self, samples: Samples, item: WorkItem) -> None:
        """Put it; one whose lease moved on meanwhile is refused there, and lost."""
        await samples.put(item, self.samples)


@dataclass(frozen=True)
class Failure:
    """Why an item did not become a group."""

    reason: str
    permanent: bool = False

    async def deliver(self, samples: Samples, item: WorkItem) -> None:
        """Report it; the buffer dispatches the item again unless it is permanent."""
        await samples.fail(item, self.reason, self.permanent)


@dataclass
class Episodes:
    """Makes groups of `samples` from items; the parts are the run's."""

    prompts: Prompts
    task: Task
    generate: Generate
    rewards: Rewards
    samples: int
    _open: dict[int, asyncio.Future[Failure]] = field(default_factory=dict)

    async def run(self, item: WorkItem) -> Group | Failure:
        """One item. Raises only what the server cannot live with, such as a dead engine."""
        abandoned = self._open[item.lease] = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self._group(item.problem))
        try:
            await asyncio.wait({work, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else abandoned.result()
        finally:
            work.cancel()
            del self._open[item.lease]

    def abandon(self, leases: Iterable[int], reason: str) -> None:
        """End these leases' episodes with a Failure; their generation stops."""
        for lease in leases:
            if lease in self._open and not self._open[lease].done():
                self._open[lease].set_result(Failure(reason))

    def abandon_all(self, reason: str) -> None:
        """End every episode."""
        self.abandon(list(self._open), reason)

    async def _group(self, row: dict[str, Any]) -> Group | Failure:
        failure: Failure | None = None
        try:
            return Group(await self.play(row, self.samples))
        except* EpisodeError as errors:
            error = first_error(errors)
            failure = Failure(str(error), getattr(error, "permanent", False))
        except* RewardError as errors:
            failure = Failure(f"reward: {first_error(errors)}")
        return failure

    async def play(self, row: dict[str, Any], samples: int) -> list[Sample]:
        """`samples` scored samples of a row. Raises EpisodeError and RewardError, alone or in groups."""
        problem = Problem(row, self.prompts.tokens(row))
        async with asyncio.TaskGroup() as tasks:
            played = [tasks.create_task(self._play(problem)) for _ in range(samples)]
        trajectories = [task.result() for task in played]
        texts = [self.prompts.text(trajectory.tokens[trajectory.start :]) for trajectory in trajectories]
        answers = [
            Answer(text, len(trajectory.tokens) - trajectory.start, row)
            for text, trajectory in zip(texts, trajectories, strict=True)
        ]
        scores = await self.rewards.score(answers)
        return [t.sample(score, text) for t, score, text in zip(trajectories, scores, texts, strict=True)]

    async def _play(self, problem: Problem) -> Trajectory:
        return await self.task(problem, self.generate)


def first_error(error: BaseException) -> BaseException:
    """The first one inside groups of errors: the cause, for people."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
