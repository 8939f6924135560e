"""Every token carries the version that sampled it: the real vLLM with two models, one of which samples uniformly.

With the last norm at 0 every token has log-probability -ln(vocabulary), exactly, so a token's log-probability tells
which version sampled it. Sequences of many lengths begin and end all the time while versions change.
"""

import asyncio
import gc
import logging
import math
import os
import random
import warnings
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rollout.engine.vllm_engine import Engine, Request, VLLMValidationError
from rollout.errors import EngineError, EpisodeError
from tests.rollout.engine.test_vllm_engine import VOCABULARY, make_config, make_model

RUNNING, UPDATES, LONGEST = 48, 12, 60


async def swap(engine, folder, version):
    """As `rollout.loop.follow` does it; odd versions sample uniformly."""
    async with engine.paused():
        await engine.collective("rl_load_folder", str(folder / ("flat" if version % 2 else "model")), timeout_s=60)
        engine.version = version


async def keep_asking(engine, number, done, completions):
    draw = random.Random(number)
    while not done.is_set():
        length = draw.randrange(1, LONGEST)
        completions.append((length, await engine.generate([draw.randrange(3, 60) for _ in range(9)], length, 1.0)))


async def play(folder):
    model = make_model(folder / "model", tied=False)
    model.save_pretrained(folder / "model")
    with torch.no_grad():
        model.model.norm.weight.fill_(0.0)
    model.save_pretrained(folder / "flat")
    engine = await Engine.start(make_config(folder / "model"), seed=1)
    try:
        return await update(engine, folder)
    finally:
        await engine.close()


async def update(engine, folder):
    done, completions = asyncio.Event(), []
    await swap(engine, folder, 0)
    asking = [asyncio.create_task(keep_asking(engine, number, done, completions)) for number in range(RUNNING)]
    for version in range(1, UPDATES):
        reached = engine.tokens + 5 * RUNNING
        while engine.tokens < reached:
            await asyncio.sleep(0.001)
        await swap(engine, folder, version)
    done.set()
    await asyncio.gather(*asking)
    return SimpleNamespace(completions=completions, tokens=engine.tokens, stats=engine.stats())


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    os.environ["VLLM_CPU_CI_ENV"] = "1"
    logging.getLogger("vllm.v1.engine.async_llm").disabled = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # vLLM leaves a ZeroMQ context to the garbage collector
        happened = asyncio.run(play(tmp_path_factory.mktemp("model")))
        gc.collect()
    return happened


@pytest.mark.vllm
def test_every_token_has_the_version_that_sampled_it(seen):
    crossed = wrong = 0
    for _, completion in seen.completions:
        assert completion.versions == sorted(completion.versions)
        crossed += completion.versions[0] != completion.versions[-1]
        flat = [abs(logprob + math.log(VOCABULARY)) < 2e-6 for logprob in completion.logprobs]
        for at, version in enumerate(completion.versions):
            beside = flat[max(at - 1, 0) : at] + flat[at + 1 : at + 2]
            wrong += not flat[at] if version % 2 else flat[at] and any(beside)  # one alone comes about by chance
    assert crossed > RUNNING and wrong == 0


@pytest.mark.vllm
def test_no_token_is_lost_or_counted_twice(seen):
    assert all(len(completion.tokens) == length for length, completion in seen.completions)
    assert seen.tokens == sum(length for length, _ in seen.completions)
    assert seen.stats["running"] == seen.stats["waiting"] == 0


