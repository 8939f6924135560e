"""Groups texts into trees, so that a prefix that several texts share is computed once (docs/design/learner.md). Each
text's row lacks its `joined` first tokens, which the text before it has."""

from collections.abc import Sequence

import numpy as np

LEAST_JOINED = 0.03
"""Joining must save at least this share of a text's tokens."""
Joined = tuple[int, int]
"""Index of a text, and how many first tokens it shares with the one before."""


def common_prefix(one: np.ndarray, other: np.ndarray) -> int:
    """Length of the common prefix."""
    length = min(len(one), len(other))
    differs = one[:length] != other[:length]
    return int(differs.argmax()) if differs.any() else length


def grow(texts: Sequence[np.ndarray], budget: int, key_room: float = 0.0) -> list[list[Joined]]:
    """Put the texts into trees of at most `budget` tokens; a longer text gets its own. `key_room`: tokens of the budget
    per copied key.

    In reverse lexicographic order, no earlier text shares more with a text than the one before it.

    Example: `grow([array([1, 2, 3]), array([1, 2]), array([1, 2, 9])], 99) == [[(2, 0), (0, 2), (1, 2)]]`
    """
    order = sorted(range(len(texts)), key=lambda i: texts[i].astype(">i8").tobytes(), reverse=True)
    trees: list[list[Joined]] = []
    room = 0.0
    for place, index in enumerate(order):
        text = texts[index]
        joined = common_prefix(texts[order[place - 1]], text) if place else 0
        more = len(text) - joined + key_room * copies(len(text), joined)
        if joined and joined >= LEAST_JOINED * len(text) and room + more <= budget:
            trees[-1].append((index, joined))
            room += more
        else:
            trees.append([(index, 0)])
            room = len(text)
    return trees


def copies(length: int, joined: int) -> int:
    """Keys that are copied for a text."""
    return joined if length > joined else 0
