"""A microbatch: pieces of text packed without padding, one after another, and the arithmetic of their layout.

Where samples of a group share their prompt, the row is [shared prompts | their answers, group by group | whole
documents]: pieces that attention treats as documents, except that an answer sees its prompt too, and its positions go
on from there. It sees the prompt's keys (`SharedPrompts`) or, where that costs less, copies of them (`CopiedPrompts`).
Rows whose texts share longer prefixes than prompts are laid out by `forest.py`.
Consumes token arrays of pieces; waits for nothing. `learner/train/batch.py` decides which documents go together,
`policy.py` runs the model over the row, `learner/train/step.py` computes the loss of its trainable tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from learner.model.towers import PackedImages


class SharedPrompts(NamedTuple):
    """Which answers of a row see which prompt: all of group i see prompt i.

    Example: two prompts of 4 and 9 tokens, the first with answers of 2 and 3, the second with answers of 1 and 1:
    `answer_starts` [0, 5, 7], `prompt_starts` [0, 4, 13], `longest_answers` 5, `longest_prompt` 9, `prompts_end` 13,
    `answers_end` 20.
    """

    answer_starts: Tensor
    """int32 [groups + 1]: where each group's answers start, counted from the first answer, and the end."""
    prompt_starts: Tensor
    """int32 [groups + 1]: where each prompt starts, and the end."""
    longest_answers: int
    """Tokens of the answers of the group that has most."""
    longest_prompt: int
    prompts_end: int
    """Tokens of all prompts: the answers start here."""
    answers_end: int
    """Tokens of all prompts and answers: the whole documents start here."""


class CopiedPrompts(NamedTuple):
    """What each piece of a row sees: its own tokens, an answer those of its prompt before them.

    Example: a prompt of 2 with answers of 1 and 3, and a document of 2: `keys` [0, 1, 0, 1, 2, 0, 1, 3, 4, 5, 6, 7],
    `starts` [0, 2, 5, 10, 12], `longest` 5.
    """

    keys: Tensor
    """int64 [keys]: index in the row of each."""
    starts: Tensor
    """int32 [pieces + 1]: where the keys of each piece start, and the end."""
    longest: int
    """Keys of the piece that has most."""


class Targets(NamedTuple):
    """The tokens that a row's head computes, each once, where texts share more than prompts (`forest.py`).

    Example: two samples of one prompt of 2, whose answers are [5, 6] and [5, 7]: `predictor` [1, 2, 2], `tokens`
    [5, 6, 7], `of_scored` [0, 1, 0, 2], `members` [0, 2, 1, 3], `starts` (0, 2, 3, 4).
    """

    predictor: Tensor
    """int64 [targets]: index in the row of the token whose hidden state predicts each."""
    tokens: Tensor
    """int64 [targets]: token ids."""
    of_scored: Tensor
    """int64 [trainable tokens]: the target of each entry of `Microbatch.scored`."""
    members: Tensor
    """int64 [trainable tokens]: these entries by target."""
    starts: tuple[int, ...]
    """[targets + 1]: where the members of each target start, and the end. On the CPU."""

    def scored(self, targets: slice) -> Tensor:
        """The entries of `Microbatch.scored` that are of some `targets`."""
        return self.members[self.starts[targets.start] : self.starts[targets.stop]]


class RowSlice(NamedTuple):
    """What a rank holds of a row that a context group shares (`context.py`).

    Example: of a document of 6 tokens, the last 4 of them trainable, the second of two ranks has `start` 3, `stop` 6,
    `scored` [4, 5], `predictor` [0, 1], `filled_from` 6; the first has `scored` [2, 3], `predictor` [1, 2].
    """

    group: str
    """Name of the context group."""
    start: int
    """Index in the row of its first token."""
    stop: int
    """Index after its last token."""
    scored: Tensor
    """int64: entries of `Microbatch.scored` whose predictor it holds."""
    predictor: Tensor
    """int64: index in the slice of the token that predicts each."""
    filled_from: int
    """Index in the row of the first token that only fills it up to equal slices."""


