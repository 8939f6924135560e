"""The order of the problems of an epoch, of one source or of several by weight."""

import heapq
import random
from array import array
from collections.abc import Generator, Sequence
from itertools import accumulate
from math import floor

STEP = 4096
"""About a millisecond's work."""
Steps = Generator[None, None, "array[int]"]


class Drawing:
    """An epoch's order, drawn in steps: a million rows take 0.3 s."""

    def __init__(self, steps: Steps) -> None:
        self._steps = steps
        self.drawn: array[int] | None = None

    def step(self) -> None:
        if self.drawn is None:
            try:
                next(self._steps)
            except StopIteration as end:
                self.drawn = end.value

    def rows(self) -> "array[int]":
        while self.drawn is None:
            self.step()
        return self.drawn


def order(problems: int, seed: int | str, epoch: int, shuffle: bool) -> "array[int]":
    """A permutation drawn from (seed, epoch)."""
    return Drawing(ordering(problems, seed, epoch, shuffle)).rows()


def ordering(problems: int, seed: int | str, epoch: int, shuffle: bool) -> Steps:
    """`order` in steps. Python promises to keep the sequence of `Random.random()` alone."""
    rows = array("q", range(problems))
    if shuffle:
        draw = random.Random(f"{seed}/{epoch}").random
        for last in range(problems - 1, 0, -1):
            other = int(draw() * (last + 1))
            rows[last], rows[other] = rows[other], rows[last]
            if last % STEP == 0:
                yield
    return rows


def mixed(parts: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool) -> "array[int]":
    return Drawing(mixing(parts, seed, epoch, shuffle)).rows()


def mixing(parts: Sequence[tuple[int, float]], seed: int, epoch: int, shuffle: bool) -> Steps:
    """`mixed` in steps; `parts` has (rows, weight) of each source.

    Problem j of a source, counted over all epochs, comes at time (j + 1/2) / weight (Webster's method): in any stretch
    each source has its share, within a problem or two.
    """
    weights = [weight for _, weight in parts]
    starts = list(accumulate((rows for rows, _ in parts), initial=0))
    drawn = drawn_before(epoch * starts[-1], weights)
    passes: list[tuple[int, Sequence[int]]] = [(-1, ())] * len(parts)
    heap = [((number + 0.5) / weight, part) for part, (number, weight) in enumerate(zip(drawn, weights, strict=True))]
    heapq.heapify(heap)
    rows = array("q")
    for _ in range(starts[-1]):
        _, part = heap[0]
        number, place = divmod(drawn[part], parts[part][0])
        if passes[part][0] != number:
            passes[part] = number, (yield from ordering(parts[part][0], f"{seed}/{part}", number, shuffle))
        rows.append(starts[part] + passes[part][1][place])
        drawn[part] += 1
        heapq.heapreplace(heap, ((drawn[part] + 0.5) / weights[part], part))
        if len(rows) % STEP == 0:
            yield
    return rows


def drawn_before(problems: int, weights: Sequence[float]) -> list[int]:
    sure = max(0.0, problems - len(weights) / 2 - 1) / sum(weights)  # no more than `problems` have come by then
    drawn = [max(0, floor(weight * sure - 0.5)) for weight in weights]
    heap = [((number + 0.5) / weight, part) for part, (number, weight) in enumerate(zip(drawn, weights, strict=True))]
    heapq.heapify(heap)
    for _ in range(problems - sum(drawn)):
        _, part = heap[0]
        drawn[part] += 1
        heapq.heapreplace(heap, ((drawn[part] + 0.5) / weights[part], part))
    return drawn
