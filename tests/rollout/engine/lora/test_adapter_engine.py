"""The real vLLM beside a learner that publishes adapters of a tiny model: compared with transformers and peft.

One engine plays the whole scenario, the only one with adapters in the fast lane: updates over the wire under running
sequences, then folders; each test looks at one aspect. Servers that start later, or on another base, have engines of
their own.
"""

import asyncio
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from configs.schema import Config
from learner.weights.receiver.follow import Receiver
from learner.weights.sender.publish import Sender
from rollout.errors import EngineError
from tests.harness.adapted import LINEAR, Adapted, make_base
from tests.harness.adapters import saved_by_learner
from tests.harness.engines import played
from tests.harness.keys import client_keys, server_keys
from tests.harness.one_gpu import GPU_ENGINE, device_of, start

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
LENGTH, TEMPERATURE, UPDATES, CLOSE = 700, 0.7, 5, 1e-4
EACH = 20
"""Tokens of each sequence that a version samples at least, before the next is published."""
PROMPTS = [[3 + i, 5, 9, 11, 40 - i] for i in range(4) for _ in range(2)]
"""Two of each: asked for at the same time, they are one message to vLLM's process."""
TEXT = [3 + (7 * i) % 50 for i in range(64)]
KV_BYTES = 64 << 20
ON_CPU = SimpleNamespace(device="cpu", dtype="float32", engine={}, length=LENGTH, close=CLOSE)
ON_GPU = SimpleNamespace(device="cuda", dtype="bfloat16", engine=GPU_ENGINE, length=400, close=0.1)
"""`close`: mean difference of a probe, in nats."""


