"""The certificate's rows of tokens."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

import numpy as np

from buffer.data.images import SeenImage
from learner.model.exactness import packed_row
from learner.model.microbatch import Microbatch
from learner.model.shrink import VOCABULARY, WINDOW

SHORT = (5, 7, 3, 6)
LONG = (2 * WINDOW + 5, 9, 4 * WINDOW + 1, 12)
SHARED = ((9, (4, 1, 6), (11,)), (2 * WINDOW + 5, (WINDOW + 6, 3 * WINDOW + 2, 3), ()))


class Case(NamedTuple):
    """A packed row, and its documents as a model sees each alone."""

    what: str
    row: Microbatch
    texts: list[np.ndarray]
    given: list[int]
    """First tokens of each document that are not scored."""
    shares: bool = False
    seen: Sequence[Sequence[SeenImage]] = ()


def cases(vocabulary: int) -> Iterator[Case]:
    draw = np.random.default_rng(0)

    def made(lengths: tuple[int, ...]) -> list[np.ndarray]:
        return [draw.integers(2, min(vocabulary, VOCABULARY), length) for length in lengths]

    for what, lengths in (
        ("one document = eager", LONG[:1]),
        ("packed documents = alone", SHORT),
        ("packed, longer than windows = alone", LONG),
    ):
        texts = made(lengths)
        yield Case(what, packed_row(texts), texts, [1] * len(texts))
    for length, answers, others in SHARED:
        (prompt,), pieces, rest = made((length,)), made(answers), made(others)
        row = packed_row([prompt, *pieces, *rest], [len(pieces)])
        texts = [*(np.concatenate([prompt, piece]) for piece in pieces), *rest]
        given, long = [length] * len(pieces) + [1] * len(rest), ", longer than windows" * (length > WINDOW + 1)
        yield Case(f"shared prompt{long} = unshared", row, texts, given, True)
        yield Case(f"copied prompt{long} = unshared", row.copying(inf), texts, given, True)
