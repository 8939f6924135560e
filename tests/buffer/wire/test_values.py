"""Values that cannot be: found in the short way as in the long one, refused at Put in one sentence, and what becomes of
the attempt and of its server."""

import json
from dataclasses import astuple
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger.types import SampleStats
from buffer.wire import sample as parsing
from buffer.wire.message import Array
from buffer.wire.protocol import Put, State, Status, Stored
from buffer.wire.sample import sample_stats, stats_of
from buffer.wire.values import Bounds, WrongValue
from configs.schema import ModelConfig
from tests.harness.buffer_process import buffer, client, group, in_loop, make_requests, rollout, sample

VOCABULARY = 50
BOUNDS = Bounds(VOCABULARY, experts=8, routed=(3, 2), placeholder=40)
DTYPES = {"tokens": "<i4", "sampled": "u1", "behaviour_logprobs": "<f4", "versions": "<i4"}
NAN, INF = float("nan"), float("inf")


def packed(places: dict[str, dict[int, float]] | None = None, number: int = 6, **fields: Any) -> bytes:
    """A sample of 6 tokens, of which the last 3 were sampled, with other values at some places of its arrays."""
    made = sample(tokens=number).model_dump() | fields
    for name, values in (places or {}).items():
        array = np.frombuffer(made[name]["data"], DTYPES[name]).copy()
        for place, value in values.items():
            array[place] = value
        made[name]["data"] = array.tobytes()
    return bytes(msgpack.packb(made))


def routes(*shape: int, value: int = 0) -> dict[str, Any]:
    return Array.of(np.full(shape, value, np.uint8)).model_dump()


def image(start: int) -> dict[str, Any]:
    return {"start": start, "digest": "0" * 64, "data": b"file"}


WRONG = [
    ({"tokens": {4: -5}}, {}, "engine", "tokens: -5 at token 4; a token is 0 to 49"),
    ({"tokens": {5: 1_000_000}}, {}, "engine", "tokens: 1000000 at token 5; a token is 0 to 49"),
    ({"tokens": {0: 50}}, {}, "engine", "tokens: 50 at token 0"),
    ({"behaviour_logprobs": {4: NAN}}, {}, "engine", "behaviour_logprobs: nan at token 4"),
    ({"behaviour_logprobs": {4: 5}}, {}, "engine", "behaviour_logprobs: 5.0 at token 4"),
    ({"behaviour_logprobs": {4: -INF}}, {}, "engine", "behaviour_logprobs: -inf at token 4"),
    ({"behaviour_logprobs": {4: -1e30}}, {}, "engine", "behaviour_logprobs: -1"),
    ({"behaviour_logprobs": {0: -0.5}}, {}, "engine", "behaviour_logprobs: -0.5 at token 0; that of a token that was"),
    ({"versions": {4: -2}}, {}, "engine", "versions: -2 at token 4; a sampled token has"),
    ({"versions": {0: 0}}, {}, "engine", "versions: 0 at token 0; a token that was given has version -1"),
    ({"versions": {0: -7}}, {}, "engine", "versions: -7 at token 0"),
    ({"sampled": {4: 3}}, {}, "engine", "sampled is 3 at token 4"),
    ({"sampled": {4: 0}}, {}, "engine", "behaviour_logprobs: -0.5 at token 4"),
    ({}, {"reward": INF}, "reward", "reward: inf; Input should be a finite number"),
    ({}, {"reward": NAN}, "reward", "reward: nan"),
    ({}, {"reward": -1e9}, "reward", "reward: -1e+09; a reward is -1e+06 to 1e+06"),
    ({}, {"reward": 1e7, "turn_rewards": [1e7]}, "reward", "reward: 1e+07"),
    ({}, {"metrics": {"a": NAN}}, "reward", "metrics.a: nan; Input should be a finite number"),
    ({}, {"metrics": {"a": -INF}}, "reward", "metrics.a: -inf"),
    ({}, {"routes": routes(6, 3, 2, value=8)}, "engine", "routes: 8 at token 0; an expert is 0 to 7"),
    ({}, {"routes": routes(6, 2, 2)}, "engine", "routes: 2 layers with 2 experts for each token; the model has 3"),
    ({}, {"routes": routes(5, 3, 2)}, "engine", "routes must be"),
    ({"tokens": {1: 40}}, {}, "task", "images: the placeholder at token 1 has no image"),
    ({}, {"images": [image(1)]}, "task", "images: image 0 begins at token 1, which is no placeholder"),
    ({"tokens": {0: 40, 2: 40}}, {"images": [image(0)]}, "task", "images: the placeholder at token 2 is apart from"),
    ({}, {"starts": [0, 9]}, "task", "starts [0, 9]: they begin with 0"),
    ({}, {"tokens": 7}, "engine", "tokens: 7; Input should be"),
]  # fmt: skip


@pytest.mark.parametrize(("places", "fields", "kind", "words"), WRONG)
def test_what_cannot_be_is_named_with_its_field_and_value(places: Any, fields: Any, kind: str, words: str) -> None:
    with pytest.raises(WrongValue) as caught:
        sample_stats(packed(places, **fields), BOUNDS)
    assert str(caught.value).startswith(words) and "\n" not in str(caught.value) and caught.value.kind == kind
    assert sample_stats(packed(), BOUNDS).tokens == 6


