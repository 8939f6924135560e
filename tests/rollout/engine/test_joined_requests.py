"""Samples of a moment that ask for the same go to vLLM in one message; each caller gets the end of its own.

vLLM's client and process are stand-ins here, but for what they say (`EngineCoreOutput`) and its requests. With the real
ones: `test_stamps.py`, `test_vllm_engine.py`, `test_image_input.py`.
"""

import asyncio
import inspect
from array import array
from types import SimpleNamespace

import pytest
import torch

from rollout.errors import EngineDead, EngineError, EpisodeError


def setup_module():
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global ADAPTER, DEAD, Engine, EngineCoreOutput, FinishReason, JoinedRequests, OTHERS, Reports, Request, SAME
    global SamplingParams, VLLMValidationError, alike, get_request_block_hasher, init_none_hash, sha256
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.request import Request

    from rollout.engine.joined_requests import JoinedRequests
    from rollout.engine.scheduling.record import OTHERS, SAME, alike
    from rollout.engine.scheduling.scheduler import Reports
    from rollout.engine.vllm_engine import ADAPTER, DEAD, Engine, VLLMValidationError


class Front:
    """vLLM's client: `added` are the names in each message, `aborted` those aborted, `passed` others' outputs."""

    def __init__(self, refusal=None):
        self.added, self.given, self.aborted, self.passed, self.refusal = [], [], [], [], refusal
        self.died, self.output_handler = asyncio.Event(), None
        self.model_config = SimpleNamespace(dtype=torch.float32)
        self.output_processor = SimpleNamespace(process_outputs=lambda outputs, *rest: self.passed.extend(outputs))
        self.input_processor = SimpleNamespace(process_inputs=self.process)
        self.engine_core = SimpleNamespace(add_request_async=self.add, abort_requests_async=self.abort)

    def _run_output_handler(self):
        self.output_handler = self.output_handler or asyncio.create_task(self.died.wait())

    def process(self, name, given, parameters, tasks, lora_request):
        if self.refusal:
            raise self.refusal
        return SimpleNamespace(name=name, given=given, parameters=parameters, adapter=lora_request)

    async def add(self, request):
        self.added.append([request.name, *request.parameters.extra_args[OTHERS]])
        self.given.append(request)

    async def abort(self, names):
        self.aborted += names

    def say(self, *outputs):
        """What vLLM's process sent."""
        self.output_processor.process_outputs([*outputs], 1.0)


def engine_of(front, adapter=None):
    return Engine(front, Reports(), JoinedRequests(front, adapter))


def end(name, tokens=(7, 8), reason=None, arrays=True):
    """What vLLM says at the end of a request, by default that it has its length."""
    logprobs, versions = array("f", [-1.0] * len(tokens)), array("i", [3] * len(tokens))
    kept = {"logprobs": logprobs.tobytes(), "versions": versions.tobytes()} if arrays else None
    return EngineCoreOutput(
        name, [*tokens], finish_reason=FinishReason.LENGTH if reason is None else reason, kv_transfer_params=kept
    )


async def asked(front, *calls):
    """Calls of `generate` in one turn of the event loop, once they are sent."""
    tasks = [asyncio.create_task(call) for call in calls]
    while not front.added:
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    return tasks


async def settle():
    """Let all that can go on now go on, however slow the machine is."""
    for _ in range(100):
        await asyncio.sleep(0)


async def test_the_same_go_as_one_and_each_gets_its_own_end():
    engine = engine_of(front := Front(), "an adapter")
    ask = engine.generate
    tasks = await asked(
        front, *[ask([1, 2], 9, 1.0) for _ in range(3)], ask([1, 3], 9, 1.0), ask([1, 2], 9, 1.0), ask([1, 2], 9, 0.5)
    )
    assert front.added == [["s0", "s1", "s2"], ["s3"], ["s4"], ["s5"]]
    assert {each.adapter for each in front.given} == {"an adapter"}
    front.say(end("s2", (5,), FinishReason.STOP), end("theirs"), end("s0", (6, 7)))
    await asyncio.wait([tasks[0], tasks[2]])
    await settle()
    assert [at for at, task in enumerate(tasks) if task.done()] == [0, 2]
    assert [each.request_id for each in front.passed] == ["theirs"]
    first, last = tasks[0].result(), tasks[2].result()
    assert (last.tokens, last.finish, first.tokens, first.finish) == ([5], "stop", [6, 7], "length")
    assert (list(first.logprobs), list(first.versions)) == ([-1.0, -1.0], [3, 3])
    front.say(*map(end, ("s1", "s3", "s4", "s5")))
    assert len(await asyncio.gather(*tasks)) == 6
    assert not engine._requests._waiting and not front.aborted


