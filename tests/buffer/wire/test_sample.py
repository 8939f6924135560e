"""What is read off an arriving sample: by the short way exactly what `Sample` says, nothing that it would refuse."""

from itertools import groupby, pairwise
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.types import SampleStats
from buffer.wire import sample as parsing
from buffer.wire.message import Array
from buffer.wire.sample import AnySample, PlainSample, Sample, judge_all, sample_stats, unpack_all
from buffer.wire.values import Bounds, WrongValue
from tests.harness.buffer_process import sample

PATHS = [(name,) for name in Sample.model_fields] + [
    (name, part) for name in Sample.DTYPES for part in ("dtype", "shape", "data")
]
VALUES: list[Any] = [None, True, 1, 1.0, -1, 2**70, "int32", "stop", b"", b"\1\0\2\0", [4], [4.0], [True], [-4], [4, 1],
                     [0], [False], [0.0], [0, 2], [1], [1.0], [], {}, {"a": 1.0}, {"a": 1}, {1: 1.0}, float("nan"),
                     float("inf")]  # fmt: skip


def changed(path: tuple[str, ...], value: Any) -> bytes:
    fields = sample().model_dump()
    inner = fields
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = value
    try:
        return bytes(msgpack.packb(fields))
    except OverflowError:
        return b""


@given(st.sampled_from(PATHS), st.sampled_from(VALUES))
def test_what_is_taken_by_the_short_way_is_a_sample(path, value):
    data = changed(path, value)
    try:
        expected = Sample.unpack(data)
        sampled, versions = expected.sampled.numpy() != 0, expected.versions.numpy()
        if ((versions >= 0) != sampled).any() or versions.min() < -1 or expected.tokens.numpy().min() < 0:
            raise ValueError("a token of no version, or one that was given of some; or no token")
        logprobs = expected.behaviour_logprobs.numpy()
        if not ((logprobs >= -1000) & (logprobs <= 1e-3) & (sampled | (logprobs == 0))).all():
            raise ValueError("no log-probability")
    except ValueError:
        with pytest.raises(ValueError) as caught:
            sample_stats(data)
        assert "\n" not in str(caught.value)
        return
    read = sample_stats(data)
    assert read.tokens == expected.tokens.shape[0] and read.reward == expected.reward
    assert read.sampled == np.count_nonzero(expected.sampled.numpy())


def trained(one: AnySample) -> list[Any]:
    segments = [*one.starts], one.bounds, [*one.turn_rewards]
    return [one.columns, one.num_tokens, one.reward, *segments, one.routes, one.teacher_logprobs]


def same_as_one_by_one(data: bytes) -> None:
    good = sample().pack()
    try:
        expected = Sample.unpack(data)
    except ValueError as error:
        with pytest.raises(ValueError) as caught:
            unpack_all([good, data, good])
        assert str(caught.value) == str(error)
        return
    assert list(map(trained, unpack_all([good, data]))) == [trained(Sample.unpack(good)), trained(expected)]


@given(st.sampled_from(PATHS), st.sampled_from(VALUES))
def test_samples_are_unpacked_together_as_one_by_one(path, value):
    same_as_one_by_one(changed(path, value))


@pytest.mark.parametrize("flags", [b"\0\0\1\1", b"\0\1\0\1", b"\0\0\2\1", b"\0\1\1\2", b"\0\0\0\0", b"\1\0\1\1"])
def test_flags_are_unpacked_together_as_one_by_one(flags):
    fields = sample(tokens=4).model_dump()
    fields["sampled"]["data"] = flags
    same_as_one_by_one(msgpack.packb(fields))


def test_the_usual_sample_is_unpacked_as_a_plain_one():
    plain, routes = unpack_all([sample(tokens=6).pack(), msgpack.packb(routed())])
    assert isinstance(plain, PlainSample) and isinstance(routes, Sample)