class SlowFront:
    """Stands for vLLM's front end: when it acknowledges a pause, tokens sampled before still wait in this process, and
    are read one per pass of the event loop. Requests are named by their prompts."""

    def __init__(self):
        self.request_states, self.waiting, self.paused = {}, [], False
        self.output_processor = self.engine_core = self
        self.output_handler = asyncio.ensure_future(asyncio.Event().wait())

    async def add_request(self, name, prompt, parameters):
        state = self.request_states[prompt["prompt_token_ids"][0]] = SimpleNamespace(
            request_id=prompt["prompt_token_ids"][0], tokens=[], over=asyncio.Event(), detokenizer=None
        )
        state.detokenizer = SimpleNamespace(num_output_tokens=lambda: len(state.tokens))

        async def get():
            await state.over.wait()
            logprobs = SimpleNamespace(logprobs=[-1.0] * len(state.tokens))
            return SimpleNamespace(
                outputs=[SimpleNamespace(token_ids=state.tokens, logprobs=logprobs, finish_reason="length")]
            )

        state.get = get
        return state

    def read(self, request, last=False):
        state = self.request_states[request]
        state.tokens.append(9)
        if last:
            del self.request_states[request]
            state.over.set()

    async def pause_scheduler_async(self, mode, clear_cache):
        self.paused = True
        self.catching_up = asyncio.ensure_future(self.catch_up())

    async def catch_up(self):
        for output in self.waiting:
            await asyncio.sleep(0)
            self.read(*output)

    async def resume_generation(self):
        self.paused = False


async def test_tokens_still_on_their_way_at_a_pause_belong_to_the_version_before():
    llm = SlowFront()
    engine = Engine(llm)
    short, long = (asyncio.create_task(engine.generate([request], 9, 1.0)) for request in (1, 2))
    await asyncio.sleep(0.01)
    llm.read(1)
    llm.waiting = [*[(2,)] * 40, (1,), (1, True), (2,)]
    async with engine.paused() as timings:
        engine.version = 1  # as a load that takes no time
    assert not llm.paused
    assert timings.paused_s >= timings.settle_s > 0 and timings.stop_s > 0 and timings.resume_s > 0
    assert engine.tokens == 44 and engine.stats()["running"] == 1
    llm.read(2, True)
    assert (await short).versions == [0, 0, 0]
    assert (await long).versions == [0] * 41 + [1]
    late = asyncio.create_task(engine.generate([3], 9, 1.0))
    await asyncio.sleep(0.01)
    llm.read(3, True)
    assert (await late).versions == [1]


async def test_a_load_that_fails_changes_no_stamp_and_generation_goes_on():
    llm = SlowFront()
    engine = Engine(llm)
    asked = asyncio.create_task(engine.generate([1], 9, 1.0))
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="no such weights"):
        async with engine.paused():
            raise ValueError("no such weights")
    assert not llm.paused
    llm.read(1, True)
    assert (await asked).versions == [0]


def test_versions_of_a_request():
    request = Request()
    assert request.versions(2, 7) == [7, 7]
    request.boundaries = [(0, 3), (2, 4), (2, 5), (3, 6)]  # began under 3; 3 and 5 sampled nothing
    assert request.versions(5, 7) == [4, 4, 6, 7, 7]
    assert request.versions(3, 7) == [4, 4, 6]  # it ended before 7 came


@pytest.mark.parametrize("refusal", [ValueError("no tokens"), VLLMValidationError("longer than max_model_len")])
async def test_tokens_that_vllm_refuses_fail_one_request(refusal):
    class Refusing(SlowFront):
        async def add_request(self, name, prompt, parameters):
            raise refusal

    engine = Engine(Refusing())
    with pytest.raises(EpisodeError, match=f"vLLM refuses 3 tokens: {refusal}") as caught:
        await engine.generate([1, 2, 3], 9, 1.0)
    assert caught.value.kind == "task" and not engine._requests


async def test_whatever_else_vllm_raises_for_a_request_ends_that_request_only():
    class Failing(SlowFront):
        aborted: ClassVar[list[str]] = []

        async def add_request(self, name, prompt, parameters):
            raise NotImplementedError("no such backend")

        async def abort(self, name):
            self.aborted.append(name)

    engine = Engine(llm := Failing())
    with pytest.raises(EngineError, match=r"vLLM failed on 3 tokens: NotImplementedError: no such backend") as caught:
        await engine.generate([1, 2, 3], 9, 1.0)
    assert caught.value.origin == "NotImplementedError" and llm.aborted == ["r0"] and not engine._requests
