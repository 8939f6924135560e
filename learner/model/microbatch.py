"""Pieces of text packed without padding: [shared prompts | their answers, group by group | whole documents].

Answers see their prompt's keys (`SharedPrompts`) or, where cheaper, copies of them (`CopiedPrompts`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.model.host_copies import sent
from learner.model.towers import PackedImages


class SharedPrompts(NamedTuple):
    """The answers of group i see prompt i.

    Example: prompts of 4 and 9 tokens with answers of 2, 3 and of 1, 1: `answer_starts` [0, 5, 7], `prompt_starts` [0,
    4, 13], int32.
    """

    answer_starts: Tensor
    prompt_starts: Tensor
    longest_answers: int
    longest_prompt: int
    prompts_end: int
    answers_end: int


class CopiedPrompts(NamedTuple):
    """The keys that each piece sees: its own and, before an answer's, its prompt's.

    Example: a prompt of 2 with answers of 1 and 3: `keys` [0, 1, 0, 1, 2, 0, 1, 3, 4, 5] int64, `starts` [0, 2, 5, 10]
    int32.
    """

    keys: Tensor
    starts: Tensor
    longest: int


class Targets(NamedTuple):
    """Tokens that a row's head computes once, where texts share more than prompts.

    Example: samples of one prompt of 2 with answers [5, 6] and [5, 7], int64: `predictor` [1, 2, 2], `tokens` [5, 6,
    7], `of_scored` [0, 1, 0, 2], `members` [0, 2, 1, 3].
    """

    predictor: Tensor
    tokens: Tensor
    of_scored: Tensor
    """The target of each of `Microbatch.scored`."""
    members: Tensor
    """Indices into `Microbatch.scored`, by target."""
    starts: tuple[int, ...]

    def scored(self, targets: slice) -> Tensor:
        return self.members[self.starts[targets.start] : self.starts[targets.stop]]


class RowSlice(NamedTuple):
    """A rank's slice of a shared row (`context.py`)."""

    group: str
    start: int
    stop: int
    scored: Tensor
    """int64: entries of `Microbatch.scored` whose predictor it holds."""
    predictor: Tensor
    """int64: indices in the slice."""
    filled_from: int
    """The row's end without its filling."""


@dataclass(frozen=True)
class Microbatch:
    """One packed row; per-token tensors are [tokens]. With `targets`, all but `tokens` and `positions` have further
    entries for tokens that several samples train.

    Example: documents of 2 and 3 tokens have `cu_seqlens` [0, 2, 5], `max_seqlen` 3, `positions` [0, 1, 0, 1, 2].
    """

    tokens: Tensor
    """int64"""
    positions: Tensor
    """int64; positions of an answer continue its prompt's. With images [4, tokens]: `rope_positions` follow."""
    cu_seqlens: Tensor
    """int32 [pieces + 1]"""
    max_seqlen: int
    sampled: Tensor
    """bool: trainable, never a document's first token."""
    scored: Tensor
    """int64 [trainable tokens]: indices of `sampled`."""
    predictor: Tensor
    """int64 [trainable tokens]: the token before each; before an answer its prompt's last."""
    behaviour: Tensor
    """float32 log-probability at sampling."""
    versions: Tensor
    """int64, -1 for prompts."""
    sequence: Tensor
    """int64 index in `Batch.rows`; in a shared prompt any of its group."""
    turn: Tensor
    """int64 index in `Batch.turns`; -1 for given tokens."""
    groups: Sequence[int]
    """Answers to each shared prompt."""
    shared: SharedPrompts | CopiedPrompts | None
    images: PackedImages | None = None
    routes: Tensor | None = None
    """uint8 or int32 [layers with experts, tokens, k]"""
    advantages: Tensor | None = None
    """float32, by a critic."""
    teacher: Tensor | None = None
    """float32 log-probability, 0 without a teacher."""
    teacher_ids: Tensor | None = None
    """int64 [trainable tokens, k]: most probable tokens, 0 without a teacher."""
    teacher_top: Tensor | None = None
    """float32 [trainable tokens, k]"""
    targets: Targets | None = None
    own: RowSlice | None = None

    @property
    def held(self) -> slice:
        return slice(None) if self.own is None else slice(self.own.start, self.own.stop)

    @property
    def predicted(self) -> Tensor:
        return self.scored if self.own is None else self.own.scored

    @property
    def head_rows(self) -> int:
        return len(self.scored) if self.targets is None else len(self.targets.tokens)

    def copying(self, most: float) -> "Microbatch":
        """Copy prompts' keys, if at most `most` a token; on the CPU."""
        bounds = self.cu_seqlens.numpy()
        copies = np.diff(bounds[: len(self.groups) + 1]).dot(self.groups)
        return replace(self, shared=_copied(bounds, self.groups)) if 0 < copies <= most * bounds[-1] else self

    def to(self, device: torch.device) -> "Microbatch":
        return sent(self, device)

    def mapped(self, function: Callable[[Tensor], Tensor]) -> "Microbatch":
        """Apply `function` to each tensor, in order."""

        def changed(value: Any) -> Any:
            if isinstance(value, SharedPrompts | CopiedPrompts | Targets | RowSlice):
                return type(value)(*map(changed, value))
            if isinstance(value, PackedImages):
                return value.mapped(function)
            return function(value) if isinstance(value, Tensor) else value

        return Microbatch(**{name: changed(value) for name, value in vars(self).items()})


