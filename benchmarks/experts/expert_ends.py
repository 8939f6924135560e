"""The two ends of a mixture of experts: `python -m benchmarks.experts.expert_ends learner|server JSON`.

Like `benchmarks/weights/ends.py`, on whose parts it stands: each reads commands from stdin and answers on stdout with
lines of JSON that begin with @; its parent is the benchmark. The learner is the real policy with random weights,
without an optimizer, and the real sender; the server is the real engine and receiver. What the server sampled travels
in a file, packed as for the buffer, and the learner computes its log-probabilities anew.
"""

import asyncio
import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore  # type: ignore[attr-defined]

from benchmarks.adapters.adapter_ends import AdapterServing
from benchmarks.vision.push_ends import update
from benchmarks.weights.ends import GPU, commands_from_stdin, run_end, say
from benchmarks.weights.traffic import PROMPT_TOKENS, vocabulary_of
from buffer.keys import load_server_keys
from buffer.wire.sample import Sample
from configs.inner_command import inner_words
from configs.schema import Config
from learner.model.experts.router import Router
from learner.model.policy import Policy
from learner.train.batch import alone, documents_of, pack

PROBED = 64
"""Tokens of the text by which the learner tells how far two versions are from each other."""


@contextmanager
def choices(policy: Policy) -> Iterator[list[Tensor]]:
    """The experts that the routers take inside, layer by layer: [tokens, k] each."""
    taken: list[Tensor] = []
    routers = [module for module in policy.modules() if isinstance(module, Router)]
    hooks = [router.register_forward_hook(lambda _, __, out: taken.append(out[2])) for router in routers]
    try:
        yield taken
    finally:
        for hook in hooks:
            hook.remove()


def mismatch_of(policy: Policy, samples: Sequence[Sample]) -> dict[str, float]:
    """How far the learner's log-probabilities are from those of the server that sampled, in nats a sampled token:
    `live` with the learner's own experts and, where samples have routes, `replayed` with theirs; k3 likewise.

    And how many of the routes are not the learner's own choice: of all single choices, of the layers of tokens, and of
    tokens, which differ where a layer does.
    """
    apart: dict[str, list[Tensor]] = {"live": [], "replayed": []}
    strange: list[Tensor] = []
    for sample in samples:
        routes = None if sample.routes is None else [sample.routes.numpy()]
        row = policy.place(pack(alone(documents_of([sample], [0], routes=routes)[0])))
        with choices(policy) as own:
            apart["live"].append((policy.score(replace(row, routes=None)) - row.behaviour)[row.scored])
        if row.routes is not None:
            apart["replayed"].append((policy.score(row) - row.behaviour)[row.scored])
            alike = (row.routes.long()[..., None] == torch.stack(own)[:, :, None]).any(-1)
            strange.append(~alike[:, :-1])  # of the last token no server has any
    found = {}
    for name, parts in apart.items():
        if parts:
            difference = torch.cat(parts).double()
            found[f"{name}/dlogp"] = float(difference.abs().mean())
            found[f"{name}/k3"] = float((difference.exp() - 1 - difference).mean())
    if strange:
        differ = torch.cat(strange, dim=1)
        found["choices"] = float(differ.double().mean())
        found["layers"] = float(differ.any(-1).double().mean())
        found["tokens"] = float(differ.any(-1).any(0).double().mean())
    return found


def learner(config: Config) -> None:
    """The learner. Its commands: `updates N GAP`, `compare FILE`, `stop`."""
    from torch.distributed.device_mesh import init_device_mesh

    from learner.weights.sender.publish import Sender

    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo", store=HashStore(), rank=0, world_size=1)
    policy = Policy(
        config.model, config.learner, init_device_mesh("cuda" if GPU else "cpu", (1,)), random=True, replay=True
    )
    keys = load_server_keys(config.run.path / "keys", "learner")
    wire = Sender(policy.weight_specs(), config.weights, 0, policy.device, keys=keys)
    say(address=wire.address, bytes=wire.stats()["weights/bytes"])
    draw, vocabulary = random.Random(0), vocabulary_of(config.model.path)
    text = [draw.randrange(3, vocabulary) for _ in range(PROBED)]
    for line in sys.stdin:
        command, *words = line.split()
        if command == "updates":
            updates = []
            for version in range(int(words[0])):
                before = policy.logprobs_of(text)
                found = update(policy, wire, version, float(words[1]))
                pairs = zip(before, policy.logprobs_of(text), strict=True)
                updates.append({**found, "stale": sum(abs(old - new) for old, new in pairs) / len(before)})
            say(updates=updates)
        elif command == "compare":
            packed = msgpack.unpackb(Path(words[0]).read_bytes())
            say(mismatch=mismatch_of(policy, [Sample.unpack(sample) for sample in packed]))
        else:
            break
    wire.close()


async def started(config: Config) -> tuple[Any, str]:
    """The engine with routes, or where this vLLM does not return them without; and its words on that."""
    from rollout.engine.vllm_engine import Engine

    try:
        return await Engine.start(config, seed=1), ""
    except ValueError as error:
        why = str(error).strip().splitlines()[0]
    rollout = config.rollout.model_copy(update={"routing_replay": False})
    return await Engine.start(config.model_copy(update={"rollout": rollout}), seed=1), why


async def sampled(engine: Any, prompt: list[int], length: int) -> bytes:
    """One sample of `length` tokens, as a server puts it into the buffer."""
    from rollout.episodes.recorded_routes import RecordedRoutes
    from rollout.rewards.convention import Score
    from rollout.tasks import Trajectory

    trajectory, routes = Trajectory(prompt), RecordedRoutes()
    at = routes.continued(prompt)
    completion = await engine.generate(prompt, length, 1.0)
    trajectory.take(replace(completion, routes=None))
    if completion.routes is not None:
        routes.add(at, completion)
        trajectory.routes = routes.of(trajectory)
    return trajectory.sample(Score(0.0), "").pack()


async def server(config: Config, samples: int) -> None:
    """The server. Its commands: `follow ADDRESS`, `sample FILE`, `report`."""
    engine, why = await started(config)
    commands, serving = commands_from_stdin(), AdapterServing(engine, config)
    say(started=True, no_routes=why)
    draw, vocabulary = random.Random(1), vocabulary_of(config.model.path)
    prompts = [[draw.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)] for _ in range(samples)]
    async with asyncio.TaskGroup() as tasks:
        while True:
            verb, *words = await commands.get()
            if verb == "follow":
                tasks.create_task(serving.follow(words[0]))
            elif verb == "sample":
                length = config.sampling.max_tokens
                made = await asyncio.gather(*(sampled(engine, prompt, length) for prompt in prompts))
                Path(words[0]).write_bytes(msgpack.packb(made))
                say(sampled=len(made))
            else:
                say(events=serving.events)


if __name__ == "__main__":
    inner_words("ROLE", "CONFIG")
    run_end(learner, server)
