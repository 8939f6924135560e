"""The pure parts of the weights wire: plan, buckets, checksum, double buffer, messages."""

import threading
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from learner.weights.buckets import FACTOR, HALVES, WORDS, Buckets, DoubleBuffer, checksum
from learner.weights.plan import ALIGN, Plan, Spec, dtype_name, dtype_of
from learner.weights.protocol import TO_LEARNER, Failed, Join, KeepAlive, pack, unpack

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
shapes = st.lists(st.integers(0, 9), max_size=3).map(tuple)
specs = st.lists(st.tuples(shapes, st.sampled_from(DTYPES)), min_size=1, max_size=20).map(
    lambda rows: [Spec("first", (3,), torch.float32), *(Spec(f"w{i}", s, d) for i, (s, d) in enumerate(rows))]
)


@given(specs, st.integers(1, 4096))
def test_every_tensor_has_a_slot_in_order(specs, bucket_bytes):
    plan = Plan.of(specs, bucket_bytes)
    assert [slot.spec for slot in plan.slots] == specs
    assert all(slot.size == prod(slot.spec.shape) * slot.spec.dtype.itemsize for slot in plan.slots)
    assert all(slot.offset % ALIGN == 0 for slot in plan.slots)
    ends = {}
    for slot in plan.slots:
        assert slot.offset >= ends.get(slot.bucket, 0)
        assert slot.bucket >= max(ends, default=0)
        ends[slot.bucket] = slot.offset + slot.size
        assert ends[slot.bucket] <= plan.sizes[slot.bucket]
    for bucket, size in enumerate(plan.sizes):
        inside = [slot for slot in plan.slots if slot.bucket == bucket and slot.size]
        assert size <= bucket_bytes or len(inside) == 1


def some_of(specs, data):
    """The names of some tensors; "first", which is never empty, is trained."""
    return (
        frozenset(data.draw(st.sets(st.sampled_from([spec.name for spec in specs[1:]])))) if specs[1:] else frozenset()
    )


@given(specs, st.integers(1, 4096), st.data())
def test_frozen_tensors_come_first_in_buckets_of_their_own(specs, bucket_bytes, data):
    frozen = some_of(specs, data)
    plan = Plan.of(specs, bucket_bytes, frozen)
    order = [spec for spec in specs if spec.name in frozen], [spec for spec in specs if spec.name not in frozen]
    assert [slot.spec for slot in plan.slots] == [*order[0], *order[1]] and plan.frozen_names == frozen
    assert all((slot.bucket < plan.frozen) == (slot.spec.name in frozen) for slot in plan.slots)
    assert plan.trained == Plan.of(order[1], bucket_bytes), "as if there were nothing else"
    assert plan.sizes[plan.frozen :] == plan.trained.sizes and bool(plan.frozen) == bool(frozen)
    assert (plan.first(plan.trained.digest), plan.first(plan.digest)) == (plan.frozen, 0)
    assert (plan.digest == plan.trained.digest) == (not frozen)


@given(specs, st.sampled_from([1, 600, 1 << 20]), st.integers(0, 2**31), st.data())
def test_two_copies_share_what_is_frozen(specs, bucket_bytes, seed, data):
    frozen, draw = some_of(specs, data), torch.Generator().manual_seed(seed)

    def made(wanted):
        return [(s.name, torch.randint(-9, 9, s.shape, generator=draw).to(s.dtype)) for s in wanted]

    everything, trained = made(specs), made([spec for spec in specs if spec.name not in frozen])
    plan = Plan.of(specs, bucket_bytes, frozen)
    first = Buckets(plan, CPU)
    second = Buckets(plan, CPU, beside=first)
    first.fill(everything)
    second.fill(trained, frozen)
    for copy, weights in ((first, everything), (second, everything + trained)):
        right = dict(weights)
        assert all(torch.equal(tensor, right[name]) for name, tensor in copy.views())
        assert [name for name, _ in copy.views(first=plan.frozen)] == [name for name, _ in trained]
        each = [int(checksum(bucket)) for bucket in copy.buckets]
        assert copy.checksums().tolist() == each and copy.checksums(plan.frozen).tolist() == each[plan.frozen :]


@pytest.mark.parametrize(
    ("weights", "without"),
    [
        ([("a", torch.zeros(3))], ()),
        ([("b", torch.zeros(2))], ()),
        ([("a", torch.zeros(3)), ("b", torch.zeros(2))], {"a"}),
        ([("a", torch.zeros(3))], {"a"}),
        ([("a", torch.ones(2)), ("b", torch.zeros(2))], ()),
    ],
)
def test_frozen_weights_come_once_and_complete(weights, without):
    plan = Plan.of([Spec("a", (3,), torch.float32), Spec("b", (2,), torch.float32)], 1024, {"a"})
    with pytest.raises(ValueError, match="weights: "):
        Buckets(plan, CPU).fill(weights, without)


