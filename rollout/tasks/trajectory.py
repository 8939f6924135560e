"""What tasks take and return: a problem and `generate`, then a trajectory."""

import io
from array import array
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np

from buffer.data.images import ImageFormat, Picture, decode
from buffer.wire.message import Array
from buffer.wire.sample import Sample, SampleImage, TopTeacher, num_turns
from rollout.errors import EpisodeError
from rollout.rewards.convention import Score, finite

if TYPE_CHECKING:
    from PIL.Image import Image
    from transformers import PreTrainedTokenizerBase


NOT_SAMPLED = array("f", [0.0]), array("i", [-1])
"""Log-probability and version of a given token."""
CUT_SCORE = 0.0
"""Score of an episode that a limit ended before its task returned one."""


@dataclass(frozen=True)
class Completion:
    """What the engine sampled after a prompt, with the stop token.

    Example: `Completion([9, 2], [-0.7, -0.1], [6, 7], "stop")`: the second token is of version 7.
    """

    tokens: list[int]
    logprobs: Sequence[float]
    versions: Sequence[int]
    finish: Literal["stop", "length"]
    routes: np.ndarray | None = None
    """[tokens, layers, k], the experts of tokens read; hidden from tasks."""


@dataclass(frozen=True)
class PlacedImage:
    """An image among given tokens; its placeholders are from `start` to `end`."""

    start: int
    picture: Picture
    data: bytes = b""
    """Empty for an image of the row."""

    @property
    def end(self) -> int:
        return self.start + self.picture.num_tokens


def place(tokens: list[int], pictures: Sequence[Picture]) -> list[PlacedImage]:
    placed, end = list[PlacedImage](), 0
    for picture in pictures:
        placed.append(PlacedImage(tokens.index(picture.format.image_token, end), picture))
        end = placed[-1].end
    return placed


@dataclass(frozen=True)
class Problem:
    """What a task makes a sample of."""

    row: dict[str, Any]
    prompt: list[int]
    tokenizer: "PreTrainedTokenizerBase"
    max_tokens: int
    """Most tokens after the prompt, with given ones."""
    images: Sequence[PlacedImage] = ()
    format: ImageFormat | None = None
    """None for a text model."""
    answer: int | None = None
    """Longest answer of one turn; None: `sampling.max_tokens`."""

    def left(self, tokens: list[int]) -> int:
        """Return how many tokens may follow; may be negative."""
        return len(self.prompt) + self.max_tokens - len(tokens)


class Taught(NamedTuple):
    """What a teacher gave a sample."""

    teacher: str
    """`data_source` of its rows; "" for all others."""
    logprobs: np.ndarray
    """[tokens] float32, 0 for given tokens"""
    ids: np.ndarray | None = None
    """int32 [sampled tokens, k]: the most probable tokens"""
    top: np.ndarray | None = None
    """float32 [sampled tokens, k]"""

    @property
    def sent(self) -> str | TopTeacher:
        if self.ids is None or self.top is None:
            return self.teacher
        return TopTeacher(name=self.teacher, ids=Array.of(self.ids), logprobs=Array.of(self.top))