def test_samples_are_judged_together_as_one_by_one():
    """Wrong ones in the middle of sound ones, and one with routes, which is judged by itself."""
    good, bounds = sample(tokens=6).pack(), Bounds(vocabulary=64)
    finish = msgpack.packb(sample(tokens=6).model_dump() | {"finish": "other"})
    wrong = changed(("tokens", "data"), np.full(sample().tokens.shape, 99, "<i4").tobytes())
    samples = [good] * 90
    samples[20] = samples[40] = wrong
    samples[41], samples[89], samples[3] = finish, good[:-1], msgpack.packb(routed())
    found = list(judge_all(samples, bounds))
    assert [place for place, one in enumerate(found) if isinstance(one, WrongValue)] == [20, 40, 41, 89]
    for data, one in zip(samples, found, strict=True):
        try:
            assert one == sample_stats(data, bounds)
        except WrongValue as fault:
            assert str(one) == str(fault)


def test_facts_and_that_the_usual_sample_takes_the_short_way():
    data = sample(reward=0.25, tokens=6).pack()
    assert sample_stats(data) == SampleStats(6, 3, 0.25, False)
    for tokens in (2, 127, 128, 255, 256, 65_535, 65_536, 70_000):
        data = sample(tokens=tokens).pack()
        assert parsing._parse_fast([data]) == [parsing._parse_checked(data)] == [sample_stats(data)]


def test_a_number_of_tokens_that_cannot_be_costs_nothing():
    data = sample(tokens=70_000).pack()
    lies = data[: parsing.NUM_TOKENS_AT + 1] + b"\xff\xff\xff\xff" + data[parsing.NUM_TOKENS_AT + 5 :]
    made = parsing._layout.cache_info().misses
    assert data[parsing.NUM_TOKENS_AT] == 0xCE and parsing._places(lies) is None
    assert parsing._layout.cache_info().misses == made
    with pytest.raises(ValueError):
        sample_stats(lies)


def test_a_sample_that_leaves_out_what_may_be_left_out_is_taken():
    fields = sample(tokens=6).model_dump()
    del fields["answer"], fields["metrics"]
    fields["reward"] = 1
    assert sample_stats(msgpack.packb(fields)) == SampleStats(6, 3, 1.0, False)


def test_a_sampled_token_has_a_version():
    fields = sample(version=-1).model_dump()
    with pytest.raises(ValueError, match="policy version"):
        sample_stats(msgpack.packb(fields))


def segmented(sampled: list[int], starts: list[int], turn_rewards: list[float], reward: float) -> bytes:
    """The bytes of a sample with these fields, whether it may have them or not."""
    chosen = np.array(sampled, np.uint8)
    fields = sample(reward, tokens=len(sampled)).model_dump()
    fields["sampled"]["data"] = chosen.tobytes()
    fields["versions"]["data"] = np.where(chosen, 3, -1).astype("<i4").tobytes()
    fields["behaviour_logprobs"]["data"] = np.where(chosen, -0.5, 0).astype("<f4").tobytes()
    return bytes(msgpack.packb(fields | {"starts": starts, "turn_rewards": turn_rewards}))


def may_be(sampled: list[int], starts: list[int], turn_rewards: list[float], reward: float) -> bool:
    """The rules of `Sample.starts` and `Sample.turn_rewards`, token by token."""
    size = len(sampled)
    if not starts or starts[0] or starts != sorted(set(starts)) or starts[-1] >= size:
        return False
    segments = [sampled[start:stop] for start, stop in pairwise([*starts, size])]
    if any(segment[0] or 1 not in segment for segment in segments):
        return False
    turns = sum(own for segment in segments for own, _ in groupby(segment))
    return not turn_rewards or (len(turn_rewards) == turns and abs(sum(turn_rewards) - reward) < 1e-6)


FLAGS = st.lists(st.integers(0, 1), min_size=2, max_size=12)


