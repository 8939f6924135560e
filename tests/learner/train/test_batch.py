"""Microbatches: no sample lost, none over budget, the same number on all ranks."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from buffer.wire.sample import Sample
from learner.model.microbatch import one_document
from learner.train import collectives
from learner.train.batch import Batch, alone, balance, documents_of, first_fit, pack, versions_of
from tests.harness.episodic import make_forks
from tests.harness.world import cut, make_samples

LENGTHS = st.lists(st.integers(1, 60), max_size=40)


@given(lengths=LENGTHS, budget=st.integers(1, 50))
def test_first_fit(lengths: list[int], budget: int) -> None:
    bins = first_fit(lengths, budget)
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    assert all(len(chosen) == 1 or sum(lengths[i] for i in chosen) <= budget for chosen in bins)
    whole_ones = [min(n, budget) for n in lengths]
    assert len(bins) <= max(2 * sum(whole_ones) / budget + 1, 0)


@given(lengths=LENGTHS, budget=st.integers(1, 50), quadratic=st.floats(0, 1), more=st.integers(0, 5))
def test_balance(lengths: list[int], budget: int, quadratic: float, more: int) -> None:
    number = len(first_fit(lengths, budget)) + more
    bins = balance(lengths, [n + quadratic * n * n for n in lengths], budget, number)
    assert len(bins) == number
    assert sorted(i for chosen in bins for i in chosen) == list(range(len(lengths)))
    assert all(len(chosen) <= 1 or sum(lengths[i] for i in chosen) <= budget for chosen in bins)
    costs = [sum(lengths[i] + quadratic * lengths[i] ** 2 for i in chosen) for chosen in bins]
    assert costs == sorted(costs, reverse=True)


def test_balance_counts_the_cost_of_attention() -> None:
    """A document of 40 tokens costs as much attention as sixteen of 10; by tokens alone it would not be alone."""
    lengths = [40] + [10] * 8
    squared = [n + n * n for n in lengths]
    by_square, by_tokens = (
        next(chosen for chosen in balance(lengths, costs, 80, 2) if 0 in chosen) for costs in (squared, lengths)
    )
    assert (len(by_square), len(by_tokens)) == (1, 3)


def test_pack(mesh) -> None:
    samples = [Sample.unpack(entry.sample) for entry in make_samples()[:3]]
    row = pack(alone(documents_of(samples, range(3))[0]))
    starts = row.cu_seqlens.tolist()
    for place, (sample, start, stop) in enumerate(zip(samples, starts[:-1], starts[1:], strict=True)):
        part = slice(start, stop)
        assert row.tokens[part].tolist() == sample.tokens.numpy().tolist()
        assert row.positions[part].tolist() == list(range(stop - start))
        assert row.sampled[part].tolist() == [False, *(sample.sampled.numpy()[1:] == 1)]
        assert row.behaviour[part].tolist() == sample.behaviour_logprobs.numpy().tolist()
        assert row.versions[part].tolist() == sample.versions.numpy().tolist()
        assert row.sequence[part].tolist() == [place] * (stop - start)
    assert row.max_seqlen == max(np.diff(starts))
    assert row.scored.tolist() == row.sampled.nonzero().squeeze(-1).tolist()


def test_the_first_token_is_never_trained() -> None:
    assert one_document([5, 6, 7]).sampled.tolist() == [False, True, True]


def test_a_dummy_trains_nothing() -> None:
    dummy = pack([])
    assert len(dummy.tokens) > 0
    assert not dummy.sampled.any() and len(dummy.scored) == 0


@pytest.mark.parametrize("budget", [1, 24, 64, 10**6])
def test_batch(mesh, budget: int) -> None:
    entries = make_samples()
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), budget)
    assert batch.rows.item.numpy().tolist() == [entry.item for entry in entries]
    trained = sum(int(microbatch.sampled.sum()) for microbatch in batch.microbatches)
    assert trained == batch.rows.sampled.numpy().sum()
    places = torch.cat([microbatch.sequence.unique() for microbatch in batch.microbatches])
    assert sorted(places.tolist()) == list(range(len(entries)))
    rows, sample = batch.rows, Sample.unpack(entries[5].sample)
    row = tuple(column.numpy()[5] for column in (rows.reward, rows.tokens, rows.dispatched, rows.truncated))
    assert row == (sample.reward, len(sample.tokens.numpy()), 1, sample.finish == "length")
    assert batch.num_versions[5] == len(set(sample.versions.numpy()[sample.sampled.numpy() == 1]))
    assert rows.metrics["right"].numpy().tolist() == rows.reward.numpy().tolist()


@pytest.mark.parametrize(("at", "other"), [(1, 4), (3, 2**32)], ids=["of another version", "of other samples"])
def test_parts_of_different_batches_are_refused(mesh, monkeypatch, at: int, other: int) -> None:
    """As if another rank had a part of version 4, or other rows of the same version."""
    part, real = cut(make_samples(), 3, [10, 14], 0), collectives.all_reduce_max
    monkeypatch.setattr(collectives, "all_reduce_max", lambda *mine: real(*mine[:at], other, *mine[at + 1 :]))
    with pytest.raises(RuntimeError, match=f"not one batch: parts of versions 3 to {4 if at == 1 else 3}, of other"):
        Batch.from_part(part, 64)


def test_versions_and_turns_of_each_sample() -> None:
    """Of samples joined, also of none."""
    samples = [Sample.unpack(entry.sample) for entry in [*make_samples(), *make_forks()]]
    flags = [sample.sampled.numpy() != 0 for sample in samples]
    versions = [sample.versions.numpy()[own].tolist() for sample, own in zip(samples, flags, strict=True)]
    assert versions_of(samples) == [len(set(own)) for own in versions] and max(versions_of(samples)) > 1
    numbers = [np.count_nonzero(own[1:] & ~own[:-1]) for own in flags]
    turns = documents_of(samples, range(7, 7 + len(samples)))[1]
    assert turns.rows.tolist() == [7 + row for row, number in enumerate(numbers) for _ in range(number)]
    documents, turns = documents_of([], [])
    assert versions_of([]) == [] and documents == [] and turns.rows.dtype == np.int64
