"""The messages: they survive the wire unchanged, and nothing else does."""

import math
import typing

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.wire import protocol
from buffer.wire.message import Array, Message, number_of, pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, REQUESTS, Ask, Put, State, Status, Waiter
from buffer.wire.requests import VERBS
from buffer.wire.sample import Sample
from tests.harness.buffer_process import committed, make_requests, sample

WRONG: dict[str, dict[str, typing.Any]] = {
    "another dtype": {"tokens": Array.of(np.arange(4))},
    "two dimensions": {"tokens": Array.of(np.zeros((2, 2), np.int32))},
    "lengths that differ": {"behaviour_logprobs": Array.of(np.zeros(3, np.float32))},
    "nothing sampled": {"sampled": Array.of(np.zeros(4, np.uint8))},
    "no number as reward": {"reward": math.nan},
    "an unknown finish": {"finish": "tired"},
}


def test_a_sample_survives_packing():
    before = sample(reward=0.25, tokens=6, version=3)
    after = Sample.unpack(before.pack())
    assert after == before
    np.testing.assert_array_equal(after.versions.numpy(), [-1, -1, -1, 3, 3, 3])


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_a_sample_that_contradicts_itself_is_refused(change):
    fields = sample().model_dump() | {
        name: value.model_dump() if isinstance(value, Array) else value for name, value in change.items()
    }
    with pytest.raises(ValueError):
        Sample.unpack(msgpack.packb(fields))


@given(st.sampled_from(["uint8", "int32", "int64", "float32"]), st.lists(st.integers(0, 4), max_size=3))
def test_arrays_travel_in_little_endian(dtype, shape):
    array = np.arange(math.prod(shape)).astype(np.dtype(dtype).newbyteorder(">")).reshape(shape)
    travelled = Array.of(array)
    assert travelled.data == array.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
    np.testing.assert_array_equal(travelled.numpy(), array)


@pytest.mark.parametrize("shape", [[3], [2**40, 2**40], [1] * 9, [-1]])
def test_an_array_whose_bytes_do_not_fit_its_shape_is_refused(shape):
    with pytest.raises(ValueError):
        Array(dtype="int32", shape=shape, data=b"\0" * 4)


def test_messages_survive_the_wire_with_their_number():
    waiter = Waiter(who="learner-0", kind="Take", why="batch 3 wants 2 more groups", seconds=1.5)
    state = State(
        version=3, trained=1, counts={"leased": 2}, dropped={}, ages={0: 4, 1: 2}, bytes_stored=10,
        servers={"rollout-0": {"version": 3, "stats": {"tokens/s": 1.5}}}, waiters=[waiter], errors=0,
    )  # fmt: skip
    assert unpack(pack(17, state), ANSWERS) == (17, state)
    put = Put(item=4, lease=9, samples=[sample().pack()])
    assert unpack(pack(2**40, put), REQUESTS) == (2**40, put)
    assert number_of(pack(2**40, put)) == 2**40


def test_every_message_model_is_a_request_or_an_answer():
    models = {m for m in vars(protocol).values() if isinstance(m, type) and issubclass(m, Message)}
    parts = {Message, Array, protocol.WorkItem, Waiter, protocol.SampleRows, protocol.RowImages, protocol.SetResult}
    assert models - parts == set(REQUESTS.values()) | set(ANSWERS.values())


@pytest.mark.parametrize("model", [*REQUESTS.values(), *ANSWERS.values()])
def test_no_field_of_a_message_takes_the_place_of_the_frame_s_own(model):
    assert not {"kind", "id"} & set(model.model_fields)


def test_a_failure_travels_with_its_kind():
    fail = protocol.Fail(item=4, lease=9, reason="ZeroDivisionError", failure_kind="reward")
    assert unpack(pack(3, fail), REQUESTS) == (3, fail)


MALFORMED = {
    "nothing": b"",
    "no map": msgpack.packb([1, 2]),
    "cut short": pack(1, Status())[:-1],
    "two messages": pack(1, Status()) * 2,
    "an unknown kind": msgpack.packb({"kind": "Steal", "id": 1}),
    "a kind that cannot be looked up": msgpack.packb({"kind": [1], "id": 1}),
    "no number": msgpack.packb({"kind": "Status"}),
    "a field too many": msgpack.packb({"kind": "Status", "id": 1, "more": 1}),
    "a field too few": msgpack.packb({"kind": "Ask", "id": 1, "request": 1, "version": 0}),
    "a text as a number": msgpack.packb({"kind": "Ask", "id": 1, "request": 1, "version": "0", "room": 1}),
    "a negative number": msgpack.packb({"kind": "Ask", "id": 1, "request": -1, "version": 0, "room": 1}),
    "beyond SQLite's integers": msgpack.packb({"kind": "Ask", "id": 1, "request": 2**63, "version": 0, "room": 1}),
    "an answer": pack(1, protocol.Ack()),
    "a list as a key": b"\x81\x91\x01\x01",
    "nested too deep": b"\x91" * 10_000,
    "a promise of 4 GiB": b"\xdf\xff\xff\xff\xff",
    "text that is not UTF-8": b"\x81\xa1\xff\x01",
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED)
def test_what_is_not_a_request_is_refused_in_one_short_line(data):
    with pytest.raises(ValueError) as caught:
        unpack(data, REQUESTS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_line_about_a_giant_field_name_is_short():
    with pytest.raises(ValueError) as caught:
        unpack(msgpack.packb({"kind": "Status", "id": 1, "x\n" * 10_000: 1}), REQUESTS)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = sorted({name for model in REQUESTS.values() for name in model.model_fields})


@st.composite
def odd_requests(draw):
    """A frame near a real one: the right kind, and fields that are right, wrong, missing or made up."""
    kind = draw(st.sampled_from(sorted(REQUESTS)))
    names = draw(st.sets(st.sampled_from([*REQUESTS[kind].model_fields, *FIELDS]), max_size=8))
    names |= draw(st.sampled_from([set(), set(REQUESTS[kind].model_fields)]))
    likely = st.integers(0, 3) | st.just([sample().pack()] * 2) | st.just([]) | ANYTHING
    return msgpack.packb(
        {"kind": kind, "id": draw(st.integers(0, 9) | ANYTHING), **{name: draw(likely) for name in names}}
    )


HELLO = protocol.Hello(name="rollout-0", token="t", role="rollout", protocol=PROTOCOL, fingerprint="f" * 16)


@settings(max_examples=150)
@given(
    st.lists(st.binary(max_size=64) | odd_requests() | st.just(pack(1, Ask(request=1, version=0, room=2)))),
    st.sampled_from(sorted(VERBS)),
)
def test_whatever_arrives_the_buffer_goes_on(frames, role):
    it = make_requests()
    it.receive([b"fuzz", pack(1, HELLO)], 0.0, "rollout")
    for now, frame in enumerate(frames):
        it.receive([b"fuzz", frame], float(now), role)
        it.retry(float(now))
        committed(it)
    it.receive([b"fuzz"], 0.0, "rollout")
    it.receive([b"fuzz", b"", b""], 0.0, "rollout")
    it.receive(
        [b"observer", pack(1, HELLO.model_copy(update={"name": "o", "token": "u", "role": "observer"}))],
        0.0,
        "observer",
    )
    it.receive([b"observer", pack(5, Status())], 0.0, "observer")
    committed(it)
    identity, last = it.out[-1]
    number, state = unpack(last, ANSWERS)
    assert (identity, number) == (b"observer", 5)
    assert isinstance(state, State)
    assert state.errors >= 2