@given(specs, st.integers(1, 4096))
def test_different_plans_have_different_digests(specs, bucket_bytes):
    plan = Plan.of(specs, bucket_bytes)
    assert plan.digest == Plan.of(list(specs), bucket_bytes).digest
    renamed = [specs[0]._replace(name="other"), *specs[1:]]
    assert plan.digest != Plan.of(renamed, bucket_bytes).digest
    assert plan.digest != Plan.of([specs[0]._replace(dtype=torch.int32), *specs[1:]], bucket_bytes).digest


@given(specs, st.integers(1, 4096), st.integers(0, 2**31))
def test_views_show_what_was_filled_in(specs, bucket_bytes, seed):
    draw = torch.Generator().manual_seed(seed)
    weights = [(s.name, torch.randint(-9, 9, s.shape, generator=draw).to(s.dtype)) for s in specs]
    copy = Buckets(Plan.of(specs, bucket_bytes), CPU)
    copy.fill(weights)
    viewed = list(copy.views())
    assert [name for name, _ in viewed] == [name for name, _ in weights]
    assert all(torch.equal(a, b) and a.dtype == b.dtype for (_, a), (_, b) in zip(viewed, weights, strict=True))
    begins = [bucket.data_ptr() for bucket in copy.buckets]
    slots = {slot.spec.name: slot for slot in copy.plan.slots}
    for name, tensor in viewed:
        if tensor.numel():  # in place, no copies
            assert tensor.data_ptr() == begins[slots[name].bucket] + slots[name].offset


@pytest.mark.parametrize(
    "weights",
    [
        [("a", torch.zeros(3))],
        [("a", torch.zeros(3)), ("b", torch.zeros(2, 2)), ("c", torch.zeros(1))],
        [("b", torch.zeros(2, 2)), ("a", torch.zeros(3))],
        [("a", torch.zeros(3)), ("b", torch.zeros(2, 3))],
        [("a", torch.zeros(3)), ("b", torch.zeros(2, 2, dtype=torch.bfloat16))],
    ],
)
def test_weights_that_are_not_the_plans_are_refused_after_all_were_gathered(weights):
    plan = Plan.of([Spec("a", (3,), torch.float32), Spec("b", (2, 2), torch.float32)], 1024)
    taken = []
    with pytest.raises(ValueError, match="weights: "):
        Buckets(plan, CPU).fill((taken.append(name), (name, tensor))[1] for name, tensor in weights)
    assert len(taken) == len(weights)


def test_a_plan_needs_tensors_of_different_names():
    with pytest.raises(ValueError, match="two weights of the name a"):
        Plan.of([Spec("a", (3,), torch.float32)] * 2, 1024)
    with pytest.raises(ValueError, match="without weights"):
        Plan.of([], 1024)
    with pytest.raises(ValueError, match="without weights to train"):
        Plan.of([Spec("a", (3,), torch.float32)], 1024, {"a"})
    with pytest.raises(ValueError, match="no weight b, which is to be frozen"):
        Plan.of([Spec("a", (3,), torch.float32)], 1024, {"b"})
    with pytest.raises(ValueError, match="the plan other of the weights is neither"):
        Plan.of([Spec("a", (3,), torch.float32)], 1024).first("other")


def test_dtypes_are_sent_as_names():
    assert [dtype_of(dtype_name(dtype)) for dtype in DTYPES] == DTYPES
    with pytest.raises(ValueError, match="no_such"):
        dtype_of("no_such")