@pytest.mark.parametrize(
    "other", [{"max_tokens": 8}, {"temperature": 0.5}, {"stop_token_ids": (4,)}, {"salt": "older"}, {"routed": 1}]
)
async def test_whatever_differs_goes_apart(other):
    engine = engine_of(front := Front())
    wanted = {"prompt": [1, 2], "max_tokens": 9, "temperature": 1.0}
    tasks = await asked(front, engine.generate(**wanted), engine.generate(**wanted | other))
    assert front.added == [["s0"], ["s1"]]
    front.say(end("s0"), end("s1"))
    await asyncio.gather(*tasks)


async def test_images_are_the_same_only_if_they_are_one(monkeypatch):
    engine = engine_of(front := Front())
    monkeypatch.setattr(engine, "_input", lambda prompt, images, salt: (prompt, images, salt))
    one, other = object(), object()
    shown = [[one], [one], [other], []]
    tasks = await asked(front, *[engine.generate([1, 2], 9, 1.0, images=images) for images in shown])
    assert front.added == [["s0", "s1"], ["s2"], ["s3"]]
    assert [each.given[1] for each in front.given] == [[one], [other], []]
    front.say(*map(end, ("s0", "s1", "s2", "s3")))
    await asyncio.gather(*tasks)


async def test_those_of_a_later_turn_go_later():
    engine = engine_of(front := Front())
    first = await asked(front, engine.generate([1], 9, 1.0))
    second = asyncio.create_task(engine.generate([1], 9, 1.0))
    await settle()
    assert front.added == [["s0"], ["s1"]]
    front.say(end("s0"), end("s1"))
    await asyncio.gather(*first, second)


async def test_a_cancelled_request_is_not_sent_or_is_aborted():
    engine = engine_of(front := Front())
    tasks = [asyncio.create_task(engine.generate([1], 9, 1.0)) for _ in range(3)]
    await asyncio.sleep(0)
    tasks[0].cancel()  # before the message
    while not front.added:
        await asyncio.sleep(0)
    assert front.added == [["s1", "s2"]]
    tasks[1].cancel()
    await asyncio.wait(tasks[:2])
    assert front.aborted == ["s0", "s1"]
    front.say(end("s1", reason=FinishReason.ABORT, arrays=False), end("s2"))  # the abort's own answer is nobody's
    assert (await tasks[2]).tokens == [7, 8] and [each.request_id for each in front.passed] == ["s1"]


async def test_all_are_cancelled_before_the_message_and_none_is_sent():
    engine = engine_of(front := Front())
    task = asyncio.create_task(engine.generate([1], 9, 1.0))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await settle()
    assert front.added == [] and not engine._requests._waiting


@pytest.mark.parametrize("ended", [{"tokens": (), "arrays": False}, {"tokens": (5,)}])
async def test_one_that_vllm_ends_by_itself_fails_all_who_asked_with_it(ended):
    """If its process cannot read a message, vLLM names the first request alone, and the others would wait for ever;
    if they went on, nobody would take their answers."""
    engine = engine_of(front := Front())
    tasks = await asked(front, *[engine.generate([1], 9, 1.0) for _ in range(3)], engine.generate([2], 9, 1.0))
    front.say(end("s0", reason=FinishReason.ERROR, **ended))
    for task in tasks[:3]:
        with pytest.raises(EngineError, match=rf"vLLM ended a request: 'error', {len(ended['tokens'])} tokens"):
            await task
    assert {*front.aborted} >= {"s1", "s2"} and "s3" not in front.aborted
    front.say(end("s3"))
    assert (await tasks[3]).tokens == [7, 8]


async def test_the_death_of_vllm_s_process_ends_all_who_wait_and_who_come_later():
    engine = engine_of(front := Front())
    tasks = await asked(front, *[engine.generate([1], 9, 1.0) for _ in range(2)])
    front.died.set()
    for asks in (*tasks, engine.generate([1], 9, 1.0)):
        with pytest.raises(EngineDead, match=DEAD):
            await asks
    assert not front.aborted and front.added == [["s0", "s1"]]


