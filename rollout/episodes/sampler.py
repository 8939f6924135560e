"""What stands between a task and the engine: `generate`, and the check of what the task returns. Wrong requests and
results become an EpisodeError and never reach engine or learner."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from buffer.data.images import ImageFormat
from buffer.wire.sample import num_turns, wrong_segments
from rollout.episodes.placeholders import SampledSoFar, misplaced
from rollout.episodes.prompts import Prompts
from rollout.episodes.recorded_routes import RecordedRoutes
from rollout.errors import EpisodeError
from rollout.rewards.convention import finite, misnamed
from rollout.tasks.trajectory import COLUMNS, Completion, Generate, PlacedImage, Problem, Recorded, Trajectory, place

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

LONGER = (
    "raise rollout.max_sample_tokens (and rollout.engine.max_model_len), or end the sample while problem.left allows"
)

MOST_REWARD = 1e12
"""Keeps sums finite."""


@dataclass(frozen=True)
class Sampler:
    """The engine under the run's sampling settings and bounds."""

    engine: "Engine"
    prompts: Prompts
    temperature: float
    max_tokens: int
    longest: int
    """Most tokens of a whole sample."""
    form: ImageFormat | None = None
    max_images: int = 0

    def problem(self, row: dict[str, Any]) -> Problem:
        """Raises PromptError. Decoding images takes long."""
        row, pictures = self.prompts.with_pictures(row) if row.get("images") else (row, [])
        prompt = self.prompts.tokens(row, pictures)
        left = self.longest - len(prompt)
        return Problem(row, prompt, self.prompts.tokenizer, left, place(prompt, pictures), self.form, self.max_tokens)

    def generate_for(self, problem: Problem, salt: str | None = None, routes: RecordedRoutes | None = None) -> Generate:
        """`generate` of one sample. All turns use what is cached under `salt`; no task gets the `routes`."""
        so_far = SampledSoFar()

        async def generate(
            tokens: list[int],
            max_tokens: int | None = None,
            stop: list[str] | None = None,
            images: Sequence[PlacedImage] = (),
        ) -> Completion:
            shown = [*problem.images, *images]
            completion = await self.generate(tokens, max_tokens, stop, shown, so_far, salt, routes)
            if self.form:
                so_far.add(tokens, completion.tokens)
            return completion

        return generate

    async def generate(
        self,
        tokens: list[int],
        max_tokens: int | None = None,
        stop: list[str] | None = None,
        images: Sequence[PlacedImage] = (),
        so_far: SampledSoFar | None = None,
        salt: str | None = None,
        routes: RecordedRoutes | None = None,
    ) -> Completion:
        """`images` are those of all `tokens`. Raises EpisodeError, EngineError, EngineDead."""
        wanted = self.max_tokens if max_tokens is None else max_tokens
        if problem := first_of(self._unusable(tokens, wanted, stop, images, so_far or SampledSoFar())):
            raise EpisodeError(f"generate: {problem}")
        try:
            stops = self.prompts.stops if stop is None else self.prompts.stop_tokens(stop, "stop")
        except ValueError as error:
            raise EpisodeError(f"generate: {error}") from None
        room = self.longest - len(tokens)
        # Hashing the prompt for routes delays this process.
        at = routes.continued(tokens) if routes and self.engine.routes else None
        routed = at.routed if at else 0
        plain = np.array(tokens).tolist()  # True is an int too, and would end vLLM's process
        completion = await self.engine.generate(
            plain, int(min(wanted, room)), self.temperature, stops, images, salt, routed
        )
        if routes and at:
            routes.add(at, completion)
        return completion if completion.routes is None else replace(completion, routes=None)

    def check(self, problem: Problem, made: object) -> Recorded:
        """Return what a task returned. Raises EpisodeError unless the learner can train on it."""
        if not isinstance(made, Trajectory | Recorded):
            raise EpisodeError(f"the task returned {type(made).__name__}; a Trajectory is needed")
        trajectory = made if isinstance(made, Trajectory) else made.trajectory
        if wrong := first_of(self._wrong(problem, trajectory, free=isinstance(made, Recorded))):
            raise EpisodeError(f"the task returned a trajectory that cannot be trained on: {wrong}")
        return Recorded.of(made, made.score) if isinstance(made, Trajectory) else made

    def _unusable(
        self, tokens: list[int], max_tokens: int, stop: object, images: Sequence[PlacedImage], so_far: SampledSoFar
    ) -> Iterator[str]:
        if not isinstance(max_tokens, int) or max_tokens < 1:
            yield f"max_tokens is {max_tokens!r}; ask for a whole number of tokens, 1 or more"
        if stop is not None and not (isinstance(stop, list) and all(isinstance(text, str) for text in stop)):
            yield f"stop is {stop!r}; a list of strings is needed"
        yield from self._no_tokens("tokens", np.array(tokens))
        if len(tokens) >= self.longest:
            yield f"{len(tokens)} tokens leave no room in a sample of at most {self.longest}; {LONGER}"
        yield from misplaced(tokens, so_far.among(tokens), images, self.form, self.max_images)

    def _wrong(self, problem: Problem, trajectory: Trajectory, free: bool) -> Iterator[str]:
        """Each check may rely on those before it. `free`: it has its own prompts."""
        lengths = {name: len(getattr(trajectory, name)) for name in COLUMNS}
        if len(set(lengths.values())) > 1:
            yield f"its columns differ in length ({', '.join(f'{name} {n}' for name, n in lengths.items())})"
        trajectory.columns = columns = trajectory.arrays()
        yield from self._no_tokens("its tokens", columns["tokens"])
        prompt = trajectory.tokens[: trajectory.start]
        if not free and (trajectory.start != len(problem.prompt) or prompt != problem.prompt):
            yield "it does not begin with problem.prompt; only what follows the prompt is the task's"
        sampled = (flags := columns["sampled"]) == 1
        own = np.count_nonzero(sampled)
        if own + np.count_nonzero(flags == 0) != flags.size or np.count_nonzero(sampled[: trajectory.start]):
            yield "`sampled` is not 0 for the prompt and 0 or 1 for each token after it"
        if not own:
            yield "no token of it was sampled; take() at least one completion"
        yield from self._misbegun(trajectory, sampled)
        if np.count_nonzero(np.isfinite(columns["logprobs"])) < flags.size:
            yield "a log-probability is not finite"
        if np.count_nonzero((columns["versions"] >= 0) != sampled):
            yield "`versions` is not -1 for what was given, and the policy version for what was sampled"
        images = [*problem.images, *trajectory.images]
        yield from misplaced(trajectory.tokens, sampled, images, self.form, self.max_images)
        if trajectory.finish not in ("stop", "length"):
            yield f"its finish is {trajectory.finish!r}, neither stop nor length"
        yield from _wrong_turns(trajectory.turn_rewards, sampled)
        for name, value in trajectory.metrics.items():
            if not isinstance(name, str) or finite(value) is None:
                yield f"its metric {name!r} is {value!r}; a finite number is needed"
        if wrong := misnamed(trajectory.metrics):
            yield f"it has {wrong}"

    def _misbegun(self, trajectory: Trajectory, sampled: np.ndarray) -> Iterator[str]:
        starts, number = trajectory.starts, len(trajectory.tokens)
        ordered = all(type(start) is int for start in starts) and starts == sorted(set(starts))  # False is equal to 0
        ordered = ordered and starts[:1] == [0] and starts[-1] < number
        if not ordered or any(trajectory.sampled[start] for start in starts):
            yield f"starts are {starts!r:.100}: segments begin at 0, in order, each with a token that was given"
        elif len(starts) > 1 and (wrong := wrong_segments(starts, sampled)):
            yield f"its {wrong}"
        longest = max(end - start for start, end in pairwise([*starts, number]))
        if longest > self.longest:
            what = "it" if len(starts) == 1 else "a segment of it"
            yield f"{what} has {longest} tokens, and a sample at most {self.longest}; {LONGER}"

    def _no_tokens(self, name: str, ids: np.ndarray) -> Iterator[str]:
        """An id without an embedding would end the engine or the learner."""
        vocabulary = self.engine.vocabulary
        if ids.ndim != 1 or ids.dtype.kind not in "iu":
            yield f"{name} must be a list of token ids, one at least; is of {ids.dtype}{ids.shape}"
        elif np.count_nonzero(wrong := (ids < 0) | (ids >= vocabulary)):
            yield f"{name} hold {ids[wrong][0]}, which is no token of the model; its ids are 0 to {vocabulary - 1}"


def _wrong_turns(rewards: list[float], sampled: np.ndarray) -> Iterator[str]:
    if rewards and len(rewards) != (turns := num_turns(sampled)):
        yield f"its turn_rewards are {len(rewards)} for {turns} turns; one for each run of sampled tokens, or none"
    for turn, value in enumerate(rewards):
        if (number := finite(value)) is None or abs(number) > MOST_REWARD:
            yield f"its reward of turn {turn} is {value!r}; a number of at most {MOST_REWARD:g} is needed"


def first_of(problems: Iterator[str]) -> str | None:
    """A task's odd objects may raise."""
    try:
        return next(problems, None)
    except (TypeError, ValueError, OverflowError, AttributeError, IndexError) as error:
        return f"{type(error).__name__}: {error}"
