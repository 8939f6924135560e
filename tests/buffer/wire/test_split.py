"""Cutting batches: complete, balanced, and always the same."""

from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.sample import sample_stats
from buffer.wire.split import cut, parts
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


def test_parts_carry_the_rewards_of_the_whole_group_and_totals_of_the_whole_batch():
    packed = [(item, version, [s.pack() for s in group(item, tokens=10 * item)]) for item, version in ((1, 0), (2, 1))]
    cut_parts = parts(7, 2, [(item, d, [(data, sample_stats(data)) for data in group_]) for item, d, group_ in packed])
    assert [(part.version, part.rank, part.world) for part in cut_parts] == [(7, 0, 2), (7, 1, 2)]
    assert {(part.total_groups, part.total_samples, part.total_tokens) for part in cut_parts} == {(2, 4, 62)}
    assert {part.total_sampled for part in cut_parts} == {5 + 6 + 10 + 11}
    found = sorted((s.item, s.index, s.dispatched, s.sample) for part in cut_parts for s in part.samples)
    assert found == [(item, index, d, data) for item, d, group_ in packed for index, data in enumerate(group_)]
    assert all(s.rewards == [0.0, 1.0] for part in cut_parts for s in part.samples)
