"""A tiny random Qwen3-MoE in the real vLLM: policies in every way in which they are loaded, against transformers.

One engine plays the whole scenario, the only mixture in the fast lane; each test looks at one aspect.
"""

import asyncio
import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from configs.load import ConfigError
from configs.schema import Config
from learner.weights.plan import Spec
from learner.weights.receiver.follow import Receiver
from learner.weights.sender.publish import Sender
from rollout.errors import EngineError
from tests.harness.engines import played
from tests.harness.keys import client_keys, server_keys
from tests.harness.one_gpu import GPU_ENGINE, device_of, start
from tests.harness.published import TorchPolicy, difference, scores, step
from tests.harness.tiny_experts import tiny_experts

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TOKENS = [3 + 7 * position % 60 for position in range(64)]
CLOSE = {"float32": 1e-4, "bfloat16": 0.1}
"""Mean differences of equal policies, in nats."""
ON_CPU = SimpleNamespace(device="cpu", dtype="float32", engine={})
ON_GPU = SimpleNamespace(device="cuda", dtype="bfloat16", engine={**GPU_ENGINE, "moe_backend": "triton"})


def make_config(folder, staging="full", where=ON_CPU, **engine: Any):
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": where.dtype},
            "data": {"train": "train.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "countdown"},
            "sampling": {"max_tokens": 100},
            "weights": {
                "bucket_mib": 1,
                "probe_every": 1,
                "probe_tolerance": CLOSE[where.dtype],
                "timeout_s": 120,
                "staging": staging,
            },
            "rollout": {
                "device": where.device,
                "engine": {"kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 16, **where.engine, **engine},
            },
        }
    )


async def play(folder, where=ON_CPU):
    """The scenario; returns the mean differences from transformers, and what was said."""
    tiny_experts(folder, dtype=where.dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    seen = SimpleNamespace(probes={}, off={}, old={}, rounded={}, dtype=getattr(torch, where.dtype))
    engine = await start(make_config(folder, where=where))
    try:
        for number, staging in enumerate(("full", "bucket")):
            await pushed(seen, model, engine, make_config(folder, staging, where), staging, 10 * number)
        before = scores(model, TOKENS)
        step(model, 30, getattr(torch, where.dtype))
        model.save_pretrained(folder / "two")
        await engine.load_folder(folder / "two")
        await compare(seen, "folder", model, engine, before)
        seen.names = sorted(
            name for name in load_file(folder / "two" / "model.safetensors") if ".0.mlp.experts" in name
        )
        weights = load_file(folder / "two" / "model.safetensors")
        del weights["model.layers.0.mlp.experts.3.up_proj.weight"]
        (folder / "part").mkdir()
        save_file(weights, folder / "part" / "model.safetensors")
        try:
            await engine.load_folder(folder / "part")
        except EngineError as error:
            seen.incomplete = str(error)
    finally:
        await engine.close()
    return seen


async def compare(seen, how, model, engine, before):
    """How far the engine is from `model`, from the one before, and how far `model` itself is in the engine's dtype."""
    theirs, ours = await engine.probe(TOKENS), scores(model, TOKENS)
    seen.off[how], seen.old[how] = difference(theirs, ours), difference(theirs, before)
    seen.rounded[how] = difference(scores(copy.deepcopy(model).to(seen.dtype), TOKENS), ours)


async def pushed(seen, model, engine, config, staging, first):
    """Three policies over the weights wire."""
    dtype, device = getattr(torch, config.model.dtype), device_of(config)
    specs = [Spec(name, tuple(p.shape), dtype) for name, p in model.named_parameters()]
    sender, held = Sender(specs, config.weights, 0, device, keys=server_keys("learner")), asyncio.Queue()

    async def where(known):
        if known:
            await asyncio.Event().wait()
        return sender.address

    async def follow():
        async for policy in Receiver(
            where, engine, "rollout-0", config.weights, keys=client_keys(server="learner")
        ).policies():
            await policy.load()
            engine.version = policy.version
            await policy.loaded()
            held.put_nowait(policy.version)

    following = asyncio.create_task(follow())
    following.add_done_callback(lambda task: held.put_nowait(task))  # ends the wait for a version
    try:
        for version in range(3):
            before = scores(model, TOKENS)
            step(model, first + version, dtype)
            sender.publish(TorchPolicy(model, dtype, device), version)
            assert await held.get() == version
            await compare(seen, f"{staging} {version}", model, engine, before)
        await asyncio.to_thread(sender.close, 10.0)
        seen.probes[staging] = sender.stats()
    finally:
        following.cancel()
        sender.close()
        await asyncio.wait([following])


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    return played(play(tmp_path_factory.mktemp("experts")))


def test_each_policy_is_what_transformers_computes(seen):
    """Were the experts of an earlier policy left in their kernels, it would be as far off as `old` is."""
    assert set(seen.off) == {*(f"{how} {version}" for how in ("full", "bucket") for version in range(3)), "folder"}
    assert max(seen.off.values()) < 1e-4 and min(seen.old.values()) > 0.05, (seen.off, seen.old)


def test_the_probe_agreed_with_every_policy(seen):
    for stats in seen.probes.values():
        assert stats["weights/version"] == 2 and stats["weights/failed"] == 0 and 0 < stats["weights/probe"] < 1e-4


def test_a_folder_has_its_experts_one_by_one_and_all_of_them_must_come(seen):
    assert len(seen.names) == 24 and seen.names[0].endswith("experts.0.down_proj.weight")
    assert "1 weights of vLLM's model were not received, model.layers.0.mlp.experts" in seen.incomplete


@pytest.mark.long
def test_experts_that_are_spread_are_refused_when_the_server_starts(tmp_path):
    async def said():
        try:
            await start(make_config(tiny_experts(tmp_path), enable_expert_parallel=True))
        except ConfigError as error:  # it holds the engine's sockets, until vLLM's are garbage
            return str(error)
        return "it starts"

    words = "rollout.engine.enable_expert_parallel: no policy can be loaded into experts that are spread over GPUs"
    assert words in played(said())