@given(FLAGS, st.lists(st.integers(0, 12), max_size=3), st.integers(0, 5), st.sampled_from([0.0, 0.5]), st.booleans())
def test_segments_and_rewards_of_turns(sampled, later, rewards, off, sensible):
    """What is refused is what the rules refuse; facts of the rest are counted token by token."""
    starts = [0, *later]
    if sensible:  # else nearly all of them are refused
        pieces = [[0, *sampled, 1], [0, 1, 0, 1], [0, 0, 1]][: 1 + len(later)]
        sampled, starts = [flag for piece in pieces for flag in piece], np.cumsum([0, *map(len, pieces[:-1])]).tolist()
        rewards = sum(own for piece in pieces for own, _ in groupby(piece)) if rewards else 0
    values = [0.25 * turn for turn in range(rewards)]
    data = segmented(sampled, starts, values, sum(values) + off)
    if may_be(sampled, starts, values, sum(values) + off):
        stats, unpacked = sample_stats(data), Sample.unpack(data)
        assert (stats.sampled, stats.prompt) == (sum(sampled), sampled.index(1))
        assert unpacked.starts == starts and unpacked.turn_rewards == values
        assert [stop - start for start, stop in unpacked.bounds] == np.diff([*starts, len(sampled)]).tolist()
        assert sample_stats(unpacked.pack()) == stats
    else:
        with pytest.raises(ValueError) as caught:
            sample_stats(data)
        assert "\n" not in str(caught.value) and not (sensible and not off)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (([0, 1], [], [], 0.0), "begin with 0 and rise within the 2 tokens"),
        (([0, 1, 0, 1], [0, 2, 2], [], 0.0), r"starts \[0, 2, 2\]"),
        (([0, 1, 1, 0], [0, 2], [], 0.0), "segment 1 at token 2 begins with a sampled token"),
        (([0, 1, 0, 0], [0, 2], [], 0.0), "segment 1 at token 2 has no sampled token"),
        (([0, 1, 0, 1], [0, 2], [1.0], 1.0), "1 turn_rewards for 2 turns"),
        (([0, 1, 0, 1], [0, 2], [1.0, 0.5], 1.0), "turn_rewards sum to 1.5, and reward is 1"),
        (([0, 1, 0, 1], [0, 2], [1e308, 1e308], 1.0), "turn_rewards sum to inf"),
        (([1, 1], [0], [], 0.0), "segment 0 at token 0 begins with a sampled token"),
    ],
)
def test_what_is_wrong_with_segments_is_told(fields, words):
    with pytest.raises(ValueError, match=words):
        sample_stats(segmented(*fields))


def test_a_sum_may_be_rounded():
    rewards = [0.1] * 10
    assert sample_stats(segmented([0, 1] * 10, [0], rewards, 1.0)).reward == 1.0
    assert sample_stats(segmented([0, 1] * 10, [0], [1e5 / 3] * 10, 1e6 / 3)).sampled == 10


def routed(dtype: str = "uint8", shape: tuple[int, ...] = (6, 3, 2)) -> dict[str, Any]:
    """A sample of 6 tokens with these routes, valid or not."""
    routes = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    return sample(tokens=6).model_dump() | {"routes": Array.of(routes).model_dump()}


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_arrive_as_they_were_sent(dtype):
    data = bytes(msgpack.packb(routed(dtype)))
    assert sample_stats(data) == sample_stats(sample(tokens=6).pack())
    read = Sample.unpack(data)
    assert read.routes is not None and read.pack() == data
    assert read.routes.numpy().dtype == dtype
    assert read.routes.numpy().tolist() == np.arange(36).reshape(6, 3, 2).tolist()
    assert Sample.unpack(sample(tokens=6).pack()).routes is None


@pytest.mark.parametrize(
    ("dtype", "shape", "words"),
    [
        ("int32", (6, 3, 2), r"is int32\[6, 3, 2\]"),
        ("uint8", (5, 3, 2), r"must be uint8 or uint16 \[6 tokens, layers, k\]; is uint8\[5, 3, 2\]"),
        ("uint8", (7, 3, 2), r"is uint8\[7, 3, 2\]"),
        ("uint8", (6, 6), r"is uint8\[6, 6\]"),
        ("uint8", (6, 0, 2), r"is uint8\[6, 0, 2\]"),
    ],
)
def test_what_are_no_routes_of_a_sample_is_told(dtype, shape, words):
    with pytest.raises(ValueError, match=words):
        sample_stats(msgpack.packb(routed(dtype, shape)))


def test_only_samples_without_routes_take_the_short_way():
    assert parsing._parse_fast([msgpack.packb(routed())]) is None
    assert parsing._parse_fast([sample(tokens=6).pack()]) is not None


def test_a_sample_from_before_there_were_routes_is_read_from_a_file_of_then():
    new = sample(tokens=6)
    fields = new.model_dump()
    assert fields.pop("routes") is None
    data = bytes(msgpack.packb(fields))
    assert parsing._parse_fast([data]) is None and sample_stats(data) == sample_stats(new.pack())
    assert Sample.unpack(data) == new
