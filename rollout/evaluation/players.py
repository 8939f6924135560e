"""Plays the sets of `data.eval` with the run's task and rewards."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from configs.checks import existing
from configs.data.sources import needs_truth
from configs.load import ConfigError
from configs.schema import Config, EvalSet
from rollout.concurrency import SparePlaces
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.prompts import without_images
from rollout.episodes.setup import RolloutSetup
from rollout.evaluation.statistics import Attempt, figures

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

REASONS = 5
MOST_CHARS = 50_000


@dataclass(frozen=True)
class ProblemSet:
    """A set of `data.eval`, whose rows are read when asked for."""

    name: str
    given: EvalSet
    rows: Sequence[dict[str, Any]]

    def episodes(self, config: Config, setup: RolloutSetup, engine: "Engine") -> Episodes:
        temperature = self.given.temperature_of(config.sampling)
        return setup.episodes(config, engine, temperature, samples=1, max_tokens=self.given.max_tokens)


@dataclass(frozen=True)
class Played:
    """What came of a set."""

    figures: dict[str, float]
    reasons: list[str]
    examples: list[dict[str, Any]]
    """First attempts: `problem` (the row), `answer`, `reward`, `finish`."""


def load_sets(config: Config) -> list[ProblemSet]:
    """Raises ConfigError."""
    from buffer.problems import check_images, load_problems  # slow to import

    sets, found = [], list[str]()
    room, truth = existing(config.run.path), needs_truth(config)
    for key, (name, given) in zip(list(config.data.sources())[1:], config.data.eval.items(), strict=True):
        try:
            problems = load_problems(Path(given.path), config.data, room, f"data.{key}", truth)
            check_images(config, problems, key)
        except ConfigError as error:
            found += error.problems
        else:
            rows = problems[: given.limit] if given.limit else problems
            sets.append(ProblemSet(name, given, rows))
    if found:
        raise ConfigError(found)
    return sets


async def play(problems: ProblemSet, episodes: Episodes, places: SparePlaces, keep: int) -> Played:
    """Make all attempts; keep `keep` answers for reading.

    Raises only what the server cannot survive, such as EngineDead.
    """
    rows, samples = problems.rows, problems.given.samples
    scored: list[list[Attempt]] = [[] for _ in rows]
    reasons: Counter[str] = Counter()
    examples: dict[int, dict[str, Any]] = {}

    async def attempt(row: int, given: dict[str, Any], first: bool) -> None:
        outcome = await episodes.attempt(given)
        if isinstance(outcome, Failure):
            reasons[outcome.reason] += 1
            return
        scored[row].append(attempt_of(outcome, episodes.sampler.engine.version))
        if first and row < keep:
            examples[row] = example_of(given, outcome)

    async with asyncio.TaskGroup() as tasks:
        for row in range(len(rows)):
            given = await asyncio.to_thread(rows.__getitem__, row)  # reasoning-gym may have to make it first
            for number in range(samples):
                await places.take()
                made = tasks.create_task(attempt(row, given, first=number == 0))
                made.add_done_callback(places.free)
    found = figures(scored, samples, problems.given.k)
    return Played(
        found, [text for text, _ in reasons.most_common(REASONS)], [examples[row] for row in sorted(examples)]
    )


def attempt_of(group: Group, version: int) -> Attempt:
    """Return the only sample in numbers; all of it is of `version`."""
    (sample,) = group.samples
    sampled = sample.sampled.numpy() == 1
    versions = set(sample.versions.numpy()[sampled].tolist())
    assert versions == {version}, f"an attempt at version {version} has tokens of versions {versions}"
    return Attempt(sample.reward, int(sampled.sum()), sample.finish == "length")


def example_of(row: dict[str, Any], group: Group) -> dict[str, Any]:
    (sample,) = group.samples
    answer = sample.answer[:MOST_CHARS]
    return {"problem": without_images(row), "answer": answer, "reward": sample.reward, "finish": sample.finish}
