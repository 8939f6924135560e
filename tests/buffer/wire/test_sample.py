"""What is read off an arriving sample: by the short way exactly what `Sample` says, nothing that it would refuse."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.types import SampleStats
from buffer.wire import sample as parsing
from buffer.wire.sample import Sample, sample_stats
from tests.harness.buffer_process import sample

PATHS = [(name,) for name in Sample.model_fields] + [
    (name, part) for name in Sample.DTYPES for part in ("dtype", "shape", "data")
]
VALUES: list[Any] = [None, True, 1, 1.0, -1, 2**70, "int32", "stop", b"", b"\1\0\2\0", [4], [4.0], [True], [-4], [4, 1],
                     [], {}, {"a": 1.0}, {"a": 1}, {1: 1.0}, float("nan"), float("inf")]  # fmt: skip


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
        if expected.versions.numpy()[expected.sampled.numpy() != 0].min() < 0:
            raise ValueError("a token of no version")
    except ValueError:
        with pytest.raises(ValueError) as caught:
            sample_stats(data)
        assert "\n" not in str(caught.value)
        return
    read = sample_stats(data)
    assert read.tokens == expected.tokens.shape[0] and read.reward == expected.reward
    assert read.sampled == np.count_nonzero(expected.sampled.numpy())


def test_facts_and_that_the_usual_sample_takes_the_short_way():
    data = sample(reward=0.25, tokens=6).pack()
    assert sample_stats(data) == SampleStats(6, 3, 0.25, False)
    for tokens in (2, 127, 128, 255, 256, 65_535, 65_536, 70_000):
        data = sample(tokens=tokens).pack()
        assert parsing._parse_fast(data) == parsing._parse_checked(data) == sample_stats(data)


def test_a_number_of_tokens_that_cannot_be_costs_nothing():
    data = sample(tokens=70_000).pack()
    lies = data[: parsing.NUM_TOKENS_AT + 1] + b"\xff\xff\xff\xff" + data[parsing.NUM_TOKENS_AT + 5 :]
    assert data[parsing.NUM_TOKENS_AT] == 0xCE and parsing._num_tokens(lies) == 0
    with pytest.raises(ValueError):
        sample_stats(lies)


def test_a_sample_that_leaves_out_what_may_be_left_out_is_taken():
    fields = sample(tokens=6).model_dump()
    del fields["answer"], fields["metrics"]
    fields["sampled"]["data"] = b"\0\0\0\7\1\1"
    fields["reward"] = 1
    assert sample_stats(msgpack.packb(fields)) == SampleStats(6, 3, 1.0, False)


def test_a_sampled_token_has_a_version():
    fields = sample(version=-1).model_dump()
    with pytest.raises(ValueError, match="policy version"):
        sample_stats(msgpack.packb(fields))
