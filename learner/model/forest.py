"""A row of texts that share prefixes, each computed once (docs/design/learner.md).

Each text lays only the tokens that the text before it lacks, and sees copies of the keys of its first tokens
(`CopiedPrompts`). Several texts may train one token: per-token tensors have further entries behind the row's, and the
head computes each token once (`Targets`).
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.model.microbatch import CopiedPrompts, Microbatch, Targets


class Text(NamedTuple):
    """A text of the row: arrays [tokens]."""

    tokens: np.ndarray
    sampled: np.ndarray
    behaviour: np.ndarray
    versions: np.ndarray
    turns: np.ndarray
    teacher: np.ndarray | None
    row: int
    """Index in `Batch.rows`."""
    joined: int
    """First tokens that the previous text has too."""

    @property
    def length(self) -> int:
        return len(self.tokens)


def lay_out_forest(texts: Sequence[Text]) -> Microbatch:
    places = places_of(texts)
    pieces = [(text, at) for text, at in zip(texts, places, strict=True) if text.length > text.joined]
    lengths = [text.length - text.joined for text, _ in pieces]
    bounds = np.cumsum([0, *lengths])
    entries = _entries(texts, bounds[-1])
    columns = _columns(texts, entries)
    scored, targets = _targets(texts, places, entries)
    return Microbatch(
        tokens=_tensor([text.tokens[text.joined :] for text, _ in pieces], np.int64),
        positions=_tensor([np.arange(text.joined, text.length) for text, _ in pieces], np.int64),
        cu_seqlens=torch.from_numpy(bounds.astype(np.int32)),
        max_seqlen=max(lengths),
        scored=scored,
        predictor=targets.predictor[targets.of_scored],
        groups=(),
        shared=_copied([at for _, at in pieces]),
        targets=targets,
        **columns,
    )


def places_of(texts: Sequence[Text]) -> list[np.ndarray]:
    """Each text's tokens in the row: [tokens] int64."""
    places: list[np.ndarray] = []
    end = 0
    for text in texts:
        own = text.length - text.joined
        before = places[-1][: text.joined] if text.joined else np.zeros(0, np.int64)
        places.append(np.concatenate([before, np.arange(end, end + own)]))
        end += own
    return places


class Entries(NamedTuple):
    """Entries of per-token tensors: the row's, then further ones."""

    of_text: list[np.ndarray]
    """Tokens of each text that have an entry."""
    numbers: list[np.ndarray]


def _entries(texts: Sequence[Text], size: int) -> Entries:
    of_text, numbers, start, further = [], [], 0, size
    for text in texts:
        own = np.arange(text.joined, text.length)
        again = np.flatnonzero(text.sampled[: text.joined])
        of_text.append(np.concatenate([again, own]))
        numbers.append(np.concatenate([np.arange(further, further + len(again)), np.arange(start, start + len(own))]))
        start, further = start + len(own), further + len(again)
    return Entries(of_text, numbers)


def _columns(texts: Sequence[Text], entries: Entries) -> dict[str, Any]:
    order = np.concatenate(entries.numbers).argsort()

    def column(name: str, dtype: Any) -> Tensor:
        whole = [getattr(text, name) for text in texts]
        filled = [np.zeros(text.length) if each is None else each for text, each in zip(texts, whole, strict=True)]
        chosen = [each[at] for each, at in zip(filled, entries.of_text, strict=True)]
        return torch.from_numpy(np.concatenate(chosen)[order].astype(dtype))

    rows = np.repeat([text.row for text in texts], [len(at) for at in entries.of_text])
    return {
        "sampled": column("sampled", bool),
        "behaviour": column("behaviour", np.float32),
        "versions": column("versions", np.int64),
        "turn": column("turns", np.int64),
        "sequence": torch.from_numpy(rows[order].astype(np.int64)),
        "teacher": None if all(text.teacher is None for text in texts) else column("teacher", np.float32),
    }


def _targets(texts: Sequence[Text], places: Sequence[np.ndarray], entries: Entries) -> tuple[Tensor, Targets]:
    scored, predictor, tokens = [], [], []
    for text, at, own, index in zip(texts, places, *entries, strict=True):
        trained = text.sampled[own] != 0
        scored.append(index[trained])
        predictor.append(at[own[trained] - 1])  # no text begins with a sampled token
        tokens.append(text.tokens[own[trained]])
    every = np.stack([np.concatenate(predictor), np.concatenate(tokens)]).astype(np.int64)
    distinct, of_scored, numbers = np.unique(every, axis=1, return_inverse=True, return_counts=True)
    of_scored = of_scored.reshape(-1)
    members = of_scored.argsort(kind="stable")
    of_row, ids, target_of, by_target = (_tensor([each], np.int64) for each in (*distinct, of_scored, members))
    starts = tuple(np.cumsum([0, *numbers]).tolist())
    return _tensor(scored, np.int64), Targets(of_row, ids, target_of, by_target, starts)


def _copied(places: Sequence[np.ndarray]) -> CopiedPrompts:
    lengths = [len(at) for at in places]
    starts = torch.from_numpy(np.cumsum([0, *lengths]).astype(np.int32))
    return CopiedPrompts(_tensor(places, np.int64), starts, max(lengths))


def _tensor(arrays: Sequence[np.ndarray], dtype: Any) -> Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
