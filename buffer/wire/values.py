"""What the values of a sample may be: one judge for buffer and learner."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from buffer.ledger.types import FailureKind
from buffer.wire.message import Array
from configs.model_facts import facts_of
from configs.schema import ModelConfig

ROUNDING = 1e-3
"""How far a log-probability may be above 0: float32 logits of 1,000 are rounded by 1e-4."""
LEAST_LOGPROB = -1000.0
"""With float32 noise the smallest log-probability that can be drawn is about -100."""
SIGNED, UNSIGNED = np.dtype("<i4"), np.dtype("<u4")
LEAST_BITS = int(np.float32(LEAST_LOGPROB).view(UNSIGNED))
MOST_MASS_OFF = 0.01
MOST_REWARD = 1e6
LARGEST = 2**31 - 1
KINDS: dict[str, FailureKind] = {
    **dict.fromkeys(("reward", "turn_rewards", "metrics"), "reward"),
    **dict.fromkeys(("images", "image", "starts", "segment"), "task"),
}
"""Whose fault a wrong field is; else vLLM's."""


class WrongValue(ValueError):
    """The text begins with the field that is wrong."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(f"{name}: {problem}" if name else problem)
        self.kind: FailureKind = KINDS.get((name or problem).replace(".", " ").split()[0], "engine")

    def within(self, place: str) -> "WrongValue":
        error = WrongValue(place, str(self))
        error.kind = self.kind
        return error


@dataclass(frozen=True)
class Bounds:
    vocabulary: int = LARGEST
    experts: int = 0
    routed: tuple[int, int] | None = None
    """Layers with experts, and the experts that a token takes in each."""
    placeholder: int | None = None
    replayed: bool = False
    teachers: frozenset[str] | None = None
    """By the `data_source` of their rows; "" is the teacher of all other rows: with it, every sample needs a
    teacher."""
    top_k: int | None = None

    @classmethod
    def of_model(
        cls,
        model: ModelConfig,
        replayed: bool = False,
        teachers: Iterable[str] | None = None,
        top_k: int | None = None,
    ) -> "Bounds":
        """Only the learner knows the bounds of a hub name."""
        facts, known = facts_of(model), None if teachers is None else frozenset(teachers)
        of_model = facts.vocabulary or LARGEST, facts.experts, facts.routed, facts.image_token
        return cls(*of_model, replayed, known, top_k)

    def has_teacher(self, name: str) -> bool:
        return self.teachers is None or name in self.teachers


ANY = Bounds()


@dataclass(frozen=True)
class Columns:
    """The arrays of a sample, [tokens] each."""

    tokens: np.ndarray
    sampled: np.ndarray
    """bool"""
    logprobs: np.ndarray
    versions: np.ndarray


def judge_teacher(logprobs: Array | None, name: str, sampled: np.ndarray, bounds: Bounds) -> None:
    """Raise WrongValue, also for a sample that lacks a teacher."""
    if logprobs is None:
        if "" in (bounds.teachers or ()):
            raise WrongValue("teacher_logprobs", "there are none; every row of this run has a teacher (teacher.model)")
        return
    if not bounds.has_teacher(name):
        known = ", ".join(map(repr, sorted(bounds.teachers or ()))) or "none"
        raise WrongValue("teacher", f"{name!r:.60}; the run has {known}")
    _judge_logprobs("teacher_logprobs", logprobs.numpy(), sampled)


def judge_top(top: tuple[np.ndarray, np.ndarray] | None, bounds: Bounds) -> None:
    """Raise WrongValue. `top`: ids and log-probabilities, [sampled tokens, k] each."""
    number = 0 if top is None else top[0].shape[1]
    if bounds.teachers is not None and number != (bounds.top_k or 0):
        raise WrongValue("teacher", f"{number} tokens in place of each sampled one; teacher.top_k is {bounds.top_k}")
    if top is None:
        return
    ids, logprobs = top
    flat, rule = ids.reshape(-1), f"a token is 0 to {bounds.vocabulary - 1}"
    _require((flat >= 0) & (flat < bounds.vocabulary), "teacher.ids", flat, rule)
    ordered = np.sort(ids, axis=1)
    repeated = (ordered[:, 1:] == ordered[:, :-1]).any(axis=1)
    _require(~repeated, "teacher.ids", ids[:, 0], "the tokens in one place are all different")
    rule = f"a log-probability is {LEAST_LOGPROB:g} to 0, rounded by {ROUNDING:g} at most"
    flat = logprobs.reshape(-1)
    with np.errstate(invalid="ignore"):
        _require((flat >= LEAST_LOGPROB) & (flat <= ROUNDING), "teacher.logprobs", flat, rule)
    total = np.exp(logprobs.astype(np.float64)).sum(axis=1)
    _require(total <= 1 + MOST_MASS_OFF, "teacher.logprobs", total, "the probabilities in one place sum to 1 at most")


def judge(columns: Columns, bounds: Bounds, images: Sequence[int], starts: Sequence[int], routes: Any) -> None:
    """Raise WrongValue. `images`, `starts`: where each image and segment begins; `routes`: [tokens, layers, k]."""
    _judge_tokens(columns, bounds)
    _judge_logprobs("behaviour_logprobs", columns.logprobs, columns.sampled)
    _judge_versions(columns)
    if bounds.placeholder is not None:
        given = np.flatnonzero((columns.tokens == bounds.placeholder) & ~columns.sampled)
        _judge_images(given, np.array(images, np.int64), np.array([*starts, columns.tokens.size], np.int64))
    if routes is not None:
        _judge_routes(routes, bounds)
    elif bounds.replayed:
        raise WrongValue("routes", "there are none; the server must run this model, with rollout.routing_replay: true")


def judge_rewards(rewards: Sequence[float]) -> None:
    for number, reward in enumerate(rewards):
        if abs(reward) > MOST_REWARD:
            name = f"turn_rewards.{number - 1}" if number else "reward"
            raise WrongValue(name, f"{reward:g}; a reward is {-MOST_REWARD:g} to {MOST_REWARD:g}: scale it down")


def _judge_tokens(columns: Columns, bounds: Bounds) -> None:
    tokens = columns.tokens
    _require((tokens >= 0) & (tokens < bounds.vocabulary), "tokens", tokens, f"a token is 0 to {bounds.vocabulary - 1}")


def _judge_logprobs(name: str, logprobs: np.ndarray, sampled: np.ndarray) -> None:
    rule = f"that of a sampled token is {LEAST_LOGPROB:g} to 0, rounded by {ROUNDING:g} at most"
    with np.errstate(invalid="ignore"):
        _require((logprobs >= LEAST_LOGPROB) & (logprobs <= ROUNDING), name, logprobs, rule)
    _require((logprobs == 0) | sampled, name, logprobs, "that of a token that was given is 0")


def _judge_versions(columns: Columns) -> None:
    versions, sampled = columns.versions, columns.sampled
    rule = "a sampled token has the policy version that sampled it, which is 0 or more"
    _require((versions >= 0) | ~sampled, "versions", versions, rule)
    _require((versions == -1) | sampled, "versions", versions, "a token that was given has version -1")


def _judge_images(given: np.ndarray, images: np.ndarray, ends: np.ndarray) -> None:
    owners = np.searchsorted(images, given, side="right") - 1
    if given.size and owners[0] < 0:
        raise WrongValue("images", f"the placeholder at token {given[0]} has no image")
    counts = np.bincount(owners, minlength=images.size)
    for number, start in enumerate(images.tolist()):
        own = given[owners == number]
        if not own.size or own[0] != start:
            raise WrongValue("images", f"image {number} begins at token {start}, which is no placeholder")
        if own[-1] != start + counts[number] - 1:
            gap = own[np.flatnonzero(np.diff(own) > 1)[0] + 1]
            raise WrongValue("images", f"the placeholder at token {gap} is apart from those of image {number}")
        if own[-1] >= (end := ends[np.searchsorted(ends, start, side="right")]):
            raise WrongValue("images", f"image {number} at token {start} goes on in the segment that begins at {end}")


def _judge_routes(routes: np.ndarray, bounds: Bounds) -> None:
    if bounds.routed and routes.shape[1:] != bounds.routed:
        have = f"{routes.shape[1]} layers with {routes.shape[2]} experts for each token"
        raise WrongValue("routes", f"{have}; the model has {bounds.routed[0]} and takes {bounds.routed[1]}")
    if bounds.experts and (largest := int(routes.max())) >= bounds.experts:
        place = int(np.unravel_index(routes.argmax(), routes.shape)[0])
        raise WrongValue("routes", f"{largest} at token {place}; an expert is 0 to {bounds.experts - 1}")


def _require(right: np.ndarray, name: str, values: np.ndarray, rule: str) -> None:
    if not right.all():
        place = int(right.argmin())
        raise WrongValue(name, f"{values[place].item()!r:.20} at token {place}; {rule}")
