"""The two ends of a push: `python -m benchmarks.vision.push_ends learner|server JSON`.

Like `benchmarks/weights/ends.py`, on whose parts it stands: each reads commands from stdin and answers on stdout with
lines of JSON that begin with @. Every version is random in all that is trained, the tower too, so that the probe, which
has a picture, tells right weights from wrong ones after each push. The server's traffic shows photos, which it has to
encode anew after a push unless the tower is frozen.
"""

import asyncio
import random
import sys
import time
from collections.abc import Iterator
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.weights.ends import GPU, Serving, commands_from_stdin, run_end, say, served, synchronize
from benchmarks.weights.known import local
from benchmarks.weights.traffic import RequestTraffic, vocabulary_of
from buffer.data.images import ImageFormat, Picture, SeenImage
from configs.checks import max_sample_tokens
from configs.inner_command import inner_words
from configs.schema import Config
from learner.weights.probe import shown_tokens, tokens_of

PROMPTS = 64
"""Rows of the data that the traffic repeats."""
SETTLE_S = 5.0


def form_of(config: Config) -> ImageFormat:
    """How the model sees images."""
    form = ImageFormat.of(config.model.path, config.data, tuple(config.model.freeze))
    assert form is not None
    return form


def probes_of(config: Config) -> tuple[list[int], list[int], SeenImage]:
    """A text alone; and a text behind a picture, with that picture."""
    from rollout.episodes.prompts import load_tokenizer

    tokenizer, longest = load_tokenizer(config), max_sample_tokens(config) - 1
    return tokens_of(tokenizer, longest), *shown_tokens(tokenizer, longest, form_of(config))


def learner(config: Config) -> None:
    """The learner. Commands: `served`, `probes`, `updates N GAP`, `stop`."""
    from torch.distributed.device_mesh import init_device_mesh

    from learner.__main__ import open_weights_wire
    from learner.model.policy import Policy
    from learner.train.pictures import shown_row

    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", store=HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cuda" if GPU else "cpu", (1,))
    policy = Policy(config.model, config.learner, mesh, random=True)
    wire: Any = open_weights_wire(config, policy, mesh, form_of(config))
    whole = sum(prod(spec.shape) * spec.dtype.itemsize for spec in policy.weight_specs())
    say(address=wire.address, bytes=wire.stats()["weights/bytes"], whole=whole)
    wire.publish(policy, 0)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "served":
            served(wire, 0)
            say(served=wire.stats().get("weights/probe", -1.0))
        elif command == "probes":
            text, tokens, image = probes_of(config)
            behind = policy.logprobs_of(shown_row([(tokens, [image])]))[image.start + image.picture.num_tokens :]
            say(probes={"text": policy.logprobs_of(text), "picture": behind})
        elif command == "updates":
            versions = range(1, 1 + int(words[0]))
            say(updates=[update(policy, wire, version, float(words[1])) for version in versions])
        else:
            break
    wire.close()
    say(ended=True)


def update(policy: Any, wire: Any, version: int, gap_s: float) -> dict[str, float]:
    """Publish a version and wait until the server has loaded it; returns its timings."""
    renew(policy, version)
    synchronize()
    started = time.monotonic()
    wire.publish(policy, version)
    published = time.monotonic()
    served(wire, version)
    stats = {key: value for key, value in wire.stats().items() if "rollout" not in key}
    time.sleep(gap_s)
    return {**stats, "version": version, "started": started, "publish_s": published - started}


@torch.no_grad()
def renew(policy: Any, version: int) -> None:
    """Other random matrices for all that is trained."""
    draw = torch.Generator(policy.device).manual_seed(version)
    spread = getattr(policy.model.config.get_text_config(), "initializer_range", 0.02)
    for parameter in policy.model.parameters():
        if parameter.requires_grad and parameter.dim() > 1:
            local(parameter).normal_(0.0, spread, generator=draw)


class PhotoTraffic(RequestTraffic):
    """Sequences that continue rows of the data, those of a group one after the other."""

    def __init__(self, engine: Any, config: Config, running: int, length: int) -> None:
        super().__init__(engine, vocabulary_of(config.model.path), running, length)
        self._prompts, self._group, self._asked = list(prompts_of(config)), config.batch.samples, 0

    def next_prompt(self, draw: random.Random) -> tuple[list[int], list[Any]]:
        """The next row once all samples of the last one were asked for."""
        self._asked += 1
        return self._prompts[self._asked // self._group % len(self._prompts)]

    def _wrong_stamps(self, completion: Any, length: int) -> int:
        return 0  # random weights do not tell their version


def prompts_of(config: Config) -> Iterator[tuple[list[int], list[Any]]]:
    """Tokens and images of the first rows of the data."""
    import pyarrow.parquet as pq

    from rollout.episodes.prompts import Prompts, load_tokenizer
    from rollout.tasks.trajectory import PlacedImage

    form = form_of(config)
    prompts = Prompts(load_tokenizer(config), config, form)
    for row in pq.read_table(str(config.data.train)).slice(0, PROMPTS).to_pylist():
        row, pictures = prompts.with_pictures(row | {"images": [image["bytes"] for image in row["images"]]})
        tokens = prompts.encode(row, pictures)
        starts = [tokens.index(form.image_token)] if pictures else []  # one image a row
        yield tokens, [PlacedImage(start, picture) for start, picture in zip(starts, pictures, strict=True)]


async def server_probes(engine: Any, config: Config) -> dict[str, list[float]]:
    """The server's log-probabilities of the probes, and those behind another picture of the same size."""
    text, tokens, (start, picture) = probes_of(config)
    other = Picture(255 - picture.pixels, picture.format)
    behind = start + picture.num_tokens  # as the sender's probe is cut (`learner/weights/probe.py`)
    return {
        "text": await engine.probe(text),
        "picture": (await engine.probe(tokens, [SeenImage(start, picture)]))[behind:],
        "other": (await engine.probe(tokens, [SeenImage(start, other)]))[behind:],
    }


async def server(config: Config, name: str, running: int, length: int) -> None:
    """The server: its first command is the learner's address, then `probes`, `load`, `stop`."""
    from rollout.engine.vllm_engine import Engine

    engine, commands = await Engine.start(config, seed=1), commands_from_stdin()
    say(started=name)
    traffic = PhotoTraffic(engine, config, running, length)
    serving = Serving(engine, config, name, traffic, form_of(config))
    serving.idle_until = 0
    address = (await commands.get())[1]
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(serving.follow(address))]
        await serving.first.wait()
        while (command := (await commands.get())[0]) != "stop":
            if command == "probes":
                say(probes=await server_probes(engine, config))
            else:
                others += [tasks.create_task(serving.lag.watch()), *traffic.start(tasks)]
                await asyncio.sleep(SETTLE_S)
                serving.lag.busy()
                say(serving=name)
        serving.busy = serving.lag.busy()
        for other in others:
            other.cancel()
    say(**serving.report())
    await engine.close()


if __name__ == "__main__":
    inner_words("ROLE", "CONFIG")
    run_end(learner, server)
