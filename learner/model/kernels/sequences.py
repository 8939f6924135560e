"""The sequences of one call of an attention kernel."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor


class Sequences(NamedTuple):
    """Queries of sequence i see its keys: all, or if `causal` those up to their own place. Last query and last key have
    the same place.

    Example: answers of 3 and 5 tokens, each with its own copy of a prompt of 9, have `q_starts` [0, 3, 8] and
    `k_starts` [0, 12, 26], int32.
    """

    q_starts: Tensor
    k_starts: Tensor
    q_longest: int
    k_longest: int
    causal: bool
    scale: float
    window: int | None
    """The most keys that a query sees, its own place included."""
    softcap: float | None = None
    """Scores become `softcap * tanh(score / softcap)`."""

    @property
    def places(self) -> tuple[Tensor, Tensor, int, int]:
        return self.q_starts, self.k_starts, self.q_longest, self.k_longest

    def bounds(self, none: Any) -> tuple[Any, Any]:
        """The window as (left, right), where `causal` does not imply it."""
        return (none, none) if self.window is None else (self.window - 1, 0 if self.causal else self.q_longest)

    def spans(self) -> Iterator[tuple[slice, slice]]:
        """A GPU would wait: this reads the starts."""
        q, k = self.q_starts.tolist(), self.k_starts.tolist()
        return zip(map(slice, q, q[1:]), map(slice, k, k[1:]), strict=False)


Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]
