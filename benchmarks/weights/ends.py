"""The processes of `benchmarks.weights`: `python -m benchmarks.weights.ends learner|server|limit JSON`.

Each reads commands from stdin and answers on stdout with lines of JSON that begin with @; its parent is the benchmark.
A learner is the real policy under FSDP with random weights (without an optimizer, which the wire never touches) and the
real sender; a server is the real engine and receiver. Version 0 is random in all layers, and its probe compares the
whole model. From version 1 on every token's log-probability tells the version that sampled it (`known.py`), so each
shows beyond doubt whether its stamp is right. All times are read from the host's monotonic clock.
"""

import asyncio
import json
import os
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from statistics import median
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import uvloop

from benchmarks.weights.known import mark, show
from benchmarks.weights.traffic import AWAY_S, WINDOW_S, Lag, RequestTraffic, vocabulary_of
from buffer.data.images import ImageFormat
from buffer.keys import load_client_keys, load_server_keys, make_keys
from configs.inner_command import inner_words
from configs.schema import Config

PEER_PORT = int(os.environ.get("PEER_PORT", "29611"))
SERVED_S = 100.0
"""Longest wait until a version has reached all servers."""
GPU = torch.cuda.is_available()
DIGESTING = "benchmarks.weights.digests.DigestingWorker"
STALL_S = 0.6
"""Seconds after a swap within which the engine has reported the longest time without a token around it."""


def say(**fields: Any) -> None:
    """Print one answer."""
    print("@" + json.dumps(fields), flush=True)


def learner(config: Config) -> None:
    """A learner rank. Commands: `mark SERVERS`, `updates N GAP`, `peer WORLD`, `push`, `stop`."""
    from torch.distributed.device_mesh import init_device_mesh

    from configs.publishing import publishes_rows
    from learner.__main__ import sending_ranks
    from learner.model.policy import Policy
    from learner.weights.sender.publish import Follower, Sender
    from learner.weights.sender.row_rank import RowRank

    rank = int(os.environ["RANK"])
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("cpu:gloo,cuda:nccl" if GPU else "gloo")
    mesh = init_device_mesh("cuda" if GPU else "cpu", (dist.get_world_size(),))
    policy = Policy(config.model, config.learner, mesh, random=True)
    specs = policy.weight_specs()
    keys = load_server_keys(config.run.path / "keys", "learner")
    ranks = sending_ranks(policy, mesh) if publishes_rows(config, mesh.size()) else None
    wire: Sender | RowRank | Follower
    if rank == 0:
        wire = Sender(specs, config.weights, 0, policy.device, ranks=ranks, keys=keys)
    elif ranks:
        wire = RowRank(specs, config.weights, 0, policy.device, ranks)
    else:
        wire = Follower(specs, config.weights, 0)
    if isinstance(wire, Sender):
        say(address=wire.address, bytes=wire.stats()["weights/bytes"])
    wire.publish(policy, 0)
    peer, last = VllmPeer(policy, rank), torch.empty(0)
    for line in sys.stdin:
        command, *words = line.split()
        if command == "mark":
            served(wire, 0, int(words[0]))
            probe = wire.stats().get("weights/probe", -1.0)
            last = mark(policy.model.named_parameters())
            update(policy, wire, last, 1, 0.0)
            say(marked=probe)
        elif command == "updates":
            versions = range(2, 2 + int(words[0]))
            say(updates=[update(policy, wire, last, version, float(words[1])) for version in versions])
        elif command == "peer":
            peer.join(int(words[0]))
        elif command == "push":
            peer.push()
        else:
            break
    wire.close()
    say(ended=True)


def served(wire: Any, version: int, servers: int = 1) -> None:
    """Wait until rank 0's servers hold `version`."""
    until = time.monotonic() + SERVED_S
    while "weights/members" in (stats := wire.stats()) and time.monotonic() < until:
        if stats["weights/members"] >= servers and stats.get("weights/version") == version:
            break
        time.sleep(0.01)  # the learner would be training


def update(policy: Any, wire: Any, last: torch.Tensor, version: int, gap_s: float) -> dict[str, float]:
    """Publish a version and wait until all servers have loaded it; returns its timings."""
    show(last, version, dist.get_rank())
    synchronize()
    started = time.monotonic()
    wire.publish(policy, version)
    published = time.monotonic()
    served(wire, version)
    stats = {key: value for key, value in wire.stats().items() if "rollout" not in key}
    time.sleep(gap_s)
    return {**stats, "version": version, "started": started, "publish_s": published - started}


