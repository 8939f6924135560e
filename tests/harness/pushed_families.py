"""Plays policies of a tiny mixture of experts through a real vLLM engine, and finds out whether each load is right.

The engine starts from the weights of seed 0 on disk, by vLLM's own first load. Then policies come over the weights wire
and from folders. After each, texts are scored, and compared with transformers' eager model in float32. When the weights
of seed 0 come again, log-probabilities must have the bits of the first load: so every weight has come, in its place.
Weights of one kind alone (`layers.#.mlp.experts.#.up_proj`) must change them: so a kind that no load brings is seen.
Texts that the engine decodes are scored again in one prompt: so are weights that only decoding reads.
"""

import asyncio
import copy
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from configs.load import ConfigError
from configs.schema import Config
from learner.weights.receiver.follow import Receiver
from learner.weights.sender.publish import Sender
from rollout.engine.experts import reload_trial
from tests.harness.expert_families import Family, FamilyPolicy, kind_of, save
from tests.harness.keys import client_keys, server_keys
from tests.harness.one_gpu import device_of, start
from tests.harness.published import difference, scores
from tests.rollout.engine.test_expert_load import make_config

LENGTHS = (64, 23, 90)
DECODED = 24
EXTENSION = {"worker_extension_cls": "tests.harness.tried_worker.TriedWorker"}
AGAIN = "the first weights again"


@dataclass
class Seen:
    """What a family's engine did. Differences are means over tokens, in nats."""

    off: dict[str, float] = field(default_factory=dict)
    """After each load: from transformers in float32."""
    rounded: dict[str, float] = field(default_factory=dict)
    """How far transformers in the engine's dtype is from transformers in float32, with the weights of that load."""
    old: dict[str, float] = field(default_factory=dict)
    """How far the engine is from transformers with the weights before."""
    same: dict[str, float] = field(default_factory=dict)
    """After each load of the first weights: the largest difference from the first load; 0 is equal in each bit."""
    decoded: dict[str, float] = field(default_factory=dict)
    decoded_rounded: dict[str, float] = field(default_factory=dict)
    """The same two of decoded tokens."""
    silent: list[str] = field(default_factory=list)
    """Kinds of weights whose change alone changed nothing."""
    kinds: int = 0
    probes: dict[str, float] = field(default_factory=dict)
    trial: str = ""
    """What a server's own trial says."""
    repeated: float = 0.0
    """The difference of two scorings of the same weights."""
    way: str = ""
    start_s: float = 0.0

    def line(self, name: str) -> str:
        """All figures."""
        largest = {what: max(values.values(), default=0.0) for what, values in self._groups().items()}
        figures = ", ".join(f"{what} {value:.2g}" for what, value in largest.items())
        silent = f"; SILENT: {', '.join(self.silent)}" if self.silent else ""
        return (
            f"family {name}: loads {self.way}; {figures}, least old {min(self.old.values(), default=0.0):.2g}, "
            f"repeated {self.repeated:.2g}; {self.kinds} kinds{silent}; start {self.start_s:.0f} s; "
            f"trial: {self.trial}; off {rounded(self.off)} old {rounded(self.old)} same {rounded(self.same)}"
        )

    def _groups(self) -> dict[str, dict[str, float]]:
        return {
            "off": self.off,
            "rounded": self.rounded,
            "same": self.same,
            "decoded": self.decoded,
            "decoded rounded": self.decoded_rounded,
            "probe": self.probes,
        }


def rounded(values: dict[str, float]) -> dict[str, float]:
    return {what: float(f"{value:.2g}") for what, value in values.items()}


