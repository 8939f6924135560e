"""`python -m tests.system.nemesis.peers WHO ADDRESS SECONDS [OUTER]`: a peer that does not belong to the run.

`foreign` bytes of other protocols, `half` messages on connections that stay open, a `flood` of rubbish; or, in the
words of the run's own protocols, an `observer` that asks for work and trains it, a `learner` that serves weights of its
own, and a `member` of the weights wire that never receives. Ends after SECONDS; that it was refused is no error.
"""

import asyncio
import socket
import struct
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import zmq
import zmq.asyncio

from buffer.curve import split
from buffer.wire import protocol
from buffer.wire.client import Connection, RefusedError
from buffer.wire.message import Array, Message
from buffer.wire.sample import Sample
from configs.inner_command import inner_words
from configs.resume import fingerprint
from tests.system.nemesis.keys import buffer_keys, learner_keys, weights_keys
from tests.system.nemesis.run import SERVERS, NemesisRun

FOREIGN = (
    bytes.fromhex("160301020001000001fc0303") + bytes(500),  # TLS
    b"SSH-2.0-OpenSSH_9.6\r\n",
    b"GET / HTTP/1.1\r\nHost: localhost\r\nOrigin: https://example.org\r\n\r\n",
    b'POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"a": 1}\n',
    bytes.fromhex("0100020041"),  # ZMTP 1
    bytes.fromhex("ff00000000000000017f0105") + b"\x00\x00\x00\x04rude",  # ZMTP 2
    bytes(64),
    b"\xff" * 4096,
    b"*1\r\n$4\r\nPING\r\n",  # Redis
)
GREETING = bytes.fromhex("ff00000000000000017f0300") + b"NULL".ljust(20, b"\0") + bytes(32)
READY = b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
"""ZMTP 3: the greeting of a client without security, and its handshake."""
HALVES = (
    GREETING[:5],
    GREETING,
    GREETING + bytes([4, len(READY)]) + READY[:10],
    GREETING + bytes([4, len(READY)]) + READY,
    GREETING + bytes([4, len(READY)]) + READY + b"\x02" + struct.pack(">Q", 50 << 20) + bytes(1 << 20),
    GREETING + bytes([4, len(READY)]) + READY + b"\x02" + struct.pack(">Q", 1 << 62) + bytes(1000),
)
CONNECTIONS = 5
"""Open connections with each of `HALVES`."""
RUDE_VERSION, RUDE_REWARD = 7777, 1e6