@pytest.mark.parametrize(
    ("starts", "images", "words"),
    [
        ([0, 3], [2, 3], ""),
        ([0, 3], [2], "images: image 0 at token 2 goes on in the segment that begins at 3"),
        ([0], [2], ""),
        ([0], [3], "images: the placeholder at token 2 has no image"),
    ],
)
def test_an_image_ends_with_its_segment(starts: list[int], images: list[int], words: str) -> None:
    flags = np.array([0, 1, 0, 0, 1], np.uint8)
    made = sample(tokens=5).model_dump() | {"starts": starts, "images": [image(start) for start in images]}
    made["sampled"]["data"] = flags.tobytes()
    made["tokens"]["data"] = np.array([1, 2, 40, 40, 3], "<i4").tobytes()
    made["behaviour_logprobs"]["data"] = np.where(flags, -1, 0).astype("<f4").tobytes()
    made["versions"]["data"] = np.where(flags, 0, -1).astype("<i4").tobytes()
    if not words:
        assert sample_stats(bytes(msgpack.packb(made)), BOUNDS).sampled == 2
        return
    with pytest.raises(WrongValue, match=words):
        sample_stats(bytes(msgpack.packb(made)), BOUNDS)


def test_a_sample_without_routes_is_refused_where_they_are_replayed() -> None:
    with pytest.raises(WrongValue, match=r"routes: there are none; the server must run .* rollout\.routing_replay"):
        sample_stats(packed(), Bounds(replayed=True))


PLACES = st.dictionaries(st.integers(0, 5), st.sampled_from([0, 1, -1, 40, 49, 50, -5, 2**31 - 1]), max_size=2)
FLOATS = st.dictionaries(st.integers(0, 5), st.sampled_from([0.0, -0.0, -1.0, 5e-4, 0.1, NAN, -NAN, INF, -INF, -999.0]))


COLUMNS = st.fixed_dictionaries(
    {
        "tokens": PLACES,
        "behaviour_logprobs": FLOATS,
        "versions": PLACES,
        "sampled": st.dictionaries(st.integers(0, 5), st.integers(0, 2), max_size=2),
    }
)


def known(stats: SampleStats) -> tuple[Any, ...]:
    """All fields, those that `==` leaves out too."""
    return astuple(stats)


@given(COLUMNS)
def test_the_short_way_takes_nothing_that_the_long_way_refuses(places: Any) -> None:
    data = packed(places)
    read = parsing._parse_fast([data], BOUNDS)
    if read is not None:
        assert known(parsing._parse_checked(data, BOUNDS)) == known(read[0])


@given(st.lists(st.tuples(st.one_of(st.just({}), COLUMNS), st.integers(6, 9)), min_size=1, max_size=5))
def test_the_columns_of_a_group_are_judged_as_those_of_each_sample(drawn: Any) -> None:
    samples = [packed(places, number) for places, number in drawn]
    alone = [parsing._parse_fast([data], BOUNDS) for data in samples]
    together = parsing._parse_fast(samples, BOUNDS)
    if any(found is None for found in alone):
        assert together is None
    else:
        assert together and [known(one) for one in together] == [known(found[0]) for found in alone if found]
        assert [known(one) for one in stats_of(0, samples, BOUNDS)] == [known(one) for one in together]


def test_the_bounds_of_a_model_are_read_off_its_config(tmp_path: Path) -> None:
    assert Bounds.of_model(ModelConfig(path="some/hub-name")) == Bounds()
    config = {"model_type": "qwen3_moe", "vocab_size": 99, "num_experts": 8, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 3, "mlp_only_layers": [0]}))
    assert Bounds.of_model(ModelConfig(path=str(tmp_path)), True) == Bounds(99, 8, (2, 2), None, True)
    seeing = {"model_type": "qwen3_vl", "text_config": {"vocab_size": 77}, "vision_config": {}, "image_token_id": 5}
    (tmp_path / "config.json").write_text(json.dumps(seeing | {"vision_config": {"patch_size": 14}}))
    assert Bounds.of_model(ModelConfig(path=str(tmp_path))) == Bounds(77, placeholder=5)


@in_loop
async def test_a_group_that_cannot_be_trained_is_a_failed_attempt_and_its_server_goes_on() -> None:
    requests = make_requests(bounds=BOUNDS, attempts=2)
    async with buffer(requests) as it, rollout(it.address) as server:
        for attempt, (places, fields, kind, words) in enumerate((WRONG[1], WRONG[15])):
            (item,) = await server.ask(1) or []
            assert item.item == 0
            put = Put(item=0, lease=item.lease, samples=[packed(), packed(places, **fields)])
            answer = await server.client.expect(put, Stored)
            assert not answer.accepted and answer.unfit and answer.reason.startswith(f"item 0, sample 1: {words}")
            again = await server.client.expect(put, Stored)
            assert (again.accepted, again.unfit) == (False, True), "a repetition changes nothing"
            failed = requests.handlers.ledger.view.failed()
            assert len(failed) == attempt + 1 and list(failed)[-1].startswith(f"{kind}: item 0, sample 1: {words}")
        assert requests.handlers.ledger.view.counts()["dropped"] == 1, "after its attempts, as for any failure"
        (item,) = await server.ask(1) or []
        assert (await server.put(item, group(item.item))).accepted
        async with client(it.address, "status", "observer", fingerprint="") as observer:
            state = await observer.expect(Status(), State)
        assert state.errors == 0 and sum(state.failed.values()) == 2


@in_loop
async def test_versions_of_the_future_are_a_failed_attempt() -> None:
    requests = make_requests()
    async with buffer(requests) as it, rollout(it.address) as server:
        (item,) = await server.ask(1) or []
        answer = await server.put(item, group(0, version=7))
        assert not answer.accepted and "sampled under version 7, and no policy above version 0 exists" in answer.reason
        assert requests.handlers.ledger.view.counts()["waiting"] == 1