class VllmPeer:
    """The learner's end of vLLM's own transfer."""

    def __init__(self, policy: Any, rank: int) -> None:
        self.policy, self.rank = policy, rank
        self._engine: Any = None
        self._group: Any = None

    def join(self, world: int) -> None:
        from vllm.distributed.weight_transfer import nccl_engine

        self._engine = nccl_engine.NCCLWeightTransferEngine
        if self.rank == 0:
            where = {"master_address": "127.0.0.1", "master_port": PEER_PORT, "world_size": world}
            self._group = self._engine.trainer_init(where)
        say(joined=True)

    def push(self) -> None:
        if self.rank == 0:
            self._engine.trainer_send_weights(self._weights(), {"group": self._group, "packed": True})
        else:
            for _ in self._weights():
                pass
        synchronize()
        say(sent=True)

    def _weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One by one: vLLM packs on streams of its own and switches between them; each weight must be gathered on the
        stream that packs it."""
        for name, parameter in self.policy.model.named_parameters():
            yield name, parameter.detach().to(self.policy.device, self.policy.dtype).full_tensor()


def synchronize() -> None:
    """Wait until this process's GPU is idle."""
    if GPU:
        torch.cuda.synchronize()


class Serving:
    """A rollout server under load: the real engine and receiver, with policies loaded as in `rollout.loop.follow`."""

    def __init__(
        self, engine: Any, config: Config, name: str, traffic: RequestTraffic, form: ImageFormat | None = None
    ) -> None:
        """`form`: how the model sees images."""
        self.engine, self.config, self.name, self.traffic, self.form = engine, config, name, traffic, form
        self.idle_until = 1
        """The last version that is loaded into an idle engine."""
        self.lag, self.first, self.busy = Lag(), asyncio.Event(), 0.0
        self.events: list[dict[str, Any]] = []
        self.steps_s: list[float] = []
        """The mean time between two steps before each swap of Headrace's; the peer's are compared with the same."""
        self.ours: dict[str, int] = {}
        """What the traffic had counted when the peer's updates began."""

    async def follow(self, address: str) -> None:
        """Load each policy as `rollout.loop.follow` does, and record what its swap cost."""
        from learner.weights.receiver.follow import Receiver

        async def where(known: str | None) -> str:
            if known:
                await asyncio.Event().wait()
            return address

        keys = load_client_keys(self.config.run.path / "keys", "rollout", server="learner")
        receiver = Receiver(where, self.engine, self.name, self.config.weights, form=self.form, keys=keys)
        policies: AsyncGenerator[Any, None] = receiver.policies()
        async for policy in policies:
            self.engine.stats()  # counts anew from here
            began = time.monotonic()
            await policy.load()
            self.engine.version = policy.version
            swapped = time.monotonic()
            await policy.loaded()
            if policy.version > self.idle_until:
                event = {"version": policy.version, "began": began, "swapped": swapped, "load_s": swapped - began}
                self.events.append(event | await self.silence(began, swapped))
            self.first.set() if policy.version == self.idle_until else None

    async def silence(self, began: float, swapped: float) -> dict[str, float]:
        """The longest time without a token around a swap that has just ended, and in as long a time after it; the
        usual time between two steps; the longest delay of the event loop during the swap."""
        late_s = self.lag.worst(began, swapped)
        await asyncio.sleep(STALL_S)
        around = self.engine.stats()
        if not self.busy and (rate := self.traffic.rate(began - AWAY_S - WINDOW_S, began - AWAY_S)):
            self.steps_s.append(around["running"] / rate)
        silence_s, step_s = around["stall_s"], median(self.steps_s or [0.0])
        await asyncio.sleep(time.monotonic() - began)
        found = {"silence_s": silence_s, "quiet_s": self.engine.stats()["stall_s"], "step_s": step_s, "late_s": late_s}
        return found | {"interrupted_s": silence_s - step_s}

    async def join(self, offset: int, world: int) -> None:
        """Enter the group of vLLM's own transfer."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        info = {"master_address": "127.0.0.1", "master_port": PEER_PORT, "rank_offset": offset, "world_size": world}
        await self.engine._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        say(joined=True)

    async def push(self, published: float) -> None:
        """One update by vLLM's own transfer; answers with its timings."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        names, shapes = zip(*specs_of(self.config), strict=True)
        info = {"names": list(names), "dtype_names": ["bfloat16"] * len(names), "shapes": list(shapes), "packed": True}
        self.engine.stats()
        began = time.monotonic()
        async with self.engine.paused():
            await self.engine._llm.start_weight_update()
            await self.engine._llm.update_weights(WeightTransferUpdateRequest(update_info=info))
            await self.engine._llm.finish_weight_update()
        swapped = time.monotonic()
        found = {"load_s": swapped - began, "lag_s": swapped - published}
        say(pushed=found | await self.silence(began, swapped))

    def report(self) -> dict[str, Any]:
        """All measurements but those of the policies that were loaded into an idle engine."""
        events = [event | self.traffic.around(event["began"], event["swapped"]) for event in self.events]
        counts = self.traffic.counts()
        ours = self.ours or counts
        peers = {f"peer_{key}": counts[key] - ours[key] for key in ours}
        return {"events": events, "busy": self.busy, **ours, **peers, "examples": self.traffic.examples[:100]}

    async def run(self, commands: "asyncio.Queue[list[str]]", offset: int) -> None:
        """Execute `peer WORLD` and `push PUBLISHED` until `stop`."""
        while (command := await commands.get())[0] != "stop":
            if command[0] == "peer":
                self.busy, self.ours = self.lag.busy(), self.traffic.counts()  # of our updates, which end here
                await self.join(offset, int(command[1]))
            else:
                await self.push(float(command[1]))


