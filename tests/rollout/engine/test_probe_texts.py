"""The first probe of a run with the real vLLM: what vLLM leaves out of the logits ends the server at version 0."""

import asyncio
from types import SimpleNamespace

import pytest

from examples.countdown.make_model import make_tokenizer
from learner.__main__ import open_weights_wire
from learner.model.policy import Policy
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.staged import WeightsError
from tests.harness.engines import dense_config, played
from tests.harness.keys import client_keys, give_keys
from tests.harness.tiny_gemma import tiny_gemma
from tests.harness.world import LEARNER, alone

pytestmark = [pytest.mark.vllm, pytest.mark.long, pytest.mark.timeout(900)]
SOFTCAP, ATTENTION_SOFTCAP = 15.0, 50.0


def save(folder, softcap):
    """A random Gemma 2, the same whatever its softcap, with a tokenizer that knows digits."""
    tiny_gemma(final_logit_softcapping=softcap, attn_logit_softcapping=ATTENTION_SOFTCAP).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)


def config_of(folder, dtype):
    """The default tolerance, and a folder of the run with keys."""
    config = dense_config(folder)
    give_keys(folder)
    return config.model_copy(
        update={
            "run": config.run.model_copy(update={"folder": folder.parent, "name": folder.name}),
            "model": config.model.model_copy(update={"dtype": dtype}),
            "weights": config.weights.model_copy(update={"probe_tolerance": None}),
            "rollout": config.rollout.model_copy(update={"engine": {"kv_cache_memory_bytes": 64 << 20}}),
        }
    )


async def first_probe(engine, config, mesh, asked):
    """Publish version 0 of the learner's model to the server; returns the difference of the first text. Raises
    WeightsError."""
    policy = Policy(config.model, LEARNER, mesh)
    sender = open_weights_wire(config, policy, mesh, None)
    probing = SimpleNamespace(probe=None, collective=engine.collective, paused=engine.paused)

    async def probe(tokens, images=()):
        asked.append(len(tokens))
        return await engine.probe(tokens, images)

    async def where(known):
        if known:
            await asyncio.Event().wait()
        return sender.address

    probing.probe = probe
    keys = client_keys(server="learner")
    policies = Receiver(where, probing, "rollout-0", config.weights, keys=keys).policies()
    try:
        sender.publish(policy, 0)
        staged = await anext(policies)
        await staged.load()
        engine.version = staged.version
        await staged.loaded()
        await asyncio.to_thread(sender.close, 10.0)
        return sender.stats()["weights/probe"]
    finally:
        await policies.aclose()
        sender.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_healthy_start_passes_and_a_left_out_softcap_ends_the_server(tmp_path, dtype):
    save(tmp_path / "without", None)
    save(tmp_path / "with", SOFTCAP)

    async def scene(mesh):
        from rollout.engine.vllm_engine import Engine

        healthy, capped = (config_of(tmp_path / name, dtype) for name in ("without", "with"))
        engine, asked = await Engine.start(healthy, seed=1), []
        try:
            near = await first_probe(engine, healthy, mesh, asked)
            with pytest.raises(WeightsError) as error:
                await first_probe(engine, capped, mesh, [])
            return near, asked, str(error.value), error.value.final  # a traceback would keep the engine
        finally:
            await engine.close()

    with alone() as mesh:
        near, asked, error, final = played(scene(mesh))
    assert near < (1e-4 if dtype == "float32" else 0.05)
    assert len(asked) == 3 and max(asked) > 128, "all texts, one of them longer than a short window"
    assert final and "the probe's log-probabilities differ by" in error
    assert "give both ends the same model.path" in error
