"""A sample's teacher: its log-probabilities travel once, and what cannot be is refused by the short way as by the long
one."""

from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.wire import sample as parsing
from buffer.wire.message import Array
from buffer.wire.sample import Sample, sample_stats
from buffer.wire.values import ANY, Bounds, WrongValue
from tests.harness.buffer_process import sample

ONE, ALL, NO = (
    Bounds(teachers=frozenset({"math"})),
    Bounds(teachers=frozenset({"", "math"})),
    Bounds(teachers=frozenset()),
)


def taught(values: list[float], name: str = "math", dtype: str = "float32", **fields: Any) -> bytes:
    """A sample of 6 tokens, of which the last 3 were sampled."""
    array = Array.of(np.array(values, dtype)).model_dump()
    return bytes(msgpack.packb(sample(tokens=6).model_dump() | {"teacher": name, "teacher_logprobs": array} | fields))


GOOD = [0.0, 0.0, 0.0, -0.25, -7.5, 0.0]


def test_a_taught_sample_takes_the_short_way_and_keeps_its_bytes() -> None:
    data = taught(GOOD)
    made = Sample.unpack(data)
    assert made.pack() == data and made.teacher == "math"
    assert made.teacher_logprobs is not None and made.teacher_logprobs.numpy().tolist() == GOOD
    expected = sample_stats(sample(tokens=6).pack())
    assert parsing._parse_fast([data], ONE) == [parsing._parse_checked(data, ONE)] == [expected]


@pytest.mark.parametrize(
    ("data", "bounds", "words"),
    [
        (
            taught([0, 0, 0, -0.25, float("nan"), 0]),
            ANY,
            "teacher_logprobs: nan at token 4; that of a sampled token is",
        ),
        (taught([0, 0, 0, -0.25, float("-inf"), 0]), ANY, "teacher_logprobs: -inf at token 4"),
        (taught([0, 0, 0, -0.25, -9999.0, 0]), ANY, "teacher_logprobs: -9999.0 at token 4"),
        (taught([0, 0, 0, 0.5, 0, 0]), ANY, "teacher_logprobs: 0.5 at token 3"),
        (taught([0, -1, 0, 0, 0, 0]), ANY, "teacher_logprobs: -1.0 at token 1; that of a token that was given is 0"),
        (taught(GOOD[1:]), ANY, r"teacher_logprobs must be float32[6], one-dimensional; is float32[5]"),
        (taught(GOOD, dtype="float64"), ANY, "teacher_logprobs"),
        (taught(GOOD, "code"), ONE, "teacher: 'code'; the run has 'math'"),
        (taught(GOOD, ""), ONE, "teacher: ''; the run has 'math'"),
        (taught(GOOD), NO, "teacher: 'math'; the run has none"),
        (taught(GOOD, teacher=3), ANY, "teacher.name: 3; Input should be a valid string"),
        (taught(GOOD, teacher_logprobs=None), ANY, "teacher is 'math', but there are no teacher_logprobs"),
        (sample(tokens=6).pack(), ALL, "teacher_logprobs: there are none; every row of this run has a teacher"),
    ],
)
def test_what_no_teacher_can_have_given_is_refused_in_one_line(data: bytes, bounds: Bounds, words: str) -> None:
    with pytest.raises(WrongValue) as caught:
        sample_stats(data, bounds)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_rows_of_no_teacher_are_taken_where_not_every_row_has_one() -> None:
    plain = sample(tokens=6).pack()
    for bounds in (ANY, ONE, NO):
        assert parsing._parse_fast([plain], bounds) is not None
    assert parsing._parse_fast([taught(GOOD), taught(GOOD, "")], ALL) is not None
    assert parsing._parse_fast([plain, taught(GOOD)], ONE) == [sample_stats(plain)] * 2
    assert parsing._parse_fast([plain, taught(GOOD)], ALL) is None


VALUES = st.sampled_from([0.0, -0.0, -0.5, -1000.0, -1000.5, 5e-4, 2e-3, float("nan"), float("inf"), float("-inf")])


