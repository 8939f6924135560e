"""An episode: from a dispatched item to its group, or a `Failure`, which never becomes a reward of zero. One server
makes all samples of a group."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from buffer.wire.client import RefusedError, RolloutClient
from buffer.wire.protocol import FailureKind, WorkItem
from buffer.wire.sample import Sample
from configs.plain_text import without_credentials
from rollout.episodes.failure_log import FailureLog
from rollout.episodes.first_shown import FirstShown
from rollout.episodes.prompts import Prompts, without_images
from rollout.episodes.recorded_routes import RecordedRoutes
from rollout.episodes.sampler import Sampler
from rollout.episodes.stages import Stages
from rollout.errors import EngineDead, EpisodeError, all_errors, first_error
from rollout.rewards.convention import Answer, Score, Turn
from rollout.rewards.no_reward import NoReward
from rollout.rewards.workers import RewardPool
from rollout.tasks.trajectory import Problem, Recorded, Task, Trajectory
from rollout.teachers.scoring import Teachers

REASON_CHARS = 300
Ended = Callable[["asyncio.Task[Recorded]"], object]
"""Called when a sample has ended and needs no place any more."""


def uncounted(sample: "asyncio.Task[Recorded]") -> None:
    """Does nothing."""


@dataclass(frozen=True)
class Group:
    """All samples of a problem."""

    samples: list[Sample]
    failures: FailureLog = field(default_factory=FailureLog)

    async def deliver(self, buffer: RolloutClient, item: WorkItem) -> None:
        """A group that is refused or too large becomes a failure."""
        try:
            stored = await buffer.put(item, self.samples)
        except RefusedError as error:
            await Failure(str(error), "task").deliver(buffer, item)
        else:
            if stored.unfit:
                self.failures.record(EpisodeError(stored.reason, origin="Unfit"), stored.reason)


@dataclass(frozen=True)
class Failure:
    """Why an item did not become a group. `returned`: counts as no attempt."""

    reason: str
    kind: FailureKind = "infrastructure"
    permanent: bool = False
    returned: bool = False

    async def deliver(self, buffer: RolloutClient, item: WorkItem) -> None:
        await buffer.fail(item, self.reason, self.permanent, self.returned, self.kind)


@dataclass
class Episodes:
    """Makes groups of `samples` from items."""

    prompts: Prompts
    task: Task
    sampler: Sampler
    rewards: RewardPool | NoReward | None
    """None: the task itself scores."""
    samples: int
    sample_attempts: int = 1
    failures: FailureLog = field(default_factory=FailureLog)
    stages: Stages = field(default_factory=Stages)
    teachers: Teachers | None = None
    first: FirstShown | None = None
    _open: dict[int, asyncio.Future[Failure]] = field(default_factory=dict)

    async def run(self, item: WorkItem, ended: Ended = uncounted) -> Group | Failure:
        """Raises only what the server cannot survive, such as EngineDead."""
        abandoned = self._open[item.lease] = asyncio.get_running_loop().create_future()
        work = asyncio.create_task(self.attempt(item.problem, ended))
        try:
            await asyncio.wait({work, abandoned}, return_when=asyncio.FIRST_COMPLETED)
            return work.result() if work.done() else abandoned.result()
        finally:
            work.cancel()
            del self._open[item.lease]

    def abandon(self, leases: Iterable[int], failure: Failure) -> None:
        for lease in leases:
            if lease in self._open and not self._open[lease].done():
                self._open[lease].set_result(failure)

    def abandon_all(self, failure: Failure) -> None:
        self.abandon(list(self._open), failure)

    async def attempt(self, row: dict[str, Any], ended: Ended = uncounted) -> Group | Failure:
        try:
            return Group(await self._play(row, ended), self.failures)
        except* EpisodeError as errors:
            found = [error for error in all_errors(errors) if isinstance(error, EpisodeError)]
            error = min(found, key=lambda error: error.returned)  # the sample that ended the worker, not one beside it
            reason = " ".join(without_credentials(str(error)).split())[:REASON_CHARS]
            self.failures.record(error, reason)
            failure = Failure(reason, error.kind, error.permanent, error.returned)
        return failure

    async def _play(self, row: dict[str, Any], ended: Ended) -> list[Sample]:
        images = row.get("images")  # decoding would block the event loop
        problem = await asyncio.to_thread(self.sampler.problem, row) if images else self.sampler.problem(row)
        if self.first:
            self.first.prompt(problem)
        salt = self.sampler.engine.salt
        async with asyncio.TaskGroup() as tasks:
            playing = [tasks.create_task(self._play_once(problem, salt)) for _ in range(self.samples)]
            for sample in playing:
                sample.add_done_callback(ended)
        recorded = [task.result() for task in playing]
        answers = [self._answer(each.trajectory, without_images(row)) for each in recorded]
        scores = await self._judged(row, recorded, answers)
        if self.first:
            self.first.answer(recorded[0].trajectory, scores[0])
        made = zip(recorded, scores, answers, strict=True)
        try:
            return [each.trajectory.sample(score, answer.text, problem.images) for each, score, answer in made]
        except (ValueError, OverflowError) as error:  # a user's numbers and names
            reason = f"its sample cannot be stored: {' '.join(str(error).split())}"
            raise EpisodeError(reason, origin=type(error).__name__) from error

    async def _judged(
        self, row: dict[str, Any], recorded: Sequence[Recorded], answers: Sequence[Answer]
    ) -> list[Score]:
        if self.teachers is None:
            return await self._scored(recorded, answers)
        async with asyncio.TaskGroup() as judging:
            scoring = judging.create_task(self._scored(recorded, answers))
            judging.create_task(self.teachers.score(row, [each.trajectory for each in recorded]))
        return scoring.result()

    async def _scored(self, recorded: Sequence[Recorded], answers: Sequence[Answer]) -> list[Score]:
        with self.stages("scoring", len(answers)):
            return await self._scores(recorded, answers)

    async def _scores(self, recorded: Sequence[Recorded], answers: Sequence[Answer]) -> list[Score]:
        own = [each.score for each in recorded if each.score]
        if self.rewards:
            for each in recorded:
                each.trajectory.metrics |= {"task_score": each.score.reward} if each.score else {}
            return await self.rewards.score(answers)
        if len(own) < len(recorded):
            remedy = "let it return a number, or set trajectory.score"
            raise EpisodeError(f"rollout.task gave no score, and reward.function is task; {remedy}", origin="NoScore")
        return own

    def _answer(self, trajectory: Trajectory, row: dict[str, Any]) -> Answer:
        """What follows the prompts, without earlier text that later segments repeat."""
        columns, starts = trajectory.columns or trajectory.arrays(), trajectory.starts
        firsts = [trajectory.start, *(start + int(columns["sampled"][start:].argmax()) for start in starts[1:])]
        spans = [slice(*span) for span in zip(firsts, [*starts[1:], None], strict=True)]
        tokens, sampled = (np.concatenate([columns[name][span] for span in spans]) for name in ("tokens", "sampled"))
        turns: list[Turn] = []
        if not sampled.all():
            edges = np.flatnonzero(np.diff(sampled)) + 1
            for stretch, own in zip(np.split(tokens, edges), sampled[[0, *edges]], strict=True):
                turns.append({"text": self.prompts.text(stretch), "sampled": bool(own)})
        asks = self.rewards.asks if self.rewards else ()
        raw = self.prompts.text(tokens, special=True) if "raw" in asks else None
        prompt = self.prompts.text(columns["tokens"][: firsts[0]], special=True) if "prompt" in asks else None
        return Answer(self.prompts.text(tokens), len(tokens), row, turns or None, raw, prompt)

    async def _play_once(self, problem: Problem, salt: str) -> Recorded:
        """A failed sample need not fail the group."""
        for left in reversed(range(self.sample_attempts)):
            try:
                return await self._try_once(problem, salt)
            except EpisodeError as error:
                if error.permanent or not left:
                    raise
                self.failures.record(error, f"{' '.join(str(error).split())[:REASON_CHARS]}; the sample is tried again")
        raise AssertionError("unreachable")

    async def _try_once(self, problem: Problem, salt: str) -> Recorded:
        routes = RecordedRoutes(wanted=bool(self.sampler.engine.routes))
        try:
            with self.stages("task"):
                generate = self.sampler.generate_for(problem, salt, routes)
                made = await self.task(problem, self.stages.around(generate))
        except Exception as error:  # a user's code ends the attempt, not the server
            cause = first_error(error)
            if isinstance(cause, EpisodeError | EngineDead):
                raise cause from cause.__cause__
            name = type(cause).__name__
            raise EpisodeError(f"the task raised {name}: {cause}", origin=name) from error
        recorded = self.sampler.check(problem, made)
        recorded.trajectory.routes = routes.of(recorded.trajectory)
        return recorded
