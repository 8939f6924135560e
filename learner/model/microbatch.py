"""A microbatch: documents (prompt and answer) one after another in a single row, without padding.

Consumes token arrays of whole documents; waits for nothing. `learner/train/batch.py` decides which documents go
together, `policy.py` runs the model over the row, `learner/train/step.py` computes the loss of its trainable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Microbatch:
    """One packed row. Per-token tensors are [tokens]; entry i is about token i.

    Example: documents of 2 and 3 tokens have `cu_seqlens` [0, 2, 5], `max_seqlen` 3, `positions` [0, 1, 0, 1, 2].
    """

    tokens: Tensor
    """int64 token ids."""
    positions: Tensor
    """int64, from 0 in each document."""
    cu_seqlens: Tensor
    """int32 [documents + 1]: where each document starts, and the end."""
    max_seqlen: int
    """Tokens of the longest document."""
    sampled: Tensor
    """bool: trainable. Never true for a document's first token: nothing predicts it."""
    scored: Tensor
    """int64 [trainable tokens]: indices at which `sampled` is true."""
    behaviour: Tensor
    """float32 log-probability with which the token was sampled."""
    versions: Tensor
    """int64 policy version that sampled the token, -1 for prompt tokens."""
    sequence: Tensor
    """int64 index of the token's sample in `Batch.rows`; 0 in a dummy."""

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch on `device`."""
        moved = {name: x.to(device, non_blocking=True) for name, x in vars(self).items() if isinstance(x, Tensor)}
        return Microbatch(max_seqlen=self.max_seqlen, **moved)


def lay_out(
    tokens: Sequence[Any],
    sampled: Sequence[Any],
    behaviour: Sequence[Any],
    versions: Sequence[Any],
    rows: Sequence[int],
) -> Microbatch:
    """The microbatch of some documents: of each document an array for each field, and its index in `Batch.rows`."""

    def joined(arrays: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype))

    lengths = [len(ids) for ids in tokens]
    cu_seqlens = np.cumsum([0, *lengths])
    trainable = joined(sampled, bool)
    trainable[cu_seqlens[:-1]] = False
    return Microbatch(
        tokens=joined(tokens, np.int64),
        positions=joined([np.arange(n) for n in lengths], np.int64),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=max(lengths),
        sampled=trainable,
        scored=trainable.nonzero().squeeze(1),
        behaviour=joined(behaviour, np.float32),
        versions=joined(versions, np.int64),
        sequence=torch.from_numpy(np.repeat(rows, lengths).astype(np.int64)),
    )


def one_document(tokens: Sequence[int]) -> Microbatch:
    """A single document of which every token but the first is trainable."""
    size = len(tokens)
    return lay_out([tokens], [np.ones(size)], [np.zeros(size)], [np.full(size, -1)], [0])
