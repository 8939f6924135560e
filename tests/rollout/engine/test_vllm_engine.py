"""The real vLLM on a tiny random model: in-flight updates over the weights wire, compared with transformers.

The whole scenario is played once with tied and once with untied embeddings; each test looks at one aspect.
"""

import asyncio
import logging
import time
from contextlib import AsyncExitStack
from types import SimpleNamespace

import psutil
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from learner.weights.plan import Spec
from learner.weights.receiver.follow import Receiver
from learner.weights.sender.publish import Sender
from rollout.errors import EngineDead, EngineError, EpisodeError
from tests.harness.engines import DENSE_VOCABULARY, dense_config, played
from tests.harness.keys import client_keys, server_keys
from tests.harness.launched import words
from tests.harness.published import TorchPolicy, difference, scores, step, tiny_qwen2

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LENGTH, TEMPERATURE = 400, 0.7
STOPS = list(range(10, 60, 2))
PROMPTS = [[3 + i, 5, 9, 11, 40 - i] for i in range(8)]


def make_model(folder, tied):
    model = tiny_qwen2(tied, vocabulary=DENSE_VOCABULARY)
    model.save_pretrained(folder)
    words = {f"w{i}": i for i in range(DENSE_VOCABULARY)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w2")), bos_token="w0", eos_token="w1", unk_token="w2"
    ).save_pretrained(folder)
    return model.eval()


async def play(folder, engine, config, model):
    """The scenario; returns what happened."""
    seen = SimpleNamespace(config=config)
    specs = [Spec(name, tuple(p.shape), p.dtype) for name, p in model.named_parameters()]
    sender = Sender(specs, seen.config.weights, 0, torch.device("cpu"), keys=server_keys("learner"))
    held = asyncio.Queue()
    follow = asyncio.create_task(take(sender, engine, held, seen.config))
    follow.add_done_callback(lambda task: held.put_nowait(task))  # ends the wait for a version
    try:
        await updates(seen, model, engine, sender, held)
        await asyncio.to_thread(sender.close, 10.0)
        seen.stats = sender.stats()
        await folders(seen, model, engine, folder)
        await failures(seen, engine)
    finally:
        follow.cancel()
        sender.close()
        await asyncio.wait([follow])
    return seen


async def play_to_the_death(folder):
    """The scenario with tied embeddings, on an engine of its own that is killed in the end."""
    from rollout.engine.vllm_engine import Engine

    model, config, others = make_model(folder, True), dense_config(folder), psutil.Process().children(recursive=True)
    engine = await Engine.start(config, seed=1)
    try:
        seen = await play(folder, engine, config, model)
        await death(seen, engine, others)
    finally:
        await engine.close()
    return seen


async def take(sender, engine, held, config):
    """`rollout.loop.follow`, which also puts each version into `held`."""

    async def where(known):
        if known:
            await asyncio.Event().wait()
        return sender.address

    async for policy in Receiver(
        where, engine, "rollout-0", config.weights, keys=client_keys(server="learner")
    ).policies():
        await policy.load()
        engine.version = policy.version
        await policy.loaded()
        held.put_nowait(policy.version)


async def updates(seen, model, engine, sender, held):
    sender.publish(TorchPolicy(model), 0)
    assert await held.get() == 0
    seen.before = {name: p.detach().clone() for name, p in model.named_parameters()}
    sampled = engine.tokens
    running = [asyncio.create_task(engine.generate(p, LENGTH, TEMPERATURE)) for p in PROMPTS]
    while engine.tokens < sampled + 60 * len(PROMPTS):
        await asyncio.sleep(0.005)
    seen.stats_running = engine.stats()
    step(model, 1)
    sender.publish(TorchPolicy(model), 1)
    assert await held.get() == 1
    seen.unfinished = sum(not task.done() for task in running)
    seen.in_flight = await asyncio.gather(*running)
    seen.after = await asyncio.gather(*(engine.generate(p, 50, TEMPERATURE) for p in PROMPTS))
    seen.after_scores = [
        scores(model, p + c.tokens, TEMPERATURE)[len(p) - 1 :] for p, c in zip(PROMPTS, seen.after, strict=True)
    ]
    old = Qwen2ForCausalLM(model.config).float().eval()
    old.load_state_dict(seen.before, strict=False)
    old.tie_weights()
    seen.in_flight_scores = [
        scores(old, p + c.tokens, TEMPERATURE)[len(p) - 1 :] for p, c in zip(PROMPTS, seen.in_flight, strict=True)
    ]
    seen.stopped = await asyncio.gather(*(engine.generate(p, 50, 1.0, [1, *STOPS]) for p in PROMPTS))


async def folders(seen, model, engine, folder):
    prompt = [3 + position % 50 for position in range(300)]  # blocks of it are in the prefix cache
    await engine.generate(prompt, 8, 1.0)
    step(model, 2)
    model.save_pretrained(folder / "two")
    await engine.load_folder(folder / "two")
    tokens = list(range(3, 60))
    seen.folder = difference(await engine.probe(tokens), scores(model, tokens))
    answer = await engine.generate(prompt, 8, 1.0)
    seen.folder_again = difference(answer.logprobs, scores(model, prompt + answer.tokens)[len(prompt) - 1 :])
    try:
        await engine.load_folder(folder / "nothing")
    except EngineError as error:
        seen.no_folder = str(error)


