"""What a task is given and what it returns: a problem and `generate` in, a trajectory out.

A user's task imports these names from `rollout.tasks`. Run by `rollout/episodes/episode.py`, once for each sample.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from rollout.rewards.convention import Score

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    """What a task is to make a sample of."""

    row: dict[str, Any]
    """The row of the data set, with all its columns."""
    prompt: list[int]
    """Tokens of its prompt, chat template applied: every trajectory begins with them."""
    tokenizer: "PreTrainedTokenizerBase"
    """The model's, to read what was sampled and to write what the environment answers."""
    max_tokens: int
    """Longest sample in tokens after the prompt, given ones included."""

    def left(self, tokens: list[int]) -> int:
        """How many tokens may follow these, which begin with the prompt; negative where these are too many already."""
        return len(self.prompt) + self.max_tokens - len(tokens)


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
            metrics={name: float(value) for name, value in self.metrics.items()} | score.metrics,
        )


class Generate(Protocol):
    """What a task samples with, under the run's temperature."""

    def __call__(
        self, tokens: list[int], max_tokens: int | None = None, stop: list[str] | None = None
    ) -> Awaitable[Completion]:
        """A continuation of `tokens`: of at most `max_tokens` (default: `sampling.max_tokens`) and of what is left of
        the sample's budget; up to a text of `stop` (default: `sampling.stop`), each one token, or the model's own end.
        Raises EpisodeError where nothing is left, or the arguments cannot be used."""


Task = Callable[[Problem, Generate], Awaitable[Trajectory]]
"""Makes one sample of a problem."""


async def single_turn(problem: Problem, generate: Generate) -> Trajectory:
    """Sample once."""
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    return trajectory
