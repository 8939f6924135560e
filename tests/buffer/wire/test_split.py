"""Cutting batches: complete, balanced, and always the same."""

from collections.abc import Sequence
from dataclasses import replace
from math import isnan

from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.types import SampleStats
from buffer.wire import batches
from buffer.wire.batches import MOST_COLUMNS, cut, cut_groups, parts, sample_rows
from buffer.wire.protocol import Part, Put, Take
from buffer.wire.sample import sample_stats
from tests.buffer.wire.test_many import Clients
from tests.harness.buffer_process import group, make_requests

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


def members(prompt: int, answers: Sequence[int]) -> list[SampleStats]:
    return [SampleStats(prompt + n, n, 0.0, prompt=prompt) for n in answers]


def loads(groups: list[list[SampleStats]], ranks: list[list[int]]) -> list[int]:
    """Tokens that each rank computes: of each group the prompt once, and the answers."""
    samples = [(number, stats) for number, group in enumerate(groups) for stats in group]
    prompts = [{(samples[i][0], samples[i][1].prompt) for i in rank} for rank in ranks]
    answers = [sum(samples[i][1].tokens - samples[i][1].prompt for i in rank) for rank in ranks]
    return [sum(prompt for _, prompt in seen) + rest for seen, rest in zip(prompts, answers, strict=True)]


ANSWERS = st.lists(st.integers(1, 200), min_size=1, max_size=9)
GROUPS = st.lists(st.builds(members, st.integers(0, 300), ANSWERS), min_size=1, max_size=9)


@given(GROUPS, st.integers(1, 9))
def test_a_cut_by_groups_gives_each_sample_to_one_rank_and_computes_no_more_than_a_cut_by_whole_groups(groups, world):
    ranks = cut_groups(groups, world)
    total = sum(map(len, groups))
    assert sorted(position for rank in ranks for position in rank) == list(range(total)) and len(ranks) == world
    assert all(rank == sorted(rank) for rank in ranks)
    whole = [loads([group], [range(len(group))])[0] for group in groups]
    assert max(loads(groups, ranks)) <= max(sum(whole[number] for number in rank) for rank in cut(whole, world))
    assert ranks == cut_groups(list(groups), world)


def test_groups_are_whole_where_that_is_even_and_cut_where_one_rank_would_wait():
    even = [members(1000, [500] * 4) for _ in range(4)]
    assert cut_groups(even, 2) == [[*range(4), *range(8, 12)], [*range(4, 8), *range(12, 16)]]
    uneven = [members(100, [500] * 8), members(100, [50] * 8)]
    ranks = cut_groups(uneven, 2)
    assert max(loads(uneven, ranks)) < 3000 < max(loads(uneven, [[*range(8)], [*range(8, 16)]]))


def test_parts_of_a_learner_that_shares_prompts_have_whole_groups():
    packed = [(item, 0, [s.pack() for s in group(item, tokens=12)]) for item in range(4)]
    groups = [(item, d, [(data, sample_stats(data)) for data in group_]) for item, d, group_ in packed]
    found = [part.positions.numpy().tolist() for part in parts(7, 2, groups, share_prompts=True)]
    assert sorted(found) == [[0, 1, 4, 5], [2, 3, 6, 7]]


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


def test_of_very_many_metrics_those_of_most_samples_are_kept():
    """A reward function that names a metric for each problem must not fill the buffer's memory with columns."""
    one = sample_stats(group(1)[0].pack())
    rows = [(b"", replace(one, metrics={"often": 1.0, **{f"{n}/{k}": 1.0 for k in range(200)}})) for n in range(8)]
    names = [*sample_rows([(1, 0, rows)]).metrics]
    assert len(names) == MOST_COLUMNS and "often" in names and names == sorted(names)


def test_metrics_that_are_left_out_of_a_batch_are_counted_and_said(monkeypatch, caplog):
    monkeypatch.setattr(batches, "MOST_COLUMNS", 2)
    clients = Clients(make_requests(groups=1))
    (item,) = clients.work("a", 1)
    samples = [
        each.model_copy(update={"metrics": {"b": 1.0, str(n): 1.0}}).pack() for n, each in enumerate(group(item.item))
    ]
    clients.say("a", Put(item=item.item, lease=item.lease, samples=samples))
    clients.say("l0", Take(version=0, rank=0, world=1))
    (found,) = [message for _, _, message in clients.turn() if isinstance(message, Part)]
    assert [*found.rows.metrics] == ["0", "b"]
    (line,) = [record.getMessage() for record in caplog.records if "metrics" in record.getMessage()]
    assert line.startswith("batch 0: 1 metrics left out, ") and line.endswith("; give metrics fixed names")


def test_a_metric_that_some_samples_lack_is_nan_there():
    (one, other) = (replace(sample_stats(group(1)[0].pack()), metrics=metrics) for metrics in ({"a": 1.0}, {}))
    column = sample_rows([(1, 0, [(b"", one), (b"", other)])]).metrics["a"].numpy()
    assert column[0] == 1.0 and isnan(column[1])
