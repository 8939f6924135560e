"""Policies that see, from the learner over the weights wire into the real vLLM on a CPU; probes with a picture.

The whole scenario is played once for each architecture; each test looks at one aspect.
"""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoTokenizer

from buffer.data.images import ImageFormat
from learner.__main__ import open_weights_wire
from learner.model.policy import Policy
from learner.saved import export
from learner.train import pictures
from learner.train.pictures import shown_row
from learner.weights.probe import shown_tokens
from learner.weights.protocol import Go
from learner.weights.receiver.follow import Receiver
from learner.weights.receiver.staged import WeightsError
from rollout.engine import vllm_engine
from tests.harness.engines import played, vision_config
from tests.harness.keys import client_keys, give_keys
from tests.harness.scenes import intercept
from tests.harness.tiny_vlm import tiny_vlm
from tests.harness.world import LEARNER, alone

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]
TOWER = "model.visual.blocks.1.attn.proj.weight"


def make_config(folder, kind, freeze=(), engine=None, **weights):
    wire = {"bucket_mib": 1, "probe_every": 1, "probe_tolerance": 1e-3, "timeout_s": 60} | weights
    give_keys(folder)
    return vision_config(
        folder,
        kind,
        run={"folder": str(folder.parent), "name": folder.name},
        model={"freeze": list(freeze)},
        weights=wire,
        rollout={"engine": engine or {}},
    )


class Corrupting:
    """`policy`, of which the tower's weight TOWER is published with one row negated."""

    def __init__(self, policy):
        self.policy, self.logprobs_of = policy, policy.logprobs_of

    def full_weights(self, without=()):
        for name, tensor in self.policy.full_weights(without):
            if name == TOWER:
                tensor = tensor.clone()
                tensor[3].neg_()
            yield name, tensor


class Pushes:
    """An engine, and learners that push policies into it one after another."""

    def __init__(self, folder, kind, engine, mesh):
        self.folder, self.kind, self.engine, self.mesh = folder, kind, engine, mesh

    @asynccontextmanager
    async def learner(self, freeze=(), sees=True, **weights):
        """A learner that has just started, and the engine as its only server. Yields `push(version)`, which changes
        what is trained, publishes, and waits; it returns the probe's difference."""
        config = make_config(self.folder, self.kind, freeze, **weights)
        form = ImageFormat.of(config.model.path, config.data)
        torch.manual_seed(0)
        policy = Policy(config.model, LEARNER, self.mesh)
        sender = open_weights_wire(config, policy, self.mesh, form if sees else None)
        plan, sent, held = sender._copies.plan, [], asyncio.Queue()

        def note(member, message):
            if isinstance(message, Go):
                sent.append("whole" if message.plan == plan.digest else "trained")
            return message

        intercept(sender, note)
        follow = asyncio.create_task(self.take(sender, config, form, held))
        follow.add_done_callback(held.put_nowait)

        async def push(version, publish=policy):
            change(policy, version)
            sender.publish(publish, version)
            done = await held.get()
            if isinstance(done, asyncio.Task):
                done.result()
            while sender.stats().get("weights/probe_version") != version:
                await asyncio.sleep(0.01)
            return sender.stats()["weights/probe"]

        try:
            yield SimpleNamespace(push=push, policy=policy, sent=sent, plan=plan)
        finally:
            follow.cancel()
            sender.close()
            await asyncio.wait([follow])

    async def take(self, sender, config, form, held):
        """`rollout.loop.follow`, which also puts each version into `held`."""

        async def where(known):
            if known:
                await asyncio.Event().wait()
            return sender.address

        async for policy in Receiver(
            where, self.engine, "rollout-0", config.weights, form=form, keys=client_keys(server="learner")
        ).policies():
            await policy.load()
            self.engine.version = policy.version
            await policy.loaded()
            held.put_nowait(policy.version)


@torch.no_grad()
def change(policy, version):
    """As an optimizer's step, a large one, does: what is frozen stays."""
    draw = torch.Generator().manual_seed(version)
    for parameter in policy.model.parameters():
        if parameter.requires_grad:
            local = parameter.to_local()
            local.add_(0.05 * torch.randn(local.shape, generator=draw))


def exported(folder, kind, mesh):
    """A policy that has been trained a little, written into `folder` as a checkpoint's export is."""
    initial = folder.with_name("initial")
    tiny_vlm(initial, kind, deviation=0.1, state=128)
    policy = Policy(make_config(initial, kind).model, LEARNER, mesh)
    change(policy, 1)
    export.write(export.collect(policy), make_config(initial, kind).model, folder)
    return policy


async def unlike(engine, policy, config):
    """Largest difference of the two's log-probabilities of a text behind a picture."""
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    tokens, image = shown_tokens(tokenizer, 100, ImageFormat.of(config.model.path, config.data))
    behind = image.start + image.picture.num_tokens
    want, got = policy.logprobs_of(shown_row([(tokens, [image])])), await engine.probe(tokens, [image])
    return max(abs(a - b) for a, b in zip(want[behind:], got[behind:], strict=True))


