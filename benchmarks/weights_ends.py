"""The processes of `benchmarks.weights`: `python -m benchmarks.weights_ends learner|server|limit JSON`.

Each takes orders as words on stdin and answers with JSON lines that begin with @ on stdout; its parent is the
benchmark. A learner is the real policy under FSDP with random weights (no optimizer, which the wire never touches) and
the real sender; a server is the real engine and receiver. At odd versions the last norm is 0, so every token has
log-probability -ln(vocabulary) exactly: each token tells whether its stamp is right.
"""

import asyncio
import itertools
import json
import math
import os
import random
import sys
import threading
import time
from collections.abc import AsyncGenerator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import uvloop

from configs.schema import Config

PEER_PORT = int(os.environ.get("MASTER_PORT", "29601")) + 10
WINDOW_S = 0.5
GPU = torch.cuda.is_available()


def say(**fields: Any) -> None:
    """One answer."""
    print("@" + json.dumps(fields), flush=True)


def learner(config: Config) -> None:
    """A rank: `updates N GAP`, `peer WORLD`, `push`, `stop`."""
    from torch.distributed.device_mesh import init_device_mesh

    from learner.policy import Policy
    from learner.weights.sender import Follower, Sender

    rank = int(os.environ["RANK"])
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    mesh = init_device_mesh("cuda" if GPU else "cpu", (dist.get_world_size(),))
    policy = Policy(config.model, config.learner, mesh, random=True)
    specs = policy.weight_specs()
    wire = Sender(specs, config.weights, 0, policy.device) if rank == 0 else Follower(specs, config.weights, 0)
    if isinstance(wire, Sender):
        say(address=wire.address, bytes=wire.stats()["weights/bytes"])
    wire.publish(policy, 0)
    group: Any = None
    for line in sys.stdin:
        order, *words = line.split()
        if order == "updates":
            rows = [update(policy, wire, version, float(words[1])) for version in range(1, 1 + int(words[0]))]
            say(updates=rows)
        elif order == "peer":
            from vllm.distributed.weight_transfer import nccl_engine

            peer: Any = nccl_engine.NCCLWeightTransferEngine
            if rank == 0:
                where = {"master_address": "127.0.0.1", "master_port": PEER_PORT, "world_size": int(words[0])}
                group = peer.trainer_init(where)
            say(joined=True)
        elif order == "push":
            if rank == 0:
                peer.trainer_send_weights(policy.full_weights(), {"group": group, "packed": True})
            else:
                for _ in policy.full_weights():
                    pass
            torch.cuda.synchronize()
            say(sent=True)
        else:
            break
    wire.close()
    say(ended=True)


def update(policy: Any, wire: Any, version: int, gap_s: float) -> dict[str, float]:
    """Publish a version and wait until all servers have it; its times."""
    norm = policy.model.get_decoder().norm.weight
    with torch.no_grad():
        norm.to_local().fill_(1.0 - version % 2)
    if GPU:
        torch.cuda.synchronize()
    started = time.monotonic()
    wire.publish(policy, version)
    published = time.monotonic()
    deadline = published + 100.0
    while "weights/servers" in wire.stats() and wire.stats().get("weights/version") != version:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)  # the learner would be training
    stats = {key: value for key, value in wire.stats().items() if "rollout" not in key}
    time.sleep(gap_s)
    return {**stats, "version": version, "started": started, "publish_s": published - started}


class Traffic:
    """Requests that never end, and what can be said of each of their tokens."""

    def __init__(self, engine: Any, vocabulary: int, running: int, length: int) -> None:
        self.engine, self.running, self.length = engine, running, length
        self.flat = -math.log(vocabulary)
        self.stopping = False
        self.finished = self.lost = self.early = self.late = self.tokens = 0
        self.arrivals: list[tuple[float, int]] = []

    async def request(self, number: int) -> None:
        draw = random.Random(number)
        while not self.stopping:
            prompt = [draw.randrange(1000, 40000) for _ in range(128)]
            first = self.length if self.finished else draw.randrange(self.length // 8, self.length)
            try:
                completion = await self.engine.generate(prompt, first, 1.0)
            except RuntimeError as error:
                self.lost += 1
                print(f"lost: {error}", file=sys.stderr, flush=True)
                continue
            self.finished += 1
            self.judge(completion, first)

    def judge(self, completion: Any, length: int) -> None:
        """Count tokens whose log-probability belies their version."""
        if completion.finish == "length" and len(completion.tokens) != length:
            self.lost += 1
        self.tokens += len(completion.tokens)
        for logprob, version in zip(completion.logprobs, completion.versions, strict=True):
            flat = abs(logprob - self.flat) < 2e-5
            self.early += version % 2 == 1 and not flat
            self.late += version % 2 == 0 and flat

    async def watch(self) -> None:
        """Note when tokens arrive."""
        while True:
            if not self.arrivals or self.arrivals[-1][1] != self.engine._tokens:
                self.arrivals.append((time.monotonic(), self.engine._tokens))
            await asyncio.sleep(0.002)

    def rate(self, start: float, end: float) -> float:
        """Tokens a second between two moments."""
        inside = [arrival for arrival in self.arrivals if start <= arrival[0] <= end]
        if len(inside) < 2:
            return 0.0
        return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])

    def change(self, paused: float, resumed: float) -> dict[str, float]:
        """Tokens a second around a pause, and the longest time without any."""
        around = [t for t, _ in self.arrivals if paused - WINDOW_S <= t <= resumed + WINDOW_S]
        gaps = [b - a for a, b in itertools.pairwise(around)]
        before = self.rate(paused - WINDOW_S - 0.05, paused - 0.05)
        after = self.rate(resumed + 0.1, resumed + 0.1 + WINDOW_S)
        return {"before": before, "after": after, "silence_s": max(gaps, default=0.0), "step_s": median(gaps or [0.0])}