def make_config(base, where=ON_CPU, **weights):
    return Config.model_validate(
        {
            "model": {"path": str(base), "dtype": where.dtype, "lora": {"rank": 6, "alpha": 12}},
            "data": {"train": "train.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 800},
            "weights": {"bucket_mib": 1, "probe_every": 1, "probe_tolerance": where.close, "timeout_s": 120, **weights},
            "rollout": {"device": where.device, "engine": {"kv_cache_memory_bytes": KV_BYTES, **where.engine}},
        }
    )


def worst(ours, theirs):
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


class Learner:
    """Publishes versions of `adapted` and waits until servers use them."""

    def __init__(self, adapted, config):
        self.adapted, self.config = adapted, config
        self.sender = Sender(
            adapted.specs(),
            config.weights,
            0,
            device_of(config),
            TEXT,
            folder=Path(config.model.path) / "policies",
            keys=server_keys("learner"),
        )

    def follow(self, engine, name="rollout-0"):
        """`rollout.loop.follow`: a queue of the versions in use, and then the words of what ended it."""
        held = asyncio.Queue()

        async def where(known):
            if known:
                await asyncio.Event().wait()
            return self.sender.address

        async def load():
            keys = client_keys(server="learner")
            async for policy in Receiver(where, engine, name, self.config.weights, keys=keys).policies():
                await policy.load()
                engine.version = policy.version
                await policy.loaded()
                held.put_nowait(policy.version)

        task = asyncio.create_task(load())
        task.add_done_callback(lambda task: held.put_nowait(task.cancelled() or repr(task.exception())))
        return held, task

    def publish(self, version):
        self.sender.publish(self.adapted.at(version), version)


@asynccontextmanager
async def server(config):
    """An engine, of which vLLM's process ends with the block."""
    engine = await start(config)
    try:
        yield engine
    finally:
        await engine.close()


@asynccontextmanager
async def learning(adapted, config, engine, published=()):
    """A learner that has `published` versions by the time that the engine's server joins it; the versions in use."""
    learner = Learner(adapted, config)
    for version in published:
        learner.publish(version)
    held, task = learner.follow(engine)
    try:
        yield learner, held
    finally:
        task.cancel()
        await asyncio.to_thread(learner.sender.close, 10.0)
        await asyncio.wait([task])


async def play(folder):
    """The scenario; returns what happened."""
    make_base(base := folder / "base")
    make_base(folder / "other", seed=9)
    seen = SimpleNamespace(adapted=Adapted(base), config=make_config(base), modes={})
    seen.saved = saved_by_learner(seen.config.model, folder, TEXT)
    async with server(seen.config) as engine:
        seen.before = await engine.generate(PROMPTS[0], 20, TEMPERATURE)
        async with learning(seen.adapted, seen.config, engine) as (learner, held):
            await updates(seen, learner, engine, held)
        seen.stats = learner.sender.stats()
        for name, keys in {"streamed": {"staging": "bucket"}, "files": {"transport": "safetensors"}}.items():
            await mode(seen, name, make_config(base, **keys), engine)
        await folders(seen, engine, folder)
    return seen


async def mode(seen, name, config, engine):
    """Two versions in another way than through a staging copy."""
    async with learning(seen.adapted, config, engine) as (learner, held):
        for version in (0, 8):
            learner.publish(version)
            assert await held.get() == version
        seen.modes[name] = await engine.probe(TEXT)


async def play_newcomer(folder):
    """A server that starts when the learner is at its last version; another learner then has another base. The base is
    an earlier adapter that was merged, and vLLM reads it as any folder."""
    make_base(folder / "base")
    make_base(folder / "other", seed=9)
    saved = saved_by_learner(make_config(folder / "base").model, folder, TEXT)
    config, ours, other = make_config(saved.merged), Adapted(saved.merged), Adapted(folder / "other")
    async with server(config) as engine:
        merged = await engine.probe(TEXT)
        async with learning(ours, config, engine, range(UPDATES + 1)) as (_, held):
            version, probe = await held.get(), await engine.probe(TEXT)
        async with learning(other, config, engine, [0]) as (_, held):
            refused = await held.get()
    theirs = ours.logprobs_of(TEXT)
    return SimpleNamespace(
        version=version, probe=probe, theirs=theirs, refused=refused, merged=merged, saved=saved.logprobs
    )


async def play_updates(folder, where, make=make_base, targets=LINEAR):
    """Updates under sequences of which each that ends is replaced until the last version is in use; `in_flight` has
    pairs of prompt and completion. `make` writes the base, of whose layers the run adapts `targets`."""
    dtype = getattr(torch, where.dtype)
    make(base := folder / "base", dtype=dtype)
    adapted = Adapted(base, targets=targets, dtype=dtype)
    seen = SimpleNamespace(adapted=adapted, config=make_config(base, where), in_flight=[])

    async def keep_asking(prompt):
        while len(seen.probes) < UPDATES:
            seen.in_flight.append((prompt, await engine.generate(prompt, where.length, TEMPERATURE)))

    async with server(seen.config) as engine, learning(seen.adapted, seen.config, engine) as (learner, held):
        learner.publish(0)
        assert await held.get() == 0
        seen.pauses, seen.probes = [], []
        asking = [asyncio.create_task(keep_asking(prompt)) for prompt in PROMPTS]
        await publish_all(seen, learner, engine, held)
        await asyncio.gather(*asking)
    return seen


async def updates(seen, learner, engine, held):
    learner.publish(0)
    assert await held.get() == 0
    running = [asyncio.create_task(engine.generate(p, LENGTH, TEMPERATURE)) for p in PROMPTS]
    seen.pauses, seen.probes = [], []
    await publish_all(seen, learner, engine, held)
    seen.unfinished = sum(not task.done() for task in running)
    seen.in_flight = await asyncio.gather(*running)


async def publish_all(seen, learner, engine, held):
    """Each version once enough tokens of the version before have been sampled."""
    for version in range(1, UPDATES + 1):
        sampled = engine.tokens
        while engine.tokens < sampled + EACH * len(PROMPTS):
            await asyncio.sleep(0.005)
        learner.publish(version)
        assert await held.get() == version
        stats = learner.sender.stats()
        seen.pauses.append(stats["weights/pause_s"])
        seen.probes.append(stats["weights/probe"])


async def folders(seen, engine, folder):
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    seen.adapted.save(folder / "seven", 7)
    await engine.load_folder(folder / "seven")
    seen.folder = await engine.probe(TEXT)
    smaller = Adapted(folder / "base", rank=2, alpha=1.0, targets=["q_proj", "down_proj"])
    smaller.save(folder / "smaller", 1)
    await engine.load_folder(folder / "smaller")
    seen.smaller, seen.smaller_scores = await engine.probe(TEXT), smaller.logprobs_of(TEXT)
    await engine.load_folder(folder / "base")
    seen.base = await engine.probe(TEXT)
    with pytest.raises(EngineError) as caught:
        await engine.load_folder(folder / "other")
    seen.refused = str(caught.value)
    await engine.load_folder(seen.saved.adapter)
    seen.ours = await engine.probe(TEXT)
    theirs = LoRARequest("file", 2, str(seen.saved.adapter))  # as `vllm serve --lora-modules` makes of a folder
    asked = engine._llm.generate({"prompt_token_ids": TEXT}, SamplingParams(max_tokens=1, prompt_logprobs=0), "theirs",
                                 lora_request=theirs)  # fmt: skip
    found = [output.prompt_logprobs async for output in asked][-1]
    seen.theirs = [places[token].logprob for token, places in zip(TEXT[1:], found[1:], strict=True)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return played(play(tmp_path_factory.mktemp("model")))


def test_before_the_first_version_requests_are_answered_by_the_base(seen):
    versions = [0] * (len(PROMPTS[0]) - 1 + 20)
    theirs = seen.adapted.scores(PROMPTS[0] + seen.before.tokens, versions, TEMPERATURE)
    assert worst(seen.before.logprobs, theirs[len(PROMPTS[0]) - 1 :]) < CLOSE


def test_adapters_change_under_sequences_whose_tokens_carry_their_versions(seen):
    assert seen.unfinished == len(PROMPTS) and not any(seen.pauses)
    for prompt, completion in zip(PROMPTS, seen.in_flight, strict=True):
        assert len(completion.tokens) == LENGTH
        assert list(completion.versions) == sorted(completion.versions)
        assert set(completion.versions) == set(range(UPDATES + 1))
        versions = [0] * (len(prompt) - 1) + list(completion.versions)
        theirs = seen.adapted.scores(prompt + completion.tokens, versions, TEMPERATURE)[len(prompt) - 1 :]
        assert worst(completion.logprobs, theirs) < CLOSE
        shifted = seen.adapted.scores(prompt + completion.tokens, [versions[0], *versions[:-1]], TEMPERATURE)
        assert worst(completion.logprobs, shifted[len(prompt) - 1 :]) > 0.01, "a version of one token is told"


def test_every_probe_agreed(seen):
    assert all(0 < probe < CLOSE for probe in seen.probes) and seen.stats["weights/failed"] == 0
    assert seen.stats["weights/bytes"] < 300_000


@pytest.mark.parametrize("mode", ["streamed", "files"])
def test_an_adapter_comes_bucket_by_bucket_and_through_files_too(seen, mode):
    assert worst(seen.modes[mode], seen.adapted.at(8).logprobs_of(TEXT)) < CLOSE


def test_folders_of_adapters_and_of_the_base_are_loaded(seen):
    assert worst(seen.folder, seen.adapted.at(7).logprobs_of(TEXT)) < CLOSE
    assert worst(seen.smaller, seen.smaller_scores) < CLOSE, "of the larger adapter before it nothing is left"
    assert worst(seen.base, seen.adapted.at(0).logprobs_of(TEXT)) < CLOSE
    assert worst(seen.folder, seen.base) > 0.1 and worst(seen.smaller, seen.base) > 0.01
    assert "other: whole weights, and this engine serves adapters of" in seen.refused


def test_vllm_s_own_loader_and_ours_make_the_learner_s_adapter_of_what_it_saved(seen):
    assert worst(seen.theirs, seen.saved.logprobs) < CLOSE and worst(seen.ours, seen.saved.logprobs) < CLOSE
    assert worst(seen.theirs, seen.base) > 0.1


@pytest.mark.long
def test_a_newcomer_has_the_base_from_disk_and_the_adapter_from_the_wire(tmp_path):
    found = played(play_newcomer(tmp_path))
    assert worst(found.merged, found.saved) < CLOSE, "whole weights of an adapter are what the learner computed"
    assert found.version == UPDATES
    assert worst(found.probe, found.theirs) < CLOSE
    told = """WeightsError("version 0: the probe's log-probabilities differ by"""
    assert found.refused.startswith(told), "another base is told by the adapter that does nothing"