def foreign(address: str, seconds: float) -> None:
    """One connection after another."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for data in FOREIGN:
            with suppress(OSError), connected(address) as connection:
                connection.sendall(data)
                connection.settimeout(0.05)
                connection.recv(1 << 12)
        time.sleep(0.05)


def half(address: str, seconds: float) -> None:
    """Messages that never end."""
    with ExitStack() as stack:
        for data in HALVES * CONNECTIONS:
            with suppress(OSError):
                connection = stack.enter_context(connected(address))
                connection.sendall(data)
        time.sleep(seconds)


def flood(address: str, seconds: float) -> None:
    """As many messages as the wire takes: no map, no kind, an unknown kind, a wrong field, a megabyte."""
    rubbish = [b"rubbish", b"", msgpack.packb({"id": 1}), msgpack.packb({"kind": "Rude", "id": 1}), bytes(1 << 20)]
    rubbish += [msgpack.packb({"kind": kind, "id": 1, "name": "x" * 999}) for kind in ("Hello", "Join", "Heartbeat")]
    end, sent = time.monotonic() + seconds, 0
    with zmq.Context() as context, context.socket(zmq.DEALER) as wire:
        wire.setsockopt(zmq.LINGER, 0)
        wire.setsockopt(zmq.SNDTIMEO, 200)
        wire.connect(address)
        while time.monotonic() < end:
            with suppress(zmq.Again):
                wire.send(rubbish[sent % len(rubbish)])
                sent += 1


def connected(address: str) -> socket.socket:
    host, port = split(address)
    return socket.create_connection((host, int(port)), 1.0)


async def observer(address: str, run: NemesisRun) -> None:
    """Says Hello as an observer, and does what servers and learners do, as fast as it gets answers."""
    config = run.config()
    async with Connection(address, "rude", "observer", keys=buffer_keys(config, "observer")) as connection:
        await asyncio.gather(make_groups(connection, config.batch.samples), train(connection))


async def answer_to(connection: Connection, message: Message) -> Message | None:
    """The answer within a second; None if it is refused."""
    try:
        async with asyncio.timeout(1.0):
            answer = await connection.expect(message, Message)
    except RefusedError as refused:
        return print(f"{type(message).__name__}: {refused}")
    except TimeoutError:
        return None
    print(f"{type(message).__name__}: {type(answer).__name__}")
    return answer


async def make_groups(connection: Connection, samples: int) -> None:
    """Ask for work, and put groups with a huge reward."""
    for request in count(1):
        state = await connection.expect(protocol.Status(), protocol.State)
        work = await answer_to(connection, protocol.Ask(request=request, version=state.version, room=8))
        for item in work.items if isinstance(work, protocol.Work) else []:
            group = [rude_sample(state.version).pack()] * samples
            await answer_to(connection, protocol.Put(item=item.item, lease=item.lease, samples=group))
        await asyncio.sleep(0.1)


async def train(connection: Connection) -> None:
    """Take the newest batch, say that it is trained, have it pruned, and rewind."""
    while True:
        state = await connection.expect(protocol.Status(), protocol.State)
        version = max(state.version - 1, 0)
        await answer_to(connection, protocol.Take(version=version, rank=0, world=1))
        await answer_to(connection, protocol.Trained(version=version, oldest_kept=state.version))
        await answer_to(connection, protocol.Rewind(version=version))
        await asyncio.sleep(0.1)


def rude_sample(version: int) -> Sample:
    """A sample that nobody generated."""
    columns = {"tokens": [1, 2, 3], "sampled": [0, 1, 1], "behaviour_logprobs": [0, -1, -1]}
    columns["versions"] = [-1, version, version]
    arrays = {name: Array.of(np.array(values, Sample.DTYPES[name])) for name, values in columns.items()}
    return Sample(**arrays, reward=RUDE_REWARD, finish="stop")


async def learner(address: str, run: NemesisRun) -> None:
    """Says Hello as the learner, and serves weights of its own."""
    import torch

    from learner.weights.sender.publish import Sender
    from tests.system.nemesis.weights import SPECS, NamedPolicy

    config = run.config()
    sender = Sender(SPECS, config.weights, 0, torch.device("cpu"), keys=learner_keys(config), heartbeat_s=0.5)
    sender.publish(NamedPolicy("ab" * 32), RUDE_VERSION)
    hello = "learner-0", "learner", fingerprint(config), sender.address
    async with Connection(address, *hello, keys=buffer_keys(config, "rollout")):  # type: ignore[arg-type]
        await asyncio.Event().wait()


async def member(address: str, run: NemesisRun) -> None:
    """Joins the weights wire under a server's name, says Ready to each round, and nothing more."""
    from learner.weights import protocol as weights

    keys = weights_keys(run.config())
    join = weights.Join(name=SERVERS[0], protocol=weights.PROTOCOL, workers=1, backend="gloo")
    with zmq.asyncio.Context() as context, weights.dealer(context, address, keys) as wire:
        await wire.send(weights.pack(join))
        while True:
            message = weights.unpack(await wire.recv(), weights.TO_SERVER)
            if isinstance(message, weights.ServerWelcome):
                join = join.model_copy(update={"digest": message.digest, "trained": message.trained})
            if isinstance(message, weights.ServerWelcome | weights.Rejoin):
                await asyncio.sleep(0.1)
                await wire.send(weights.pack(join))
            answer = weights.Ready(round=message.round) if isinstance(message, weights.Offer) else weights.KeepAlive()
            await wire.send(weights.pack(answer))


PLAIN: dict[str, Callable[[str, float], None]] = {"foreign": foreign, "half": half, "flood": flood}
ROLES: dict[str, Callable[[str, NemesisRun], Coroutine[Any, Any, None]]] = {
    "observer": observer,
    "learner": learner,
    "member": member,
}


async def play(role: Callable[[str, NemesisRun], Coroutine[Any, Any, None]], address: str, seconds: float) -> None:
    """A role until it is refused, or for `seconds`."""
    with suppress(TimeoutError, RefusedError):
        async with asyncio.timeout(seconds):
            await role(address, NemesisRun(Path(sys.argv[4])))


if __name__ == "__main__":
    inner_words("WHO", "ADDRESS", "SECONDS", optional=("OUTER",))
    who, where, for_s = sys.argv[1], sys.argv[2], float(sys.argv[3])
    if who in PLAIN:
        PLAIN[who](where, for_s)
    else:
        asyncio.run(play(ROLES[who], where, for_s))