def lay_out(
    tokens: Sequence[Any],
    sampled: Sequence[Any],
    behaviour: Sequence[Any],
    versions: Sequence[Any],
    rows: Sequence[int],
    groups: Sequence[int] = (),
    turns: Sequence[Any] | None = None,
) -> Microbatch:
    """Make a microbatch. `rows`: indices in `Batch.rows`. `groups`: numbers of answers to shared prompts.

    Prompts come first, without trainable tokens, then answers, prompt by prompt, then whole documents.
    """

    def joined(arrays: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays, dtype=dtype, casting="unsafe"))

    lengths = np.array([len(ids) for ids in tokens])
    cu_seqlens = np.cumsum([0, *lengths])
    answers = slice(len(groups), len(groups) + sum(groups))
    prompt = np.repeat(np.arange(len(groups)), groups)
    first = np.zeros_like(lengths)
    first[answers] = lengths[prompt]
    before = np.arange(-1, cu_seqlens[-1] - 1)
    before[cu_seqlens[:-1]] = -1
    before[cu_seqlens[:-1][answers]] = cu_seqlens[1:][prompt] - 1
    trainable = np.concatenate(sampled, dtype=bool, casting="unsafe") & (before >= 0)
    scored = trainable.nonzero()[0]
    return Microbatch(
        tokens=joined(tokens, np.int64),
        positions=torch.from_numpy(np.arange(cu_seqlens[-1]) + np.repeat(first - cu_seqlens[:-1], lengths)),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(max(lengths)),
        sampled=torch.from_numpy(trainable),
        scored=torch.from_numpy(scored),
        predictor=torch.from_numpy(before[scored]),
        behaviour=joined(behaviour, np.float32),
        versions=joined(versions, np.int64),
        sequence=torch.from_numpy(np.repeat(np.array(rows, np.int64), lengths)),
        turn=torch.full((len(before),), -1) if turns is None else joined(turns, np.int64),
        groups=tuple(groups),
        shared=_shared(cu_seqlens, groups) if groups else None,
    )


def _copied(cu_seqlens: np.ndarray, groups: Sequence[int]) -> CopiedPrompts:
    pieces = np.split(np.arange(cu_seqlens[-1]), cu_seqlens[1:-1])
    for answer, prompt in enumerate(np.repeat(np.arange(len(groups)), groups), len(groups)):
        pieces[answer] = np.concatenate([pieces[prompt], pieces[answer]])
    starts = np.cumsum([0, *map(len, pieces)])
    keys = torch.from_numpy(np.concatenate(pieces))
    return CopiedPrompts(keys, torch.from_numpy(starts.astype(np.int32)), int(np.diff(starts).max()))


def _shared(cu_seqlens: np.ndarray, groups: Sequence[int]) -> SharedPrompts:
    prompts = cu_seqlens[: len(groups) + 1]
    answers = cu_seqlens[len(groups) + np.cumsum([0, *groups])]
    return SharedPrompts(
        answer_starts=torch.from_numpy((answers - answers[0]).astype(np.int32)),
        prompt_starts=torch.from_numpy(prompts.astype(np.int32)),
        longest_answers=int(np.diff(answers).max()),
        longest_prompt=int(np.diff(prompts).max()),
        prompts_end=int(prompts[-1]),
        answers_end=int(answers[-1]),
    )


def one_document(tokens: Sequence[int]) -> Microbatch:
    """A document whose first token alone is not trainable."""
    return documents([tokens])


def documents(texts: Sequence[Sequence[int]]) -> Microbatch:
    """Whole documents whose first tokens alone are not trainable."""
    sizes = [len(tokens) for tokens in texts]
    zeros, versions = [np.zeros(size) for size in sizes], [np.full(size, -1) for size in sizes]
    return lay_out(texts, [np.ones(size) for size in sizes], zeros, versions, range(len(texts)))
