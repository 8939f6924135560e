"""Bytes of foreign programs at the buffer's port, and connections that break, do no harm."""

import asyncio
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgpack
import pytest

from buffer.wire.message import pack, unpack
from buffer.wire.protocol import ANSWERS, PROTOCOL, Evaluate, Hello, Refused, State, Status
from tests.buffer.wire.test_many import Clients, hello
from tests.harness.buffer_process import buffer, client, committed, in_loop, make_requests

GREETING = b"\xff" + bytes(8) + b"\x7f"
PROBES = {
    "HTTP": b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: Mozilla/5.0 (X11; Linux x86_64)\r\nAccept: */*\r\n\r\n"
    * 4,
    "ZMTP 1.0": b"\x01\x00\x02\x00A\x01\x00",
    "ZMTP 2.0": GREETING + b"\x01\x05" + b"\x00\x00" + b"\x00\x01A",
    "ZMTP 2.0, many frames": GREETING + b"\x01\x05" + b"\x00\x00" + b"\x01\x01A" * 3 + b"\x00\x01B" * 50,
    "ZMTP 3, then anything": GREETING + b"\x03\x00NULL" + bytes(48) + os.urandom(300),
    "TLS": bytes.fromhex("1603010200010001fc0303") + os.urandom(509),
    "SSH": b"SSH-2.0-OpenSSH_9.6\r\n" + os.urandom(100),
    "Redis": b"*1\r\n$4\r\nPING\r\n" * 20,
    "zeros": bytes(500),
}


@in_loop
async def test_foreign_bytes_end_nothing() -> None:
    async with asyncio.timeout(60), buffer() as it, client(it.address, "o", "observer") as observer:
        for data in PROBES.values():
            await answer_to(data, it.address, 1)
            assert isinstance(await observer.expect(Status(), State), State)


async def answer_to(data: bytes, address: str, most: int = -1) -> bytes:
    """Return what the peer at `address` answers, up to `most` bytes, until it closes or resets the connection."""
    host, port = address.removeprefix("tcp://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    answer = b""
    with suppress(ConnectionResetError):
        while len(answer) != most and (more := await reader.read(1)):
            answer += more
    writer.close()
    return answer


@pytest.mark.parametrize("greeting", ["ZMTP 1", "ZMTP 2"])
@in_loop
async def test_a_message_in_an_older_protocol_is_not_read(greeting: str) -> None:
    """A web page can send these bytes: the request's body is a valid message of the buffer's protocol."""
    hello = bytes(pack(0, Hello(name="page", token="0", role="observer", protocol=PROTOCOL, fingerprint="")))
    frame = bytes([len(hello) + 1, 0]) + hello if greeting == "ZMTP 1" else bytes([0, len(hello)]) + hello
    head = b"\x01\x00" if greeting == "ZMTP 1" else GREETING + b"\x01\x05\x00\x00"
    async with asyncio.timeout(60), buffer() as it, client(it.address, "o", "observer") as observer:
        assert b"Welcome" not in await answer_to(head + frame, it.address)
        state = await observer.expect(Status(), State)
        assert state.errors == 0


BROKEN_WHILE_DEAF = """
import time, zmq
from buffer.wire.router import OPTIONS

SOON = {zmq.HEARTBEAT_IVL: 20}  # ms: each timer of the buffer's socket fires while no one reads
with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
    for option, value in OPTIONS.items():
        router.setsockopt(option, SOON.get(option, value))
    port = router.bind_to_random_port("tcp://127.0.0.1")
    for _ in range(3):
        with context.socket(zmq.DEALER) as dealer:
            dealer.connect(f"tcp://127.0.0.1:{port}")
            for _ in range(50):
                dealer.send(bytes(100_000))
            time.sleep(0.1)
            dealer.close(0)
    time.sleep(0.1)
    while router.poll(100):
        router.recv_multipart()
"""


def test_a_client_that_ends_while_the_buffer_does_not_read_does_not_abort_the_buffer() -> None:
    """libzmq's own timer fired for such a connection and aborted the process: `Assertion failed: !_io_error`."""
    ended = subprocess.run([sys.executable, "-c", BROKEN_WHILE_DEAF], capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def evaluated(example: Any) -> dict[str, Any]:
    results = {"figures": {"mean@1": 1.0}, "reasons": [], "examples": [{"problem": example}]}
    return {"kind": "Evaluated", "due": 0, "version": 0, "sets": {"eval": results}}


UNFIT = {
    "a number of servers beyond SQLite's": ("o", {"kind": "Scale", "servers": 2**63, "by": "rule"}),
    "more ranks than memory": ("l0", {"kind": "Take", "version": 0, "rank": 0, "world": 2**40}),
    "an example whose key is no text": ("a", evaluated({b"key": 1})),
    "an example that is nested deep": ("a", evaluated(nested(490))),
}


@pytest.mark.parametrize("what", UNFIT)
def test_a_message_that_can_be_read_and_not_be_served_is_refused(what: str, tmp_path: Path) -> None:
    who, fields = UNFIT[what]
    requests = make_requests(tmp_path / "buffer.sqlite", eval_every=1)
    clients = Clients(requests)
    clients.say("o", hello("o", "launcher"))
    for item in clients.work("a", 2):
        clients.put("a", item)
    clients.say("a", Evaluate(version=0))
    clients.turn()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(400)  # msgpack reads 500 levels, in C, and `json` writes as many as Python lets it
    try:
        requests.receive([who.encode(), msgpack.packb({"id": 99, **fields})], 0.0, clients.roles[who])
        requests.retry(0.0)
    finally:
        sys.setrecursionlimit(limit)
    committed(requests)
    ((_, answer),) = requests.out
    assert isinstance(unpack(answer, ANSWERS)[1], Refused)


BROKEN_WHILE_STOPPED = """
import os, signal, time, zmq
from buffer.wire import connection
from buffer.wire.router import OPTIONS

SOON = {zmq.HEARTBEAT_IVL: 10, zmq.HEARTBEAT_TIMEOUT: 50}  # ms: what a client's socket does by a timer, many times
ours, theirs = os.pipe()
if (buffer := os.fork()) == 0:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        for option, value in OPTIONS.items():
            router.setsockopt(option, value)
        os.write(theirs, b"%d" % router.bind_to_random_port("tcp://127.0.0.1"))
        wait = 60_000  # ms: until the client has come, and then shorter
        while router.poll(wait):
            router.send_multipart(router.recv_multipart())
            wait = 1000
    os._exit(0)
port = int(os.read(ours, 9))
with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
    for option, value in connection.OPTIONS.items():
        dealer.setsockopt(option, SOON.get(option, value))
    dealer.connect(f"tcp://127.0.0.1:{port}")
    dealer.poll(5000, zmq.POLLOUT)
    dealer.send(b"")
    dealer.recv()
    os.kill(buffer, signal.SIGSTOP)
    for _ in range(30):
        if dealer.poll(0, zmq.POLLOUT):
            dealer.send(b"word")
        time.sleep(0.01)
os.kill(buffer, signal.SIGCONT)
print(os.waitstatus_to_exitcode(os.waitpid(buffer, 0)[1]))
"""


def test_a_client_that_ends_while_the_buffer_is_stopped_does_not_end_it() -> None:
    """libzmq aborted the process, as above, where it met a client's ping after such a connection had broken."""
    ended = subprocess.run([sys.executable, "-c", BROKEN_WHILE_STOPPED], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stdout) == (0, "0\n"), ended.stdout + ended.stderr
