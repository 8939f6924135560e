"""`benchmarks.lab.buffer_trip` counts a function once, with its comprehensions, and nothing of other people's code."""

import json

from benchmarks.lab.buffer_trip import named_function, num_files
from buffer.ledger.schedule import drawn_before, feasible


def test_a_comprehension_belongs_to_its_function() -> None:
    (inner, *_) = [code for code in drawn_before.__code__.co_consts if hasattr(code, "co_qualname")]
    assert "<" in inner.co_qualname
    assert (
        named_function(inner) == named_function(drawn_before.__code__) == ("buffer/ledger/schedule.py", "drawn_before")
    )


def test_other_peoples_code_and_the_tests_do_not_count() -> None:
    assert named_function(json.dumps.__code__) is None
    assert named_function(test_a_comprehension_belongs_to_its_function.__code__) is None


def test_files_are_counted_once() -> None:
    both = {named_function(code) for code in (drawn_before.__code__, feasible.__code__)}
    assert len(both) == 2 and num_files(both) == 1