@given(
    st.lists(VALUES, min_size=4, max_size=8), st.sampled_from(["", "math", "x"]), st.sampled_from([ANY, ONE, ALL, NO])
)
def test_the_short_way_takes_nothing_that_the_long_way_refuses(values: list[float], name: str, bounds: Bounds) -> None:
    data = taught(values, name)
    try:
        expected = parsing._parse_checked(data, bounds)
    except WrongValue:
        assert parsing._parse_fast([data], bounds) is None
        return
    assert sample_stats(data, bounds) == expected and parsing._parse_fast([data], bounds) in (None, [expected])


def test_a_sample_of_a_file_from_before_teachers_is_read() -> None:
    fields = sample(tokens=6).model_dump()
    assert fields.pop("teacher") == "" and fields.pop("teacher_logprobs") is None
    data = bytes(msgpack.packb(fields))
    assert sample_stats(data, NO) == sample_stats(sample(tokens=6).pack()) and Sample.unpack(data) == sample(tokens=6)


IDS, TOP = [[7, 3], [2, 9], [0, 11]], [[-0.1, -2.5], [-0.7, -0.7], [-0.2, -1000.0]]
VOCABULARY = 12
OF_TWO = Bounds(VOCABULARY, teachers=frozenset({"math"}), top_k=2)


def topped(ids: list[list[int]] = IDS, logprobs: list[list[float]] = TOP, name: str = "math", **fields: Any) -> bytes:
    """The same with two most probable tokens in place of each sampled one."""
    columns = {"ids": np.array(ids, np.int32), "logprobs": np.array(logprobs, np.float32)}
    top = {"name": name, **{column: Array.of(array).model_dump() for column, array in columns.items()}}
    return taught(GOOD, teacher=top | fields)


def test_most_probable_tokens_travel_with_their_teacher_and_keep_their_bytes() -> None:
    data = topped()
    made = Sample.unpack(data)
    assert made.pack() == data and made.teacher_name == "math" and made.teacher_top is not None
    assert made.teacher_top.ids.numpy().tolist() == IDS
    assert sample_stats(data, OF_TWO) == sample_stats(data) == sample_stats(taught(GOOD))


@pytest.mark.parametrize(
    ("data", "bounds", "words"),
    [
        (taught(GOOD), OF_TWO, "teacher: 0 tokens in place of each sampled one; teacher.top_k is 2"),
        (topped(), ONE, "teacher: 2 tokens in place of each sampled one; teacher.top_k is None"),
        (topped([[1], [1], [1]], [[-1]] * 3), OF_TWO, "teacher: 1 tokens in place of each sampled one"),
        (topped(IDS[:2], TOP[:2]), ANY, "teacher.ids are of 2 tokens, and 3 were sampled"),
        (topped(IDS, TOP[:2]), ANY, "logprobs must be float32[3, 2]; is float32[2, 2]"),
        (topped([[]] * 3, [[]] * 3), ANY, "ids must be int32 [sampled tokens, 1 to 64]"),
        (topped([[7, 7], *IDS[1:]]), OF_TWO, "teacher.ids: 7 at token 0; the tokens in one place are all different"),
        (topped([[7, VOCABULARY], *IDS[1:]]), OF_TWO, "teacher.ids: 12 at token 1; a token is 0 to 11"),
        (topped([[7, -1], *IDS[1:]]), OF_TWO, "teacher.ids: -1 at token 1"),
        (topped(IDS, [[-0.1, float("nan")], *TOP[1:]]), OF_TWO, "teacher.logprobs: nan at token 1; a log-probability"),
        (topped(IDS, [[-0.1, 0.5], *TOP[1:]]), OF_TWO, "teacher.logprobs: 0.5 at token 1"),
        (topped(IDS, [[-0.1, -0.1], *TOP[1:]]), OF_TWO, "the probabilities in one place sum to 1 at most"),
        (topped(name="code"), OF_TWO, "teacher: 'code'; the run has 'math'"),
        (topped(extra=1), ANY, "teacher.top.extra: "),
    ],
)
def test_tokens_that_no_teacher_can_have_given_are_refused_in_one_line(data: bytes, bounds: Bounds, words: str) -> None:
    with pytest.raises(WrongValue) as caught:
        sample_stats(data, bounds)
    assert words in str(caught.value) and "\n" not in str(caught.value) and caught.value.kind == "engine"