async def server(config: Config, name: str, running: int, length: int, offset: int) -> None:
    """A rollout server: `address A`, `peer WORLD`, `push STARTED`, `stop`."""
    from learner.weights.receiver import Receiver
    from rollout.engine import Engine

    engine = await Engine.start(config, seed=1)
    lines: asyncio.Queue[list[str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    read = lambda: [loop.call_soon_threadsafe(lines.put_nowait, line.split()) for line in sys.stdin]  # noqa: E731
    threading.Thread(target=read, daemon=True).start()
    say(started=name)
    address = (await lines.get())[1]
    spec = json.loads(Path(config.model.path, "config.json").read_text())
    traffic, events = Traffic(engine, spec["vocab_size"], running, length), []

    async def where(known: str | None) -> str:
        if known:
            await asyncio.Event().wait()
        return address

    async def follow(policies: AsyncGenerator[Any, None]) -> None:
        async for policy in policies:
            started = time.monotonic()
            async with engine.paused():
                await policy.load()
                engine.version = policy.version
            now = time.monotonic()
            await policy.loaded()
            events.append({"version": policy.version, "paused": started, "swapped": now, "pause_s": engine.paused_s,
                           "stop_s": engine.stop_s, "resume_s": engine.resume_s, "load_s": policy._load_s})  # fmt: skip
            first.set()

    first = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        following = tasks.create_task(follow(Receiver(where, engine, name, config.weights).policies()))
        await first.wait()
        watching = tasks.create_task(traffic.watch())
        requests = [tasks.create_task(traffic.request(number)) for number in range(running)]
        await asyncio.sleep(3.0)
        say(serving=name)
        while (order := await lines.get())[0] != "stop":
            if order[0] == "peer":
                await join_peer(engine, offset, int(order[1]))
            else:
                say(pushed=await peer_push(engine, float(order[1]), specs_of(config)))
        traffic.stopping = True
        await asyncio.wait(requests)
        following.cancel()
        watching.cancel()
    for event in events[1:]:
        event |= traffic.change(event["paused"], event["swapped"])
    say(events=events[1:], finished=traffic.finished, lost=traffic.lost, early=traffic.early, late=traffic.late,
        tokens=traffic.tokens)  # fmt: skip
    await engine.close()


def specs_of(config: Config) -> list[tuple[str, list[int]]]:
    """Names and shapes of the policy's weights."""
    from learner import initial

    skeleton = initial.skeleton(config.model, "sdpa")
    return [(name, list(parameter.shape)) for name, parameter in skeleton.named_parameters()]


async def join_peer(engine: Any, offset: int, world: int) -> None:
    """Enter the group of vLLM's own transfer."""
    from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

    info = {"master_address": "127.0.0.1", "master_port": PEER_PORT, "rank_offset": offset, "world_size": world}
    await engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
    say(joined=True)


async def peer_push(engine: Any, started: float, specs: list[tuple[str, list[int]]]) -> dict[str, float]:
    """One update by vLLM's own transfer; its times."""
    from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

    names, shapes = [name for name, _ in specs], [shape for _, shape in specs]
    info = {"names": names, "dtype_names": ["bfloat16"] * len(names), "shapes": shapes, "packed": True}
    async with engine.paused():
        await engine._llm.start_weight_update()
        await engine._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
        await engine._llm.finish_weight_update()
    return {"pause_s": engine.paused_s, "lag_s": time.monotonic() - started}


def limit(rank: int, world: int, port: int) -> None:
    """What a plain broadcast of 1 GiB reaches on these GPUs: rank 0 says GB/s, the median of ten."""
    from learner.weights.channel import Channel, Store

    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    size = 1 << 30 if GPU else 1 << 20
    if GPU:
        torch.cuda.set_device(device)
    if rank == 0:
        store = Store("127.0.0.1", 60.0)
        say(port=store.port)
        port = store.port
    channel = Channel("127.0.0.1", port, 0, rank, world, device, 60.0)
    channel.connect()
    room = [torch.ones(size, dtype=torch.uint8, device=device)] * 11
    rates = []
    for _ in range(10):
        for _ in channel.broadcast(room):
            pass
        rates.append(10 * size / channel.span_s / 1e9)
    say(gb_per_s=median(rates))


if __name__ == "__main__":
    role, given = sys.argv[1], json.loads(sys.argv[2])
    if role == "limit":
        limit(**given)
    else:
        config = Config.model_validate(given.pop("config"))
        learner(config) if role == "learner" else uvloop.run(server(config, **given))
    sys.stdout.flush()
    os._exit(0)
