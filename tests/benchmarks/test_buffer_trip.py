"""`benchmarks.lab.buffer_trip` counts a function once, with its comprehensions, and nothing of other people's code."""

import asyncio
import json

from benchmarks.lab.buffer_trip import BY_THE_CLOCK, named_function, num_files, runs_by_the_clock
from buffer.ledger.schedule import drawn_before, order
from buffer.wire.sample import Sample
from buffer.wire.server import BufferServer


def test_a_comprehension_belongs_to_its_function() -> None:
    (inner, *_) = [code for code in drawn_before.__code__.co_consts if hasattr(code, "co_qualname")]
    assert "<" in inner.co_qualname
    assert (
        named_function(inner) == named_function(drawn_before.__code__) == ("buffer/ledger/schedule.py", "drawn_before")
    )


def test_a_default_of_a_field_is_no_function_to_visit() -> None:
    (default,) = [field.default_factory for name, field in Sample.model_fields.items() if name == "starts"]
    assert default.__code__.co_qualname == "Sample.<lambda>"
    assert named_function(default.__code__) is None


def test_what_runs_by_the_clock_is_known_by_its_task() -> None:
    assert BufferServer._watch_strangers.__qualname__ == BY_THE_CLOCK

    async def looks() -> bool:
        return runs_by_the_clock()

    async def both() -> list[bool]:
        before = await asyncio.create_task(looks())
        looks.__qualname__ = BY_THE_CLOCK
        return [before, await asyncio.create_task(looks()), await asyncio.to_thread(runs_by_the_clock)]

    assert asyncio.run(both()) == [False, True, False]


def test_other_peoples_code_and_the_tests_do_not_count() -> None:
    assert named_function(json.dumps.__code__) is None
    assert named_function(test_a_comprehension_belongs_to_its_function.__code__) is None


def test_files_are_counted_once() -> None:
    both = {named_function(code) for code in (drawn_before.__code__, order.__code__)}
    assert len(both) == 2 and num_files(both) == 1
