"""What a task is given and what it returns: a problem and `generate` in, a trajectory out.

A user's task imports these names from `rollout.tasks`. Run by `rollout/episodes/episode.py`, once for each sample.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from rollout.rewards.convention import Score


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


class Trajectory:
    """The tokens of one sample in order: the prompt, what the policy sampled, what the environment answered."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.start = list(prompt), len(prompt)
        self.sampled, self.logprobs, self.versions = [0] * self.start, [0.0] * self.start, [-1] * self.start
        self.finish: Literal["stop", "length"] = "stop"
        self.metrics: dict[str, float] = {}
        """Numbers the task wants averaged into the batch's metrics."""

    def take(self, completion: Completion) -> None:
        """Append what the policy sampled: the learner trains on these tokens."""
        self.tokens += completion.tokens
        self.sampled += [1] * len(completion.tokens)
        self.logprobs += completion.logprobs
        self.versions += completion.versions
        self.finish = completion.finish

    def give(self, tokens: list[int]) -> None:
        """Append what the environment answers: context for the policy, not trained on."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)
        self.versions += [-1] * len(tokens)

    def sample(self, score: Score, answer: str) -> Sample:
        """The sample as it is sent to the buffer; `answer` is the text of all tokens after the prompt."""
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


Generate = Callable[[list[int]], Awaitable[Completion]]
"""Samples a continuation of these tokens under the run's sampling settings."""

Task = Callable[[Problem, Generate], Awaitable[Trajectory]]
"""Makes one sample of a problem."""


async def single_turn(problem: Problem, generate: Generate) -> Trajectory:
    """Sample once."""
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    return trajectory
