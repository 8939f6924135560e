"""Every number, text and list of both wires has a bound, and what is beyond it is refused or cut."""

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgpack
import pytest
from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from buffer.wire import protocol as samples
from buffer.wire.message import REPORT, TEXT_LENGTH, Message, cut, pack, unpack
from learner.weights import protocol as weights

KINDS = {
    *samples.REQUESTS.values(),
    *samples.ANSWERS.values(),
    *weights.TO_LEARNER.values(),
    *weights.TO_SERVER.values(),
    *weights.TO_FRONT.values(),
}
FREE = {"ProbeText.logprobs", "ProbeText.tolerance", "ProbeText.shift"}
"""Floats that may be infinite or NaN: the server compares them and refuses the version."""


def limits(metadata: Any) -> set[str]:
    """Names of the bounds among the metadata of an annotation: `ge`, `le`, `max_length`, `allow_inf_nan`."""
    found = set[str]()
    for one in metadata:
        for part in one.metadata if isinstance(one, FieldInfo) else [one]:
            names = {"ge", "gt", "le", "lt", "max_length", "allow_inf_nan"}
            found |= {name for name in names if getattr(part, name, None) is not None}
    return found


def unbounded(annotation: Any, metadata: Any, where: str) -> Iterator[str]:
    """Where a value of this type may be as large as its sender likes."""
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        yield from unbounded(inner, [*metadata, *more], where)
        return
    origin, bounds = get_origin(annotation), limits(metadata)
    if origin in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from unbounded(each, metadata, where)
    elif origin in (list, dict):
        if "max_length" not in bounds:
            yield where
        inner = get_args(annotation)
        for name, each in zip(("key", "value") if origin is dict else ("entry",), inner, strict=True):
            if not (each is Any or (origin is dict and inner[1] is Any)):  # a row: the message's size bounds it
                yield from unbounded(each, [], f"{where}.{name}")
    elif isinstance(annotation, type) and issubclass(annotation, Message):
        yield from fields_without_bound(annotation)
    elif annotation in (int, float, str):
        enough = {
            int: bool(bounds & {"ge", "gt"} and bounds & {"le", "lt"}),
            float: "allow_inf_nan" in bounds or where.removesuffix(".entry") in FREE,
            str: "max_length" in bounds,
        }
        if not enough[annotation]:
            yield where
    elif origin is not Literal and annotation not in (bytes, bool, type(None)):
        yield f"{where}: {annotation}"


def fields_without_bound(kind: type[Message]) -> list[str]:
    found = list[str]()
    for name, field in kind.model_fields.items():
        found += unbounded(field.annotation, field.metadata, f"{kind.__name__}.{name}")
    return found


@pytest.mark.parametrize("kind", sorted(KINDS, key=lambda kind: kind.__name__), ids=lambda kind: kind.__name__)
def test_every_field_of_a_message_has_a_bound(kind: type[Message]) -> None:
    assert fields_without_bound(kind) == []


def test_a_field_without_a_bound_is_found() -> None:
    class Inner(Message):
        texts: dict[str, list[float]]

    class Outer(Message):
        number: int
        half: Annotated[int, "no bound"]
        inner: list[Inner] | None

    names = ["Outer.number", "Outer.half", "Outer.inner", "Inner.texts", "Inner.texts.key", "Inner.texts.value"]
    assert fields_without_bound(Outer) == [*names, "Inner.texts.value.entry"]