class Play:
    """One engine of some workers, and the models whose weights it gets."""

    def __init__(self, family: Family, folder: Path, where: SimpleNamespace, workers: int = 1) -> None:
        self.folder, self.where, self.seen, self.idle = folder, where, Seen(), family.idle
        self.workers = workers
        self.dtype: torch.dtype = getattr(torch, where.dtype)
        self.models = [family.model(seed) for seed in range(3)]
        source = torch.Generator().manual_seed(7)
        words = self.models[0].config.get_text_config().vocab_size
        self.texts = [torch.randint(2, words, (length,), generator=source).tolist() for length in LENGTHS]
        self.given = dict(family.engine) if where.device == "cuda" else {}
        self.before, self.first, self.engine = 0, list[list[float]](), None

    def config(self, staging: str = "full") -> Config:
        engine = {**self.given, "load_format": "auto", "kv_cache_memory_bytes": 256 << 20}
        made = make_config(self.folder / "first", staging, self.where, **engine)
        weights = made.weights.model_copy(update={"probe_tolerance": 10.0})
        model = made.model.model_copy(update={"text_alone": bool(self.idle)})
        rollout = made.rollout.model_copy(update={"tensor_parallel": self.workers})
        return made.model_copy(update={"weights": weights, "model": model, "rollout": rollout})

    async def run(self) -> Seen:
        """Play all scenes; returns what was seen."""
        from rollout.engine import vllm_engine  # vLLM takes seconds to import

        self.policy(0).save(self.folder / "first")
        arguments, began = vllm_engine.engine_arguments, time.monotonic()
        with patch.object(vllm_engine, "engine_arguments", lambda *given: arguments(*given) | EXTENSION):
            self.engine = await start(self.config())
        self.seen.start_s = time.monotonic() - began
        try:
            self.first = await self.score()
            self.seen.repeated = largest(await self.score(), self.first)
            await self.compare("disk", 0)
            self.seen.way, *_ = await self.engine.collective("rl_way", timeout_s=60)
            await self.push("full", (1, 2, 0))
            await self.push("bucket", (2, 1, 0))
            await self.change_kinds()
            await self.try_reloads()
        finally:
            await self.engine.close()
        return self.seen

    def policy(self, number: int, device: Any = "cpu") -> FamilyPolicy:
        return FamilyPolicy(self.models[number], self.dtype, device)

    async def score(self) -> list[list[float]]:
        return [await self.engine.probe(text) for text in self.texts]

    async def push(self, staging: str, numbers: Sequence[int]) -> None:
        """Publish models over the weights wire."""
        config = self.config(staging)
        async with self.following(config) as (sender, held):
            for version, number in enumerate(numbers):
                sender.publish(self.policy(number, device_of(config)), version)
                loaded = await asyncio.wait_for(held.get(), 120)
                if isinstance(loaded, asyncio.Task):
                    loaded.result()
                await self.compare(f"{staging} {version}", number)
            await asyncio.to_thread(sender.close, 10.0)
            self.seen.probes[staging] = sender.stats().get("weights/probe", -1.0)

    @asynccontextmanager
    async def following(self, config: Config) -> AsyncIterator[tuple[Sender, "asyncio.Queue[Any]"]]:
        """A sender, and the versions that the engine has loaded."""
        device, held = device_of(config), asyncio.Queue[Any]()
        specs = self.policy(0, device).specs()
        sender = Sender(
            specs,
            config.weights,
            0,
            device,
            keys=server_keys("learner"),
            probe=self.texts[0],
            frozen=[spec.name for spec in specs if self.idle and spec.name.startswith(self.idle)],
        )

        async def where(known: str | None) -> str:
            if known:
                await asyncio.Event().wait()
            return sender.address

        async def follow() -> None:
            keys = client_keys(server="learner")
            async for policy in Receiver(where, self.engine, "rollout-0", config.weights, keys=keys).policies():
                await policy.load()
                self.engine.version = policy.version
                await policy.loaded()
                held.put_nowait(policy.version)

        following = asyncio.create_task(follow())
        following.add_done_callback(held.put_nowait)  # an error ends the wait for a version
        try:
            yield sender, held
        finally:
            following.cancel()
            sender.close()
            await asyncio.wait([following])

    async def compare(self, how: str, number: int) -> None:
        """Score and decode with the weights that the engine has now, those of model `number`."""
        seen, model = self.seen, self.models[number]
        narrow = copy.deepcopy(model).to(self.dtype)
        found = await self.score()
        theirs = [scores(model, text) for text in self.texts]
        seen.off[how] = mean(found, theirs)
        seen.rounded[how] = mean([scores(narrow, text) for text in self.texts], theirs)
        if number != self.before:
            seen.old[how] = mean(found, [scores(self.models[self.before], text) for text in self.texts])
        if number == 0:
            seen.same[how] = largest(found, self.first)
        self.before = number
        prompt = self.texts[1]
        decoded = await self.engine.generate(prompt, DECODED, 1.0)
        text = prompt + decoded.tokens
        begun, exact = len(prompt) - 1, scores(model, text)
        seen.decoded[how] = difference(list(decoded.logprobs), exact[begun:])
        seen.decoded_rounded[how] = difference(scores(narrow, text)[begun:], exact[begun:])

    async def change_kinds(self) -> None:
        """Load folders in which one kind of weight is another model's, and last the first weights."""
        ours, theirs = self.policy(0).tensors(), self.policy(1).tensors()
        kinds = sorted({kind_of(name) for name in ours if not self.idle or not name.startswith(self.idle)})
        self.seen.kinds = len(kinds)
        for number, kind in enumerate(kinds):
            mixed = {name: theirs[name] if kind_of(name) == kind else tensor for name, tensor in ours.items()}
            await self.engine.load_folder(save(mixed, self.folder / f"kind {number}"))
            if largest(await self.score(), self.first) == 0.0:
                self.seen.silent.append(kind)
        await self.engine.load_folder(save(ours, self.folder / "again"))
        await self.compare(AGAIN, 0)

    async def try_reloads(self) -> None:
        """As a server would when it starts."""
        kinds, *_ = await self.engine.collective("rl_kinds", timeout_s=60)
        try:
            await reload_trial.try_reloads(self.engine, kinds)
            self.seen.trial = f"all {len(kinds)} kinds hold"
        except ConfigError as error:
            self.seen.trial = str(error)


def mean(found: list[list[float]], theirs: list[list[float]]) -> float:
    """Mean absolute difference over the tokens of all texts."""
    return difference([x for one in found for x in one], [x for one in theirs for x in one])


def largest(found: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(a - b) for one, other in zip(found, theirs, strict=True) for a, b in zip(one, other, strict=True))
