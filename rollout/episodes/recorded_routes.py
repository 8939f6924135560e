"""Routes of one sample, found by tokens and log-probabilities alone, whatever the task makes of completions.

A prompt may begin with an earlier answer: then the engine is asked only for later rows. A token's row is of the
computation that sampled the next token, however often it is read again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rollout.errors import EpisodeError
from rollout.tasks.trajectory import Completion, Trajectory


class Continued(NamedTuple):
    """A prompt, int32; its first `end` tokens, an earlier answer, hash to `before`."""

    prompt: np.ndarray
    end: int
    before: bytes

    @property
    def routed(self) -> int:
        """Number of known rows. No computation has read an answer's last token."""
        return max(self.end - 1, 0)


@dataclass(frozen=True, eq=False)
class RoutedAnswer:
    """What one call added after `start` tokens: int32 tokens, log-probabilities (NaN: given), and rows, from the token
    before them on."""

    start: int
    before: bytes
    tokens: np.ndarray
    logprobs: np.ndarray
    rows: np.ndarray


class RecordedRoutes:
    """Routes of one sample. `wanted`: without them it is useless."""

    def __init__(self, wanted: bool = False) -> None:
        self.wanted = wanted
        self._answers: list[RoutedAnswer] = []
        self._ends: dict[bytes, int] = {}

    def continued(self, prompt: Sequence[int]) -> Continued:
        tokens = np.array(prompt, np.int32)
        for end in sorted({end for end in self._ends.values() if end <= tokens.size}, reverse=True):
            if (key := digest(tokens[:end])) in self._ends:
                return Continued(tokens, end, key)
        return Continued(tokens, 0, digest(tokens[:0]))

    def add(self, at: Continued, made: Completion) -> None:
        assert made.routes is not None
        tokens = np.concatenate([at.prompt, np.array(made.tokens, np.int32)])
        logprobs = np.concatenate([np.full(at.prompt.size - at.end, np.nan), made.logprobs], dtype=np.float32)
        self._answers.append(RoutedAnswer(at.end, at.before, tokens[at.end :], logprobs, made.routes))
        self._ends[digest(tokens)] = tokens.size

    def of(self, trajectory: Trajectory) -> np.ndarray | None:
        """Return [tokens, layers, k]; zeros where no answer reads a token. Raises EpisodeError for sampled tokens of no
        answer, or missing `wanted` routes."""
        if not self._answers:
            if self.wanted:
                raise EpisodeError("the task never called generate; with rollout.routing_replay its answers are needed")
            return None
        tokens, logprobs = np.array(trajectory.tokens, np.int32), np.array(trajectory.logprobs, np.float32)
        lacking, like = np.array(trajectory.sampled, bool), self._answers[0].rows
        routes = np.zeros((tokens.size, *like.shape[1:]), like.dtype)
        for start, stop in pairwise([*trajectory.starts, tokens.size]):
            segment = slice(start, stop)
            self._fill(routes[segment], tokens[segment], logprobs[segment], lacking[segment])
        if lacking.any():
            problem = f"token {lacking.argmax()} of the trajectory is sampled, and no answer of generate has it there"
            raise EpisodeError(f"{problem}; with rollout.routing_replay a trajectory takes answers as they are")
        return routes

    def _fill(self, routes: np.ndarray, tokens: np.ndarray, logprobs: np.ndarray, lacking: np.ndarray) -> None:
        own = []
        for answer in reversed(self._answers):  # the first to read a token counts
            if answer.start > tokens.size or digest(tokens[: answer.start]) != answer.before:
                continue
            size = min(answer.tokens.size, tokens.size - answer.start)
            there = slice(answer.start, answer.start + size)
            different = np.flatnonzero(tokens[there] != answer.tokens[:size])
            end, first = answer.start + int(different[0] if different.size else size), max(answer.start - 1, 0)
            rows = answer.rows[: end - first]
            routes[first : first + len(rows)] = rows
            places = np.arange(answer.start, end)
            own.append((places[logprobs[places] == answer.logprobs[: places.size]], answer, first))
        for places, answer, first in own:
            sampled = places[lacking[places]]
            routes[sampled - 1] = answer.rows[sampled - 1 - first]
            lacking[sampled] = False


def digest(tokens: np.ndarray) -> bytes:
    """`tokens`: int32."""
    return blake2b(tokens.tobytes(), digest_size=16).digest()