class Trajectory:
    """The tokens of one sample: prompt, what the policy sampled, what the environment answered."""

    routes: np.ndarray | None = None
    """[tokens, layers, k]; never set by tasks."""
    taught: Taught | None = None
    columns: dict[str, np.ndarray] | None = None

    def __init__(self, prompt: list[int]) -> None:
        self.tokens, self.start = list(prompt), len(prompt)
        self.sampled = [0] * self.start
        self.logprobs, self.versions = NOT_SAMPLED[0] * self.start, NOT_SAMPLED[1] * self.start
        self.finish: Literal["stop", "length"] = "stop"
        self.metrics: dict[str, float] = {}
        self.images: list[PlacedImage] = []
        self.starts: list[int] = [0]
        self.turn_rewards: list[float] = []
        """Empty, or one per turn; the reward function's is added to the last."""
        self.score: Any = None
        """For `reward.function: task`: a number or a dict."""

    def take(self, completion: Completion) -> None:
        """Append sampled tokens, which are trained on."""
        self.tokens += completion.tokens
        self.sampled += [1] * len(completion.tokens)
        self.logprobs.extend(completion.logprobs)
        self.versions.extend(completion.versions)
        self.finish = completion.finish

    def give(self, tokens: list[int]) -> None:
        """Append the environment's tokens, which are not trained on."""
        self.tokens += tokens
        self.sampled += [0] * len(tokens)
        self.logprobs.extend(NOT_SAMPLED[0] * len(tokens))
        self.versions.extend(NOT_SAMPLED[1] * len(tokens))

    def show(self, image: "bytes | Image", problem: Problem) -> None:
        """Append an image of the environment: a file's bytes or a PIL image. Raises ImageError, EpisodeError."""
        form = problem.format
        if form is None:
            raise EpisodeError("show: the model sees no images", permanent=True)
        data = image if isinstance(image, bytes) else png(image)
        picture = decode(data, form)
        self.images.append(PlacedImage(len(self.tokens) + 1, picture, data))
        self.give([form.vision_start, *[form.image_token] * picture.num_tokens, form.vision_end])

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the columns, [tokens] each. Raises ValueError, TypeError, OverflowError."""
        with np.errstate(over="ignore"):
            return {name: column(getattr(self, name)) for name, column in COLUMNS.items()}

    def sample(self, score: Score, answer: str, prompt_images: Sequence[PlacedImage] = ()) -> Sample:
        """Return the sample to send. `answer`: the text after the prompt."""
        images, columns = [*prompt_images, *self.images], self.columns or self.arrays()
        turns = [float(reward) for reward in self.turn_rewards]
        turns[-1:] = [last + score.reward for last in turns[-1:]]
        return Sample(
            tokens=Array.of(columns["tokens"].astype(np.int32)),
            sampled=Array.of(columns["sampled"].astype(np.uint8, copy=False)),
            behaviour_logprobs=Array.of(np.where(columns["sampled"], columns["logprobs"], np.float32(0))),
            versions=Array.of(columns["versions"]),
            reward=fsum(turns) if turns else score.reward,
            finish=self.finish,
            answer=answer,
            metrics={name: float(value) for name, value in self.metrics.items()} | score.metrics,
            images=[SampleImage(start=each.start, digest=each.picture.digest, data=each.data) for each in images],
            starts=self.starts,
            turn_rewards=turns,
            routes=None if self.routes is None else Array.of(self.routes),
            teacher=self.taught.sent if self.taught else "",
            teacher_logprobs=Array.of(self.taught.logprobs) if self.taught else None,
        )


def whole_numbers(make: Callable[[list[int]], Any], given: Any) -> np.ndarray:
    """numpy alone takes twice as long."""
    try:
        return np.array(make(given) if isinstance(given, list) else given)
    except (TypeError, ValueError, OverflowError):
        return np.array(given)


COLUMNS: dict[str, Callable[[Any], np.ndarray]] = {
    "tokens": partial(whole_numbers, partial(array, "q")),
    "sampled": partial(whole_numbers, bytearray),
    "logprobs": partial(np.array, dtype=np.float32),
    "versions": partial(np.array, dtype=np.int32),
}


@dataclass(frozen=True)
class Recorded:
    """What was recorded of an episode, and its score."""

    trajectory: Trajectory
    score: Score | None
    """None: the reward function scores it."""

    @classmethod
    def of(cls, trajectory: Trajectory, result: Any) -> "Recorded":
        """`result`: None, a number, or a dict with `score` or `overall` and metrics. Raises EpisodeError."""
        parts = dict(result) if isinstance(result, dict) else {"score": result}
        key, turns = "overall" if "overall" in parts else "score", parts.pop("turn_rewards", None)
        given, reward = parts.pop(key, None), None
        if given is not None and (reward := finite(given)) is None:
            needed = "a finite number, or a dict with one as score or overall"
            raise EpisodeError(f"the task scored an episode {repr(given)[:200]}; {needed} is needed")
        if turns is not None:
            turns_made = num_turns(np.array(trajectory.sampled))
            numbers = [finite(number) for number in turns] if isinstance(turns, list | tuple) else [None]
            if None in numbers or len(numbers) != turns_made:
                needed = f"a list of {turns_made} finite numbers, one for each turn, is needed"
                raise EpisodeError(f"the task gave turn_rewards {repr(turns)[:200]}; {needed}")
            trajectory.turn_rewards = numbers  # type: ignore[assignment]
        if trajectory.turn_rewards:
            reward = reward or 0.0  # their sum is added where the sample is made
        found = {str(name): number for name, value in parts.items() if (number := finite(value)) is not None}
        trajectory.metrics |= found
        return cls(trajectory, None if reward is None else Score(reward))


def png(image: "Image") -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


class Generate(Protocol):
    """What a task samples with, under the run's temperature."""

    def __call__(
        self,
        tokens: list[int],
        max_tokens: int | None = None,
        stop: list[str] | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> Awaitable[Completion]:
        """Continue `tokens` by at most `max_tokens` within the sample's budget, up to a text of `stop`, each one token,
        or the model's own end. `images` are those after the prompt. Raises EpisodeError."""


Task = Callable[[Problem, Generate], Awaitable[Trajectory | Recorded]]
"""A Recorded sample has its own prompts; a Trajectory begins with the problem's."""


async def single_turn(problem: Problem, generate: Generate) -> Trajectory:
    trajectory = Trajectory(problem.prompt)
    trajectory.take(await generate(trajectory.tokens))
    return trajectory


TASKS: dict[str, Task] = {"single_turn": single_turn}