BEAT: dict[str, Any] = {"kind": "Heartbeat", "version": 0, "holding": []}
JOIN: dict[str, Any] = {"kind": "Join", "name": "a", "protocol": 5, "workers": 1, "backend": "gloo"}
HELLO: dict[str, Any] = {
    "kind": "Hello",
    "name": "a",
    "token": "t",
    "role": "observer",
    "protocol": 9,
    "fingerprint": "",
}
KEPT: dict[str, Any] = {"kind": "Kept", "servers": {}, "wanted": 1, "least": 1, "most": 1}
BEYOND: dict[str, dict[str, Any]] = {
    "60,000 statistics in a heartbeat": BEAT | {"stats": {f"s{i}": 0.0 for i in range(60_000)}},
    "a statistic with a name of a megabyte": BEAT | {"stats": {"s" * 2**20: 0.0}},
    "a server that holds 100,000 leases": BEAT | {"holding": [0] * 100_000},
    "a name of a megabyte": HELLO | {"name": "n" * 2**20},
    "a token of a megabyte": HELLO | {"token": "n" * 2**20},
    "a protocol number beyond 64 bits": HELLO | {"protocol": 2**63},
    "an address of a megabyte": HELLO | {"serves": "n" * 2**20},
    "a known address of a megabyte": {"kind": "Where", "known": "n" * 2**20},
    "500,000 known results": {"kind": "Results", "known": [0] * 500_000},
    "a hundred thousand samples": {"kind": "Put", "item": 0, "lease": 0, "samples": [b""] * 100_000},
    "a set with a name of a megabyte": {
        "kind": "Evaluated",
        "due": 0,
        "version": 0,
        "sets": {"s" * 2**20: {"figures": {}}},
    },
    "20,000 sets": {
        "kind": "Evaluated",
        "due": 0,
        "version": 0,
        "sets": {f"s{i}": {"figures": {}} for i in range(20_000)},
    },
    "20,000 examples": {
        "kind": "Evaluated",
        "due": 0,
        "version": 0,
        "sets": {"s": {"figures": {}, "examples": [{}] * 20_000}},
    },
    "20,000 kept servers": KEPT | {"servers": {f"r{i}": "started" for i in range(20_000)}},
    "100,000 servers that left": KEPT | {"left": ["r"] * 100_000},
    "room for 2**63 groups": {"kind": "Ask", "request": 0, "version": 0, "room": 2**63},
}


@pytest.mark.parametrize("what", BEYOND)
def test_what_is_beyond_its_bound_is_refused_in_one_line(what: str) -> None:
    with pytest.raises(ValueError, match=r"^\w+\.") as refused:
        unpack(msgpack.packb({"id": 1, **BEYOND[what]}), samples.REQUESTS)
    assert len(str(refused.value)) < 400 and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "field", [{"workers": 2_000_000}, {"name": "n" * 2**20}, {"session": "n" * 2**20}, {"version": -2}]
)
def test_a_join_beyond_its_bounds_is_refused_in_one_line(field: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^Join\.") as refused:
        weights.unpack(msgpack.packb(JOIN | field), weights.TO_LEARNER)
    assert len(str(refused.value)) < 400


def test_a_long_explanation_is_cut_and_ends_nobody() -> None:
    fail = samples.Fail(item=0, lease=0, reason="why " * 2**20)
    assert len(fail.reason) == TEXT_LENGTH and fail.reason.endswith("...")
    failed = weights.Failed(round=0, reason="why " * 2**20)
    assert len(failed.reason) == TEXT_LENGTH
    finished = samples.Finished(outcome="failed", why="line\n" * 2**20)
    assert len(finished.why) == REPORT
    assert unpack(pack(1, fail), samples.REQUESTS) == (1, fail)
    assert cut("abcd", 4) == "abcd" and cut("abcde", 4) == "a..." and cut(b"abcde", 4) == b"abcde"


def test_a_text_that_is_none_is_refused_and_not_cut() -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(samples.Text).validate_python(b"bytes" * 2000, strict=True)


def test_half_a_surrogate_pair_in_an_explanation_ends_nobody() -> None:
    """Users' code and policies write texts that UTF-8 cannot hold."""
    fail = samples.Fail(item=0, lease=0, reason="bad \ud83d")
    assert fail.reason == "bad \\ud83d" and unpack(pack(1, fail), samples.REQUESTS) == (1, fail)
    assert weights.Failed(round=0, reason="\ud83d").reason == "\\ud83d"
    assert samples.Finished(outcome="failed", why="\ud83d").why == "\\ud83d"
    result = samples.SetResult(figures={}, reasons=["\ud83d"], examples=[{"answer": "\ud83d"}])
    assert pack(1, samples.Evaluated(due=0, version=0, sets={"toy": result}))
