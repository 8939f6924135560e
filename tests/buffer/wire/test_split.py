"""Cutting batches: complete, balanced, and always the same."""

from dataclasses import replace
from math import isnan

from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.sample import sample_stats
from buffer.wire.split import cut, parts, sample_rows
from tests.harness.buffer_process import group

TOKENS = st.lists(st.integers(1, 2000), min_size=1, max_size=60)


@given(TOKENS, st.integers(1, 9))
def test_a_cut_gives_each_sample_to_one_rank_and_no_rank_more_than_its_share_and_one_sample(tokens, world):
    ranks = cut(tokens, world)
    assert sorted(position for rank in ranks for position in rank) == list(range(len(tokens)))
    loads = [sum(tokens[position] for position in rank) for rank in ranks]
    assert max(loads) <= sum(tokens) / world + max(tokens)
    assert all(ranks) or len(tokens) < world
    assert ranks == cut(list(tokens), world)


def test_longest_first():
    assert cut([5, 3, 2, 4], 2) == [[0, 2], [1, 3]]


def test_parts_carry_a_row_for_each_sample_of_the_whole_batch():
    packed = [(item, version, [s.pack() for s in group(item, tokens=10 * item)]) for item, version in ((1, 0), (2, 1))]
    groups = [(item, d, [(data, sample_stats(data)) for data in group_]) for item, d, group_ in packed]
    found = parts(7, 2, groups, {"failed": 3, "dropped": 1})
    assert [(part.version, part.rank, part.world, part.failed, part.dropped) for part in found] == [
        (7, 0, 2, 3, 1),
        (7, 1, 2, 3, 1),
    ]
    for rows in (part.rows for part in found):
        assert (rows.item.numpy().tolist(), rows.dispatched.numpy().tolist()) == ([1, 1, 2, 2], [0, 0, 1, 1])
        assert rows.reward.numpy().tolist() == [0.0, 1.0, 0.0, 1.0]
        assert (rows.tokens.numpy().sum(), rows.sampled.numpy().tolist()) == (62, [5, 6, 10, 11])
    by_row = {row: data for part in found for row, data in zip(part.positions.numpy(), part.samples, strict=True)}
    assert [by_row[row] for row in range(4)] == [data for *_, group_ in packed for data in group_]


def test_a_metric_that_some_samples_lack_is_nan_there():
    (one, other) = (replace(sample_stats(group(1)[0].pack()), metrics=metrics) for metrics in ({"a": 1.0}, {}))
    column = sample_rows([(1, 0, [(b"", one), (b"", other)])]).metrics["a"].numpy()
    assert column[0] == 1.0 and isnan(column[1])