async def failures(seen, engine):
    cancelled = asyncio.create_task(engine.generate(PROMPTS[0], 400, 1.0))
    await asyncio.sleep(0.1)
    cancelled.cancel()
    await asyncio.wait([cancelled])
    with pytest.raises(EpisodeError) as refused:
        await engine.generate([5] * 950, 4, 1.0)
    seen.refused, seen.vocabulary = str(refused.value), engine.vocabulary
    await engine.alive(120)
    while engine.stats()["running"]:
        await asyncio.sleep(0.01)  # until vLLM's process has reported the abort
    seen.idle = engine.stats()


async def death(seen, engine, others):
    """All processes of vLLM are killed; `others` ran before."""
    died = asyncio.create_task(engine.died())
    stack = AsyncExitStack()
    await stack.enter_async_context(engine.paused())
    waiting = asyncio.create_task(engine.generate(PROMPTS[0], 400, 1.0))
    await asyncio.sleep(0.1)
    for process in psutil.Process().children(recursive=True):
        command = words(process) if process not in others else ""
        if "EngineCore" in command or "spawn_main" in command:
            process.kill()
    started = time.monotonic()
    seen.deaths = []
    for wait in (engine.alive(120), waiting, died, stack.aclose(), engine.generate(PROMPTS[1], 4, 1.0)):
        try:
            await wait
        except EngineDead as error:
            seen.deaths.append(str(error))
    seen.death_s = time.monotonic() - started


@pytest.fixture(scope="module")
def untied(dense_engine, tmp_path_factory):
    model = make_model(folder := tmp_path_factory.mktemp("untied"), False)
    return dense_engine.play(lambda engine: play(folder, engine, dense_engine.config, model))


@pytest.fixture(scope="module")
def tied(tmp_path_factory):
    logging.getLogger("vllm.v1.engine.async_llm").disabled = True  # its death is part of this; pytest keeps records
    return played(play_to_the_death(tmp_path_factory.mktemp("tied")))


@pytest.fixture(
    params=[
        pytest.param("untied", marks=pytest.mark.xdist_group("vllm-dense")),
        pytest.param("tied", marks=pytest.mark.long),
    ]
)
def seen(request):
    return request.getfixturevalue(request.param)


@pytest.mark.xdist_group("vllm-dense")
def test_vllms_engine_is_the_process_that_was_started_before_the_imports(dense_engine):
    assert dense_engine.early.child.poll() is None, "it would have been killed as not needed"


def test_unfinished_sequences_go_on_to_their_full_length(seen):
    assert seen.unfinished == len(PROMPTS)
    assert [len(c.tokens) for c in seen.in_flight] == [LENGTH] * len(PROMPTS)
    assert {c.finish for c in seen.in_flight} == {"length"}


def test_tokens_carry_the_version_that_sampled_them(seen):
    for completion, theirs in zip(seen.in_flight, seen.in_flight_scores, strict=True):
        assert list(completion.versions) == sorted(completion.versions) and set(completion.versions) == {0, 1}
        switch = completion.versions.index(1)
        assert difference(completion.logprobs[:switch], theirs[:switch]) < 1e-3
        assert max(abs(a - b) for a, b in zip(completion.logprobs[:switch], theirs[:switch], strict=True)) < 1e-2
        assert difference(completion.logprobs[switch:], theirs[switch:]) > 0.05


def test_after_the_update_vllm_computes_what_torch_computes(seen):
    for completion, theirs in zip(seen.after, seen.after_scores, strict=True):
        assert list(completion.versions) == [1] * 50
        assert difference(completion.logprobs, theirs) < 1e-3


def test_the_probe_agreed(seen):
    assert seen.stats["weights/version"] == 1 and seen.stats["weights/failed"] == 0
    assert 0 < seen.stats["weights/probe"] < 1e-3
    assert 0 < seen.stats["weights/load_s"] < 10 and seen.stats["weights/pause_s"] == 0


def test_a_stop_token_is_kept_and_ends_the_answer(seen):
    assert any(c.finish == "stop" for c in seen.stopped)
    for completion in seen.stopped:
        assert not set(completion.tokens[:-1]) & {1, *STOPS}
        assert (completion.finish == "stop") == (completion.tokens[-1] in {1, *STOPS})
        assert len(completion.tokens) == len(completion.logprobs) == len(completion.versions)


def test_weights_load_from_a_folder_too(seen):
    assert seen.folder < 1e-3
    assert seen.folder_again < 1e-3, "the prefix cache of the weights before is not used"
    assert "no .safetensors file" in seen.no_folder


def test_the_stats_count_sequences_and_tokens(seen):
    assert 0 < seen.stats_running["running"] <= len(PROMPTS) and seen.stats_running["waiting"] == 0  # in the mean
    assert seen.stats_running["tokens_per_s"] > 0 and 0 < seen.stats_running["kv_usage"] < 1
    assert seen.idle["running"] == seen.idle["waiting"] == 0


def test_a_prompt_longer_than_the_engine_holds_fails_one_request(seen):
    assert seen.refused.startswith("vLLM refuses 950 tokens: ") and "900" in seen.refused
    assert seen.vocabulary == DENSE_VOCABULARY


@pytest.mark.long
def test_the_engine_s_death_is_raised_in_all_pending_calls(tied):
    assert len(tied.deaths) == 5 and tied.death_s < 60  # of the 120 s the probe would take