@given(st.integers(0, 2**31), st.data())
def test_a_changed_bit_changes_the_checksum(seed, data):
    size = 8 * (2 * WORDS + 32)
    bucket = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = int(checksum(bucket))
    assert int(checksum(bucket.clone())) == before
    bucket[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert int(checksum(bucket)) != before


@given(specs, st.sampled_from([1, 600, 1 << 20]), st.integers(0, 2**31))
def test_checksums_of_all_buckets_equal_those_of_each(specs, bucket_bytes, seed):
    copy = Buckets(Plan.of([Spec("wide", (3 * WORDS,), torch.int64), *specs], bucket_bytes), CPU)
    draw = torch.Generator().manual_seed(seed)
    for bucket in copy.buckets:
        bucket.copy_(torch.randint(0, 256, bucket.shape, generator=draw))
    assert copy.checksums().tolist() == [int(checksum(bucket)) for bucket in copy.buckets]


def test_exchanged_or_missing_rows_change_the_checksum():
    bucket = torch.arange(8 * WORDS * 3, dtype=torch.int64).to(torch.uint8)
    bucket[: 8 * WORDS] += 1
    before = int(checksum(bucket))
    rows = bucket.view(3, -1)
    assert int(checksum(rows[[1, 0, 2]].contiguous().view(-1))) != before
    rows[2] = 0
    assert int(checksum(bucket)) != before


@given(st.integers(0, 2**31), st.sampled_from([torch.bfloat16, torch.float32, torch.int64]), st.data())
def test_values_in_another_order_change_the_checksum(seed, dtype, data):
    """Two values of one row of words, any two rows, or all values of a row."""
    draw = torch.Generator().manual_seed(seed)
    bucket = torch.randint(-(2**15), 2**15, (3 * WORDS + 32,), generator=draw).repeat_interleave(8 // dtype.itemsize)
    values = bucket.to(dtype)
    before, row = int(checksum(values.view(torch.uint8))), data.draw(st.integers(0, 2)) * WORDS * 8 // dtype.itemsize
    inside = values[row : row + WORDS * 8 // dtype.itemsize]
    one, other = data.draw(st.lists(st.integers(0, len(inside) - 1), min_size=2, max_size=2))
    if inside[one] != inside[other]:
        inside[[one, other]] = inside[[other, one]]
        assert int(checksum(values.view(torch.uint8))) != before
        inside[[one, other]] = inside[[other, one]]
    shuffled = inside[torch.randperm(len(inside), generator=draw)]
    assert not torch.equal(shuffled, inside)
    inside.copy_(shuffled)
    assert int(checksum(values.view(torch.uint8))) != before


@pytest.mark.parametrize("distance", [1, 2, 3, 64, 1024, 2048, 4095])
def test_a_sign_that_moves_within_a_row_changes_the_checksum(distance: int):
    """It is the highest bit of both words, all else being equal."""
    for words in (WORDS, 40 * WORDS):
        bucket = torch.full((words,), 3, dtype=torch.int64)
        before = set()
        for place in (0, distance):
            moved = bucket.clone()
            moved[place] |= -(2**63)
            before.add(int(checksum(moved.view(torch.uint8))))
        assert len(before) == 2


def test_the_checksum_is_that_of_its_formula_in_plain_integers():
    bucket = torch.randint(0, 256, (8 * (40 * WORDS + 32),), dtype=torch.uint8)
    words = bucket.view(torch.int64).tolist()
    words += [0] * (-len(words) % WORDS)
    rows = [sum(words[at : at + WORDS]) for at in range(0, len(words), WORDS)]
    columns = [sum(words[at::WORDS]) % 2**64 for at in range(WORDS)]
    signed = [[half - 2**32 * (half >= 2**31) for half in (total % 2**32, total >> 32)] for total in columns]
    halves = [low * HALVES[0] + high * HALVES[1] for low, high in signed]
    total = sum((2 * at + 1) * FACTOR * value for values in (rows, halves) for at, value in enumerate(values))
    assert int(checksum(bucket)) % 2**64 == total % 2**64


def test_the_double_buffer_never_gives_out_a_copy_that_is_held():
    copies = DoubleBuffer(Plan.of([Spec("a", (3,), torch.float32)], 1024), CPU)
    first = copies.reserve(0.01)
    with copies.hold() as nothing:
        assert nothing is None
    copies.offer(first)
    second = copies.reserve(0.01)
    assert second is not first
    copies.offer(second)
    assert copies.reserve(0.01) is first  # the newest stays for newcomers
    with copies.hold(first):
        assert copies.newest is second
        assert copies.reserve(0.01) is second  # superseded before it was served
        assert copies.newest is None
        copies.offer(second)
        with copies.hold() as newest:
            assert newest is second
            with pytest.raises(TimeoutError):
                copies.reserve(0.01)
            got = []
            waiting = threading.Thread(target=lambda: got.append(copies.reserve(60)))
            waiting.start()
        waiting.join(60)
        assert got == [second]


def test_messages_survive_packing():
    join = Join(name="rollout-0", protocol=1, workers=2, backend="gloo")
    assert unpack(pack(join), TO_LEARNER) == join
    assert unpack(pack(KeepAlive()), TO_LEARNER) == KeepAlive()


@pytest.mark.parametrize(
    ("frame", "text"),
    [
        (b"", "not MessagePack"),
        (b"\xc1", "not MessagePack"),
        (b"\x93\x01\x02\x03", "not a map"),
        (pack(Failed(round=1, reason="r"))[:-9], "not MessagePack"),
        (b"\x81\xa4kind\xa7Welcome", "Welcome"),
        (b"\x82\xa4kind\xa5Ready\xa5round\xff", "Ready.round"),
        (b"\x81\xa4kind\x90", "kind"),
    ],
)
def test_a_broken_message_is_refused_in_one_line(frame, text):
    with pytest.raises(ValueError, match=text) as error:
        unpack(frame, TO_LEARNER)
    assert "\n" not in str(error.value)
