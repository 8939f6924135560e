"""Routes of one sample: what each answer of the engine brought, and of a finished trajectory the routes of each token.

Kept in the server, whatever the task makes of its completions and wherever it runs, and told by tokens and
log-probabilities alone. The answers are a forest: one whose prompt begins with all tokens of an earlier answer, prompt
included, continues it, and the engine is asked for the rows behind those that are known. So a token's row is of the
computation that the next token was sampled from, however often later answers read it again. Used by `sampler.py`; pure
functions of tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from rollout.errors import EpisodeError
from rollout.tasks.trajectory import Completion, Trajectory


@dataclass(eq=False)
class Node:
    """An answer: the tokens that it added to those before it, int32, with log-probabilities (NaN: given to it). `rows`
    go from that of the token before these, where there is one, to that of the last but one."""

    added: np.ndarray
    logprobs: np.ndarray
    rows: np.ndarray
    end: int
    """Tokens from the root to the end of this answer."""
    below: "list[Node]" = field(default_factory=list)


class Continued(NamedTuple):
    """Where a prompt goes on: behind `node`, None for a root, with the tokens that it adds."""

    node: Node | None
    given: Sequence[int]

    @property
    def routed(self) -> int:
        """First tokens of the prompt whose rows are known."""
        return self.node.end - 1 if self.node else 0


class Stretch(NamedTuple):
    """A segment of a trajectory: int32, float and bool [tokens]."""

    tokens: np.ndarray
    logprobs: np.ndarray
    sampled: np.ndarray

    def agreed(self, node: Node, at: int) -> int:
        """How many of the tokens that the node added are those from `at` on, and were not sampled by another call."""
        size = min(node.added.size, self.tokens.size - at)
        here, there = slice(at, at + size), slice(0, size)
        own = self.sampled[here] & ~np.isnan(node.logprobs[there])
        other = own & (self.logprobs[here] != node.logprobs[there])
        different = np.flatnonzero((self.tokens[here] != node.added[there]) | other)
        return int(different[0]) if different.size else size


class RecordedRoutes:
    """Those of one sample."""

    def __init__(self) -> None:
        self._roots: list[Node] = []

    def continued(self, prompt: Sequence[int]) -> Continued:
        """The answer that `prompt` continues."""
        if not self._roots:
            return Continued(None, prompt)
        tokens, node, below, at = np.array(prompt, np.int32), None, self._roots, 0
        while found := next((each for each in below if np.array_equal(each.added, tokens[at : each.end])), None):
            node, below, at = found, found.below, found.end
        return Continued(node, prompt[at:])

    def add(self, at: Continued, made: Completion) -> None:
        """The engine continued the prompt `at`, with routes."""
        assert made.routes is not None
        added = np.array([*at.given, *made.tokens], np.int32)
        logprobs = np.array([np.nan] * len(at.given) + made.logprobs)
        before, below = (at.node.end, at.node.below) if at.node else (0, self._roots)
        below.append(Node(added, logprobs, made.routes, before + added.size))

    def of(self, trajectory: Trajectory) -> np.ndarray | None:
        """[tokens, layers, k]; zeros where no answer reads a token. None if there were no routes at all. Raises
        EpisodeError for sampled tokens that no answers have there."""
        if not self._roots:
            return None
        tokens, logprobs = np.array(trajectory.tokens, np.int32), np.array(trajectory.logprobs)
        sampled, like = np.array(trajectory.sampled, bool), self._roots[0].rows
        routes = np.zeros((tokens.size, *like.shape[1:]), like.dtype)
        for number, (start, stop) in enumerate(pairwise([*trajectory.starts, tokens.size])):
            segment = Stretch(tokens[start:stop], logprobs[start:stop], sampled[start:stop])
            found, at = path(self._roots, segment, 0, int(np.flatnonzero(segment.sampled)[-1]) + 1), 0
            if found is None:
                rule = "with rollout.routing_replay a trajectory keeps them as they are"
                raise EpisodeError(f"segment {number} of the trajectory is not what answers of generate made; {rule}")
            for node, same in found:
                first, at = max(at - 1, 0), at + same
                routes[start + first : start + at - 1] = node.rows[: at - 1 - first]
        return routes


def path(below: Sequence[Node], segment: Stretch, at: int, end: int) -> list[tuple[Node, int]] | None:
    """The answers that made tokens `at` to `end` of a segment, whole ones if possible, each with how many of its tokens
    it has there. None if there are none."""
    fits = [(segment.agreed(node, at), node) for node in below]
    for same, node in sorted(fits, key=lambda fit: (fit[0] == fit[1].added.size, fit[0]), reverse=True):
        if at + same >= end:
            return [(node, same)]
        if same == node.added.size and (further := path(node.below, segment, node.end, end)):
            return [(node, same), *further]
    return None
