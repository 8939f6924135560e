"""Rows in which texts go on from each other: their layout, and attention against an explicit mask."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, Qwen3NextConfig

from learner.model import attention
from learner.model.forest import Text, lay_out_forest
from learner.model.kernels import joined
from learner.model.microbatch import Microbatch
from learner.train.trees import common_prefix, grow
from tests.learner.model.test_shared_prompts import by_mask, inputs_of, largest_error, with_gradients

TEXTS = ([1, 2, 3, 4, 5, 6], [1, 2, 3, 9, 9], [1, 2, 3, 9], [1, 2, 3, 4, 7], [8, 8], [1, 2, 3, 4, 5, 6])


def text_of(tokens: Sequence[int], row: int, joined_: int = 0) -> Text:
    """A text whose every token but the first is trained, with figures of its own."""
    size = len(tokens)
    behaviour, versions = -np.arange(size) - 100.0 * row, np.full(size, row)
    sampled = np.arange(size) > 0
    teacher = np.arange(size) + 1000.0 * row if row % 2 else None
    return Text(np.array(tokens), sampled, behaviour, versions, np.where(sampled, row, -1), teacher, row, joined_)


def forest_of(texts: Sequence[Sequence[int]], budget: int = 10**6) -> tuple[Microbatch, list[Text]]:
    """The row of `texts` in trees, and its texts in order."""
    arrays = [np.array(text) for text in texts]
    laid = [text_of(texts[i], i, common) for tree in grow(arrays, budget) for i, common in tree]
    return lay_out_forest(laid), laid


def test_trees_go_on_from_the_longest_prefix() -> None:
    arrays = [np.array(text) for text in TEXTS]
    (lone,), tree = grow(arrays, 100)
    assert lone == (4, 0)
    assert [(TEXTS[i], number) for i, number in tree] == [
        ([1, 2, 3, 9, 9], 0),
        ([1, 2, 3, 9], 4),
        ([1, 2, 3, 4, 7], 3),
        ([1, 2, 3, 4, 5, 6], 4),
        ([1, 2, 3, 4, 5, 6], 6),
    ]


def test_layout() -> None:
    row, _ = forest_of([[1, 2, 3, 4], [1, 2, 5], [1, 2]])
    assert row.tokens.tolist() == [1, 2, 5, 3, 4] and row.cu_seqlens.tolist() == [0, 3, 5]
    assert row.positions.tolist() == [0, 1, 2, 2, 3] and row.groups == ()
    assert row.shared.keys.tolist() == [0, 1, 2, 0, 1, 3, 4] and row.shared.starts.tolist() == [0, 3, 7]
    assert row.sequence.tolist() == [1, 1, 1, 0, 0, 2, 0] or row.sequence.tolist() == [1, 1, 1, 0, 0, 0, 2]
    assert row.targets.tokens.tolist() == [2, 3, 5, 4] and row.targets.predictor.tolist() == [0, 1, 1, 3]
    assert row.targets.starts == (0, 3, 4, 5, 6) and row.head_rows == 4 < len(row.scored) == 6


FOREST = st.lists(st.lists(st.integers(0, 1), min_size=2, max_size=12), min_size=1, max_size=9)


@settings(max_examples=40)
@given(texts=FOREST, budget=st.integers(1, 60), window=st.sampled_from([None, 3]))
def test_any_forest_is_exact(texts: list[list[int]], budget: int, window: int | None) -> None:
    """Each token is trained once for each text, with that text's figures, predictor and place; attention is that of
    each text alone, sums of gradients included."""
    row, laid = forest_of(texts, budget)
    assert sorted(text.row for text in laid) == list(range(len(texts)))
    place = row.positions[row.predictor] + 1
    taught = torch.zeros(len(row.sampled)) if row.teacher is None else row.teacher
    tokens = row.tokens[row.predictor], row.targets.tokens[row.targets.of_scored]
    columns = *tokens, *(x[row.scored] for x in (row.behaviour, row.versions, row.turn, taught))
    keys = zip(row.sequence[row.scored].tolist(), place.tolist(), strict=True)
    found = dict(zip(keys, zip(*map(Tensor.tolist, columns), strict=True), strict=True))
    assert found == {
        (i, at): (text[at - 1], text[at], -at - 100.0 * i, i, i, (at + 1000.0 * i) * (i % 2))
        for i, text in enumerate(texts)
        for at in range(1, len(text))
    }
    members = torch.cat([row.targets.scored(slice(i, i + 1)) for i in range(len(row.targets.tokens))])
    assert sorted(members.tolist()) == list(range(len(row.scored)))
    check_attention(row, laid, window)


def check_attention(row: Microbatch, laid: Sequence[Text], window: int | None) -> None:
    seen = torch.zeros(len(row.tokens), len(row.tokens), dtype=torch.bool)
    bounds, pieces = row.cu_seqlens.tolist(), [text for text in laid if text.length > text.joined]
    for start, stop, keys in zip(
        bounds, bounds[1:], row.shared.keys.split(row.shared.starts.diff().tolist()), strict=False
    ):
        for query in range(start, stop):
            own = keys[: len(keys) - (stop - 1 - query)]
            seen[query, own if window is None else own[-window:]] = True
    for text, keys in zip(pieces, row.shared.keys.split(row.shared.starts.diff().tolist()), strict=True):
        assert row.tokens[keys].tolist() == text.tokens.tolist()
        assert row.positions[keys].tolist() == list(range(text.length))
    given_ = inputs_of(row, (2, 1), torch.float64, head_dim=8)
    wanted = with_gradients(lambda q, k, v: by_mask(q, k, v, seen), *given_)
    options = True, 8**-0.5, window, "plain" if window else "sdpa"

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return joined.attention(q, k, v, row.cu_seqlens, row.max_seqlen, row.shared, options)

    assert largest_error(with_gradients(attend, *given_), wanted) < 1e-13


@given(texts=FOREST, budget=st.integers(1, 40), key_room=st.sampled_from([0.0, 0.3]))
def test_trees_keep_to_the_budget(texts: list[list[int]], budget: int, key_room: float) -> None:
    arrays = [np.array(text) for text in texts]
    for tree in grow(arrays, budget, key_room):
        own = [len(texts[i]) - number for i, number in tree]
        room = sum(own) + key_room * sum(number for (_, number), n in zip(tree, own, strict=True) if n)
        assert tree[0][1] == 0 and (len(tree) == 1 or room <= budget + 1e-9)
        for (before, _), (i, number) in pairwise(tree):
            assert number == common_prefix(arrays[before], arrays[i]) > 0


def test_what_grows_no_trees_says_why() -> None:
    cuda = torch.device("cuda")
    assert attention.why_no_trees(LlamaConfig(), "flash4", cuda) is None
    sliding = Qwen3Config(sliding_window=8, use_sliding_window=True, max_window_layers=1)
    assert "sliding_attention" in sliding.layer_types
    assert attention.why_no_trees(sliding, "sdpa", torch.device("cpu")) is None
    assert attention.why_no_trees(sliding, "varlen", cuda) is None
    assert "on CPU only" in (attention.why_no_trees(LlamaConfig(), "sdpa", cuda) or "")
    assert "layers of linear_attention" in (attention.why_no_trees(Qwen3NextConfig(), "varlen", cuda) or "")
    assert "keep a state (Lfm2ShortConv)" in (
        attention.why_no_trees(LlamaConfig(), "varlen", cuda, ["Lfm2ShortConv"]) or ""
    )


def test_a_copied_key_takes_less_room_than_a_token() -> None:
    grouped = LlamaConfig(hidden_size=1536, num_attention_heads=12, num_key_value_heads=2)
    whole = LlamaConfig(hidden_size=4096, num_attention_heads=32, num_key_value_heads=32)
    assert attention.key_room(grouped, 28) == pytest.approx(
        (6 * 256 + 2 * 1536) / (28 * 1536 + 3 * (1536 + 256 + 1536))
    )
    assert 0.05 < attention.key_room(grouped, 28) < attention.key_room(whole, 32) < 0.2