@pytest.mark.parametrize("comes", ["end", "error", "death"])
async def test_a_caller_may_be_cancelled_in_the_moment_of_its_end(comes):
    """A second result for it would end the task that takes vLLM's outputs, and the server with it."""
    engine = engine_of(front := Front())
    tasks = await asked(front, *[engine.generate([1], 9, 1.0) for _ in range(2)])
    tasks[0].cancel()
    if comes == "death":
        front.died.set()
        await front.output_handler
    else:
        front.say(end("s0", reason=FinishReason.STOP if comes == "end" else FinishReason.ERROR))
    await asyncio.wait(tasks[:1])
    assert tasks[0].cancelled()
    if comes == "end":
        front.say(end("s1"))
        assert (await tasks[1]).tokens == [7, 8]
    else:
        with pytest.raises((EngineError, EngineDead)):
            await tasks[1]


@pytest.mark.parametrize("kind", ["ValueError", "VLLMValidationError"])
async def test_tokens_that_vllm_refuses_fail_their_requests(kind):
    refusal = {"ValueError": ValueError, "VLLMValidationError": VLLMValidationError}[kind]("longer than max_model_len")
    engine = engine_of(Front(refusal))
    for asked in [asyncio.create_task(engine.generate([1, 2, 3], 9, 1.0)) for _ in range(2)]:
        with pytest.raises(EpisodeError, match=f"vLLM refuses 3 tokens: {refusal}") as caught:
            await asked
        assert caught.value.kind == "task"


async def test_whatever_else_vllm_raises_for_a_request_ends_that_request_only():
    engine = engine_of(Front(NotImplementedError("no such backend")))
    with pytest.raises(EngineError, match=r"vLLM failed on 3 tokens: NotImplementedError: no such backend") as caught:
        await engine.generate([1, 2, 3], 9, 1.0)
    assert caught.value.origin == "NotImplementedError"


LEFT = {
    *("pooling_params", "prompt_embeds", "prompt_is_token_ids", "priority", "trace_headers", "resumable", "session_id"),
    *("reasoning_ended", "reasoning_parser_kwargs", "abort_immediately", "kv_hints"),
}
"""What no request of ours has."""


def test_requests_alike_are_as_vllm_makes_each():
    """They differ in their names alone, and have lists and dicts of their own."""
    init_none_hash(sha256)
    hashed = list[str]()
    plain = get_request_block_hasher(4, sha256)
    parameters = SamplingParams(max_tokens=9, logprobs=0, extra_args={OTHERS: ["b", "c"]})
    same = {"client_index": 1, "arrival_time": 5.0, "mm_features": None, "lora_request": ADAPTER, "cache_salt": "3"}
    assert {*SAME} == {*same}
    given = same | {"block_hasher": lambda request: hashed.append(request.request_id) or plain(request)}
    found = alike(Request("a", [1, 2, 3, 4, 5], parameters, None, **given))
    assert hashed == ["a"]
    made = [Request(name, [1, 2, 3, 4, 5], parameters, None, **given) for name in "abc"]
    views = {"output_token_ids", "all_token_ids", "prefill_stats"}
    for each, other in zip(found, made, strict=True):
        both = [{key: value for key, value in vars(one).items() if key not in views} for one in (each, other)]
        assert both[0] == both[1]
        assert list(each.all_token_ids) == [1, 2, 3, 4, 5] and len(each.block_hashes) == 1
        each.append_output_token_ids([6, 7, 8])
        assert len(each.block_hashes) == 2
    own = [value for each in found for key, value in vars(each).items() if key not in {*SAME, "prompt_token_ids"}]
    changing = [value for value in own if isinstance(value, list | dict | set)]
    assert len({id(value) for value in changing}) == len(changing) > 9
    shown = alike(Request("a", [1], parameters, None, mm_features=["an image"]))
    assert [each.mm_features for each in shown] == [["an image"]] * 3
    alone = Request("d", [1], SamplingParams(max_tokens=9), None, block_hasher=None)
    assert alike(alone) == [alone]


def test_a_request_of_vllm_s_has_nothing_else_that_the_others_would_miss():
    known = {"request_id", "prompt_token_ids", "sampling_params", "block_hasher", *SAME, *LEFT}
    assert {*inspect.signature(Request).parameters} <= known