@dataclass(frozen=True)
class Microbatch:
    """One packed row. Per-token tensors are [tokens]; entry i is about token i. With `targets`, all but `tokens` and
    `positions` have further entries behind them, for tokens of the row that more than one sample trains.

    Example: documents of 2 and 3 tokens have `cu_seqlens` [0, 2, 5], `max_seqlen` 3, `positions` [0, 1, 0, 1, 2].
    """

    tokens: Tensor
    """int64 token ids."""
    positions: Tensor
    """int64, from 0 in each document; those of an answer go on from its prompt's. With images [4, tokens]: below them
    those in time, height and width (`rope_positions`)."""
    cu_seqlens: Tensor
    """int32 [pieces + 1]: where each document, shared prompt and answer starts, and the end."""
    max_seqlen: int
    """Tokens of the longest piece."""
    sampled: Tensor
    """bool: trainable. Never true for a document's first token: nothing predicts it."""
    scored: Tensor
    """int64 [trainable tokens]: indices at which `sampled` is true."""
    predictor: Tensor
    """int64 [trainable tokens]: index of the token whose hidden state predicts each: the one before it in its document.
    That is its prompt's last for the first token of every answer to a shared prompt."""
    behaviour: Tensor
    """float32 log-probability with which the token was sampled."""
    versions: Tensor
    """int64 policy version that sampled the token, -1 for prompt tokens."""
    sequence: Tensor
    """int64 index of the token's sample in `Batch.rows`, of any of its group in a shared prompt; 0 in a dummy."""
    turn: Tensor
    """int64 index of a sampled token's turn in `Batch.turns`; -1 for tokens that were given."""
    groups: Sequence[int]
    """Numbers of answers to the shared prompts, which are the first pieces."""
    shared: SharedPrompts | CopiedPrompts | None
    """None: the row has whole documents only."""
    images: PackedImages | None = None
    """None: the row has no image."""
    routes: Tensor | None = None
    """uint8 or int32 [layers with experts, tokens, k]: ids of the experts that the server chose; None: not replayed."""
    advantages: Tensor | None = None
    """float32 advantage of each token, by a critic, 0 for tokens that were given; None: tokens have that of their
    turn."""
    teacher: Tensor | None = None
    """float32: the teacher's log-probability of the token, 0 where there is none; None: no token has a teacher."""
    teacher_ids: Tensor | None = None
    """int64 [trainable tokens, k]: the teacher's k most probable tokens in place of each of `scored`, zeros where there
    is no teacher; None: no token has them."""
    teacher_top: Tensor | None = None
    """float32 [trainable tokens, k]: the teacher's log-probabilities of these."""
    targets: Targets | None = None
    """None: each trainable token is one of the row."""
    own: RowSlice | None = None
    """None: this rank computes the whole row."""

    @property
    def held(self) -> slice:
        """The tokens that this rank computes."""
        return slice(None) if self.own is None else slice(self.own.start, self.own.stop)

    @property
    def predicted(self) -> Tensor:
        """The entries of `scored` that this rank predicts."""
        return self.scored if self.own is None else self.own.scored

    @property
    def head_rows(self) -> int:
        """Hidden states to which the head is applied, counted as often as it is."""
        return len(self.scored) if self.targets is None else len(self.targets.tokens)

    def copying(self, most: float) -> "Microbatch":
        """With the keys of its prompts copied for their answers, if that is at most `most` keys a token; on the CPU."""
        bounds = self.cu_seqlens.numpy()
        copies = np.diff(bounds[: len(self.groups) + 1]).dot(self.groups)
        return replace(self, shared=_copied(bounds, self.groups)) if 0 < copies <= most * bounds[-1] else self

    def to(self, device: torch.device) -> "Microbatch":
        """The same microbatch on `device`."""

        def moved(value: Any) -> Any:
            if isinstance(value, SharedPrompts | CopiedPrompts | Targets | RowSlice):
                return type(value)(*map(moved, value))
            if isinstance(value, PackedImages):
                return value.to(device)
            return value.to(device, non_blocking=True) if isinstance(value, Tensor) else value

        return Microbatch(**{name: moved(value) for name, value in vars(self).items()})


def lay_out(
    tokens: Sequence[Any],
    sampled: Sequence[Any],
    behaviour: Sequence[Any],
    versions: Sequence[Any],
    rows: Sequence[int],
    groups: Sequence[int] = (),
    turns: Sequence[Any] | None = None,
) -> Microbatch:
    """The microbatch of some pieces: of each piece an array for each field, and its index in `Batch.rows`.

    `groups`: numbers of answers to shared prompts. So many prompts come first, without trainable tokens, then the
    answers to the first one, and so on; the rest are whole documents. `turns`: None where no advantages are needed.
    """

    def joined(arrays: Sequence[Any], dtype: Any) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype))

    lengths = np.array([len(ids) for ids in tokens])
    cu_seqlens = np.cumsum([0, *lengths])
    answers = slice(len(groups), len(groups) + sum(groups))
    prompt = np.repeat(np.arange(len(groups)), groups)  # of each answer
    first = np.zeros_like(lengths)
    first[answers] = lengths[prompt]
    before = np.arange(-1, cu_seqlens[-1] - 1)
    before[cu_seqlens[:-1]] = -1
    before[cu_seqlens[:-1][answers]] = cu_seqlens[1:][prompt] - 1
    trainable = np.concatenate(sampled).astype(bool) & (before >= 0)
    scored = trainable.nonzero()[0]
    return Microbatch(
        tokens=joined(tokens, np.int64),
        positions=joined([np.arange(start, start + n) for start, n in zip(first, lengths, strict=True)], np.int64),
        cu_seqlens=torch.from_numpy(cu_seqlens.astype(np.int32)),
        max_seqlen=int(max(lengths)),
        sampled=torch.from_numpy(trainable),
        scored=torch.from_numpy(scored),
        predictor=torch.from_numpy(before[scored]),
        behaviour=joined(behaviour, np.float32),
        versions=joined(versions, np.int64),
        sequence=torch.from_numpy(np.repeat(rows, lengths).astype(np.int64)),
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
    """A single document of which every token but the first is trainable."""
    size = len(tokens)
    return lay_out([tokens], [np.ones(size)], [np.zeros(size)], [np.full(size, -1)], [0])
