"""Each rank publishes its own rows: the bytes at every worker are those of the gathered path, checksums included."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.weights.buckets import WORDS, Buckets, add_up
from learner.weights.plan import Plan, Spec
from learner.weights.rows import ROW, RowPool, _copies, rows_of, scratch_bytes, shares_of

CPU = torch.device("cpu")
DTYPES = (torch.bfloat16, torch.float32)


@st.composite
def cases(draw):
    """Specs, ranks, names of whole tensors, names of frozen ones."""
    shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
    many = st.tuples(st.integers(1, 200), st.integers(1, 700))
    count = draw(st.integers(1, 7))
    specs = [Spec(f"t{i}", draw(shapes | many), draw(st.sampled_from(DTYPES))) for i in range(count)]
    specs.append(Spec("trained", (5, 3), torch.float32))
    names = [spec.name for spec in specs]
    whole = {spec.name for spec in specs if not spec.shape} | set(draw(st.lists(st.sampled_from(names), max_size=2)))
    frozen = set(draw(st.lists(st.sampled_from(names[:-1]), max_size=2)))
    return specs, draw(st.integers(2, 5)), whole, frozen


def random_weights(specs):
    draw = torch.Generator().manual_seed(1)
    return {spec.name: torch.randn(spec.shape, generator=draw).to(spec.dtype) for spec in specs}


def share_of(tensor, rank, ranks, whole):
    own = rows_of(len(tensor), ranks, rank) if not whole else None
    return tensor if own is None else tensor[own.start : own.stop]


def placed(plan, pools, rotating=False):
    """What a worker has after all shares were copied from scratch into place."""
    got = Buckets(plan, CPU, rotating, scratch=scratch_bytes(plan))
    sent = {rank: iter(pool.messages()) for rank, pool in enumerate(pools)}
    for number, share in enumerate(shares_of(plan)):
        got.scratch[number % 2][: share.size].copy_(next(sent[share.rank]))
        for into, out_of in _copies(got, number, share, number % 2):
            torch._foreach_copy_(into, out_of)
    return got


@settings(max_examples=60, deadline=None)
@given(cases())
def test_rows_of_all_ranks_make_the_gathered_copy_and_its_checksums(case):
    specs, ranks, whole, frozen = case
    plan = Plan.of(specs, 1 << 16, frozen, ranks, whole)
    weights = random_weights(specs)
    gathered = Buckets(plan, CPU)
    gathered.fill(weights.items())
    pools = [RowPool(plan, rank, CPU) for rank in range(ranks)]
    for rank, pool in enumerate(pools):
        pool.fill((name, share_of(tensor, rank, ranks, name in whole)) for name, tensor in weights.items())
    got = placed(plan, pools)
    for ours, theirs in zip(got.buckets, gathered.buckets, strict=True):
        assert torch.equal(ours, theirs)
    for first in {0, plan.frozen}:
        sums = [pool.sums(first) for pool in pools]
        total = add_up(torch.stack([rows for rows, _ in sums]), torch.stack([columns for _, columns in sums]))
        assert total == [int(one) for one in gathered.checksums(first).tolist()]


@settings(max_examples=60, deadline=None)
@given(cases())
def test_a_plan_sends_each_byte_once_and_shares_it_evenly(case):
    specs, ranks, whole, frozen = case
    plan = Plan.of(specs, 1 << 16, frozen, ranks, whole)
    slots = {slot.spec.name: slot for slot in plan.slots}
    written = [torch.zeros(size, dtype=torch.int32) for size in plan.sizes]
    for share in shares_of(plan):
        rows = []
        for name, offset, target, size in share.ranges:
            assert slots[name].bucket == share.bucket and offset % ROW == target % ROW
            written[share.bucket][target : target + size] += 1
            rows += range(offset // ROW, (offset + size - 1) // ROW + 1)
        assert len(rows) == len(set(rows)) and share.size % ROW == 0 and share.size >= ROW * len(rows)
    for slot in plan.slots:
        assert (written[slot.bucket][slot.offset : slot.offset + slot.size] == 1).all()
    assert sum(int(one.sum()) for one in written) == sum(slot.size for slot in plan.slots)


def test_every_rank_holds_the_same_memory():
    """Two copies of 1/R each, rank 0 included, beyond what aligns a extent."""
    specs = [Spec(f"w{i}", (600, 1000), torch.bfloat16) for i in range(8)] + [Spec("norm", (7,), torch.bfloat16)]
    plan = Plan.of(specs, 4 << 20, (), 3)
    sizes = [2 * RowPool(plan, rank, CPU).num_bytes for rank in range(3)]
    assert max(sizes) - min(sizes) <= 2 * 2 * ROW * len(plan.sizes)
    assert max(sizes) <= 2 * plan.total_bytes / 3 + 2 * 2 * ROW * len(plan.slots)
    assert 2 * plan.total_bytes <= sum(sizes)


def test_what_is_frozen_lies_once_in_both_copies_of_a_rank():
    specs = [Spec("tower", (64, 4096), torch.bfloat16), Spec("w", (64, 4096), torch.bfloat16)]
    plan = Plan.of(specs, 1 << 20, ["tower"], 2)
    first = RowPool(plan, 1, CPU)
    second = RowPool(plan, 1, CPU, beside=first)
    assert first.messages()[0].data_ptr() == second.messages()[0].data_ptr()
    assert first.messages()[1].data_ptr() != second.messages()[1].data_ptr()
    assert len(first.messages(plan.frozen)) == 1


def test_rows_at_a_wrong_place_change_the_checksum():
    specs = [Spec("a", (4, 4128), torch.float32), Spec("b", (4, 4128), torch.float32)]
    plan = Plan.of(specs, 1 << 20, (), 2)
    weights = random_weights(specs)
    pools = [RowPool(plan, rank, CPU) for rank in range(2)]
    for rank, pool in enumerate(pools):
        pool.fill((name, share_of(tensor, rank, 2, False)) for name, tensor in weights.items())
    got = placed(plan, pools)
    right = got.checksums().tolist()
    bucket = got.buckets[0]
    swapped = bucket.clone()
    swapped[: 2 * ROW // 2], swapped[ROW : 2 * ROW] = bucket[ROW : 2 * ROW], bucket[:ROW]
    bucket.copy_(swapped)
    assert got.checksums().tolist() != right
    rows, columns = zip(*(pool.sums() for pool in pools), strict=True)
    assert add_up(torch.stack(rows), torch.stack(columns)) == right and columns[0].shape == (1, WORDS)


def test_rows_that_are_not_the_plans_are_refused_by_name():
    plan = Plan.of([Spec("a", (5, 2), torch.float32), Spec("b", (2,), torch.float32)], 1 << 20, (), 2)
    pool = RowPool(plan, 1, CPU)
    with pytest.raises(ValueError, match=r"rank 1 got \(5, 2\) of a, the plan has \(2, 2\)"):
        pool.fill([("a", torch.zeros(5, 2)), ("b", torch.zeros(1))])
    with pytest.raises(ValueError, match="b is missing"):
        pool.fill([("a", torch.zeros(2, 2))])
    with pytest.raises(ValueError, match="of c, the plan has no such tensor"):
        pool.fill([("c", torch.zeros(2, 2))])