async def play(engine, folder, kind, mesh):
    """The scenario; returns what happened."""
    exported(folder, kind, mesh)
    seen, pushes = SimpleNamespace(probes={}, sent={}, errors={}), Pushes(folder, kind, engine, mesh)
    for name, keys in CASES.items():
        async with pushes.learner(**keys) as learner:
            seen.probes[name] = [await learner.push(version) for version in (1, 2, 3)]
            seen.sent[name] = learner.sent
    async with pushes.learner(sees=False) as learner:
        seen.text_only = await learner.push(1, Corrupting(learner.policy))
    for name, keys in {"frozen": {"freeze": ["vision"]}, "trained": {}}.items():
        async with pushes.learner(**keys) as learner:
            with pytest.raises(WeightsError) as error:
                await learner.push(1, Corrupting(learner.policy))
            seen.errors[name] = str(error.value)
    async with pushes.learner(freeze=["vision"]) as learner:
        seen.again = await learner.push(1)
    return seen


async def play_export(folder, kind, mesh):
    """Differences from the policy that was exported, and from another, of an engine that has read the export itself."""
    from rollout.engine.vllm_engine import Engine

    policy, config = exported(folder, kind, mesh), make_config(folder, kind, engine={"load_format": "auto"})
    engine = await Engine.start(config, seed=1)
    try:
        loaded = await unlike(engine, policy, config)
        change(policy, 2)
        return loaded, await unlike(engine, policy, config)
    finally:
        await engine.close()


async def play_pushed(folder, kind, mesh, after=lambda: None):
    """Differences of a model after two pushes, the same after `after`, and of another policy."""
    from rollout.engine.vllm_engine import Engine

    exported(folder, kind, mesh)
    config = make_config(folder, kind, engine={"kv_cache_memory_bytes": 64 << 20})
    engine = await Engine.start(config, seed=1)
    try:
        async with Pushes(folder, kind, engine, mesh).learner(probe_tolerance=1.0) as learner:
            pushed = [await learner.push(version) for version in (1, 2)]
            near = await unlike(engine, learner.policy, config)
            after()
            then = await unlike(engine, learner.policy, config)
            change(learner.policy, 3)
            return max(*pushed, near), then, await unlike(engine, learner.policy, config)
    finally:
        await engine.close()


CASES = {
    "all trained": {},
    "tower frozen": {"freeze": ["vision"]},
    "projector frozen, streamed": {"freeze": ["projector"], "staging": "bucket"},
    "tower and projector frozen, streamed": {"freeze": ["vision", "projector"], "staging": "bucket"},
    "tower frozen, through files": {"freeze": ["vision", "projector"], "transport": "safetensors"},
}
"""Each with a learner of its own, whose versions have the same numbers as those of the one before."""


@pytest.fixture(scope="module")
def seen(vision_engine, tmp_path_factory):
    torch.set_num_threads(1)
    folder, kind = tmp_path_factory.mktemp("run") / vision_engine.kind, vision_engine.kind
    with alone() as mesh:
        return vision_engine.play(lambda engine: play(engine, folder, kind, mesh))


def start_on_a_cpu(monkeypatch):
    """Let Gemma 3's server start on a CPU, and have the learner compute images as it does there."""
    monkeypatch.setattr(vllm_engine, "unserved_shapes", lambda *_: ())
    monkeypatch.setattr(pictures, "_blocks", lambda placed: None)


@pytest.mark.long
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_vllm_s_own_loader_reads_an_export(kind, tmp_path, monkeypatch):
    """As `vllm serve` does, before anything is pushed; the control is another policy."""
    torch.set_num_threads(1)
    if kind == "gemma3":
        start_on_a_cpu(monkeypatch)
    with alone() as mesh:
        loaded, of_another = played(play_export(tmp_path / kind, kind, mesh))
    assert loaded < 1e-4 and of_another > 0.1


@pytest.mark.long
def test_qwen3_5_gets_policies_and_sees_in_bfloat16(tmp_path):
    """As near as rounding to bfloat16 lets two implementations be; the control is a policy that was not pushed."""
    torch.set_num_threads(1)
    with alone() as mesh:
        near, _, of_another = played(play_pushed(tmp_path / "run", "qwen3_5", mesh))
    assert near < of_another / 3


@pytest.mark.long
def test_gemma_3_gets_policies_and_sees_what_is_before(tmp_path, monkeypatch):
    """A server on a CPU is refused, because no token of an image sees those after it there. A learner that computes
    images so as well agrees with it: tower, projector and pixels are the same on both ends."""
    torch.set_num_threads(1)
    blocks = pictures._blocks
    start_on_a_cpu(monkeypatch)

    def see_both_ways():
        pictures._blocks = blocks  # monkeypatch undoes it as it undoes its own

    with alone() as mesh:
        near, mutual, of_another = played(play_pushed(tmp_path / "run", "gemma3", mesh, see_both_ways))
    assert near < 1e-4 and mutual > 0.01 and of_another > 0.1


def test_the_probe_with_a_picture_agrees_after_every_push(seen):
    worst = {name: max(differences) for name, differences in seen.probes.items()}
    assert max(worst.values()) < 1e-4, worst
    assert seen.again < 1e-4, "a learner's policy is right again after a wrong one"


def test_what_is_frozen_is_pushed_once_by_each_learner(seen):
    assert seen.sent.pop("all trained") == ["whole"] * 3
    assert set(map(tuple, seen.sent.values())) == {("whole", "trained", "trained")}


def test_a_wrong_tower_is_found_by_the_picture_alone(seen):
    assert seen.text_only < 1e-4
    assert set(seen.errors) == {"frozen", "trained"}
    for error in seen.errors.values():
        assert "the probe's log-probabilities differ by" in error and "weights.probe_tolerance 0.001" in error