async def server(config: Config, name: str, running: int, length: int, offset: int) -> None:
    """The server's process: its first command is the learner's address."""
    from rollout.engine.vllm_engine import Engine

    class DigestingEngine(Engine):
        """An engine whose workers answer `rl_digest`."""

        @classmethod
        async def launch(cls, arguments: dict[str, Any]) -> Engine:
            return await super().launch(arguments | {"worker_extension_cls": DIGESTING})

    engine = await DigestingEngine.start(config, seed=1)
    commands = commands_from_stdin()
    say(started=name)
    serving = Serving(engine, config, name, RequestTraffic(engine, vocabulary_of(config.model.path), running, length))
    address = (await commands.get())[1]
    async with asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(serving.follow(address))]
        await serving.first.wait()
        others += [tasks.create_task(serving.lag.watch()), *serving.traffic.start(tasks)]
        await asyncio.sleep(5.0)
        serving.lag.busy()
        say(serving=name)
        await serving.run(commands, offset)
        serving.busy = serving.busy or serving.lag.busy()
        for other in others:
            other.cancel()
    workers = await engine.collective("rl_digest", timeout_s=SERVED_S)
    say(**serving.report(), workers=workers)
    await engine.close()


def commands_from_stdin() -> "asyncio.Queue[list[str]]":
    """The lines of stdin, each split into words. At its end whoever started this process is gone, and it ends too."""
    lines: asyncio.Queue[list[str]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(lines.put_nowait, line.split())
        os._exit(1)

    threading.Thread(target=read, daemon=True).start()
    return lines


def specs_of(config: Config) -> list[tuple[str, list[int]]]:
    """Names and shapes of the policy's weights."""
    from learner.model import loading

    skeleton = loading.build_on_meta(config.model, "sdpa")
    return [(name, list(parameter.shape)) for name, parameter in skeleton.named_parameters()]


def limit(rank: int, world: int, port: int) -> None:
    """Measure a plain broadcast of 1 GiB on these GPUs: rank 0 answers with the median GB/s of ten."""
    from learner.weights.channel import Channel, Rendezvous

    device = torch.device("cuda", 0) if GPU else torch.device("cpu")
    size = 1 << 30 if GPU else 1 << 20
    if GPU:
        torch.cuda.set_device(device)
    if rank == 0:
        rendezvous = Rendezvous("127.0.0.1", 60.0)
        say(port=rendezvous.port)
        port = rendezvous.port
    channel = Channel("127.0.0.1", port, 0, rank, world, device, 60.0)
    channel.connect()
    buckets = [torch.ones(size, dtype=torch.uint8, device=device)] * 10
    rates = []
    for _ in range(10):
        for _ in channel.broadcast(buckets):
            pass
        rates.append(len(buckets) * size / channel.span_s / 1e9)
    say(gb_per_s=median(rates))


def run_end(learner: Callable[[Config], None], server: Callable[..., Coroutine[Any, Any, None]]) -> NoReturn:
    """Be what the command line says: `learner` or `server`, and JSON with the config and the further arguments of the
    server. Ends the process, whatever threads still run."""
    role, given = sys.argv[1], json.loads(sys.argv[2])
    config = Config.model_validate(given.pop("config"))
    make_keys(config.run.path / "keys")
    learner(config) if role == "learner" else uvloop.run(server(config, **given))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    inner_words("ROLE", "CONFIG")
    if sys.argv[1] != "limit":
        run_end(learner, server)
    limit(**json.loads(sys.argv[2]))
    sys.stdout.flush()
    os._exit(0)
