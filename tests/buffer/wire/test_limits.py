"""What strangers and greedy clients may hold of the buffer: memory, open files, identities, places to wait."""

import asyncio
import os
import resource
import socket
import struct
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from buffer.keys import Role
from buffer.resources import OpenFiles
from buffer.wire import quotas, router, status
from buffer.wire.handlers import revision_of
from buffer.wire.message import pack
from buffer.wire.protocol import State, Status, Stored, Take, Where
from buffer.wire.router import OPTIONS, UNKNOWN_BYTES, UNSENT_BYTES, ConnectionLimits, UnsentAnswers
from configs.flow.capacity import PARKED_BYTES
from tests.buffer.wire.test_many import Clients, hello
from tests.harness.buffer_process import buffer, client, group, in_loop, make_requests, rollout
from tests.harness.keys import unlock

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00%s" + bytes(32)
"""How ZMTP begins; the name of a mechanism has 20 bytes."""
CHUNK = 100_000
REST = 200_000
"""Bytes of a message that are held back, so that it never ends."""


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


async def pour(data: Callable[[], Awaitable[bytes]], writer: asyncio.StreamWriter, most: int) -> int:
    """Write data as it comes, up to `most` bytes or the end of the connection; returns how many were written."""
    sent = 0
    with suppress(ConnectionError):
        while sent < most and (some := (await data())[: most - sent]):
            writer.write(some)
            await writer.drain()
            sent += len(some)
            await asyncio.sleep(0.005)
    return sent


async def is_ended(reader: asyncio.StreamReader) -> bool:
    """Whether the other end closes the connection within a minute."""
    try:
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


async def half_a_message(address: str, size: int, role: Role, first: bytes = b"") -> tuple[int, bool]:
    """A DEALER with the key of `role` sends a message of `size` bytes, after `first` was answered; most of it arrives.
    Returns the bytes that arrived, and whether the connection was cut off."""
    done: asyncio.Future[tuple[int, bool]] = asyncio.get_running_loop().create_future()

    async def pass_on(client_reader: asyncio.StreamReader, client_writer: asyncio.StreamWriter) -> None:
        proxy.close()  # the DEALER connects once
        server_reader, server_writer = await asyncio.open_connection("127.0.0.1", port_of(address))

        async def answers() -> bool:
            with suppress(ConnectionError):
                while some := await server_reader.read(CHUNK):
                    client_writer.write(some)
            return True

        answering = asyncio.create_task(answers())
        sent = await pour(lambda: client_reader.read(CHUNK), server_writer, size - REST)
        ended, _ = await asyncio.wait({answering}, timeout=60)
        done.set_result((sent, bool(ended)))
        answering.cancel()
        server_writer.close()
        client_writer.close()

    proxy = await asyncio.start_server(pass_on, "127.0.0.1", 0)
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.setsockopt(zmq.LINGER, 0)
        unlock(dealer, role).connect(f"tcp://127.0.0.1:{proxy.sockets[0].getsockname()[1]}")
        if first:
            await dealer.send(first)
            assert b"Welcome" in await dealer.recv()
        await dealer.send(bytes(size))
        return await done


async def half_a_handshake(address: str, size: int, mechanism: bytes) -> tuple[int, bool]:
    """Somebody without a key announces `size` bytes as the first command of a handshake and sends most of them."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port_of(address))
    writer.write(GREETING % mechanism.ljust(20, b"\0") + b"\x06" + struct.pack(">Q", size))

    async def zeros() -> bytes:
        return bytes(CHUNK)

    try:
        return await pour(zeros, writer, size - REST), await is_ended(reader)
    finally:
        writer.close()


@in_loop
async def test_half_a_message_without_a_hello_is_cut_off_early() -> None:
    requests = make_requests(max_message=50 * 2**20)
    async with buffer(requests) as it, client(it.address, "o", "observer") as observer:
        found = await asyncio.gather(*(half_a_message(it.address, 2**20 * 20, "rollout") for _ in range(6)))
        assert all(closed for _, closed in found), found
        assert all(sent > UNKNOWN_BYTES for sent, _ in found), "the message was begun"
        assert sum(sent for sent, _ in found) < 60 * 2**20, "of 120 MiB"
        assert isinstance(await observer.expect(Status(), State), State)


@in_loop
async def test_an_observer_may_not_send_groups() -> None:
    """Its Hello is not worth 100 MiB: its key is that of whoever may look."""
    requests = make_requests(max_message=50 * 2**20)
    async with buffer(requests) as it:
        said = bytes(pack(1, hello("greedy", "observer")))
        sent, cut_off = await half_a_message(it.address, 2**20 * 40, "observer", said)
        assert cut_off and sent > router.SMALL_BYTES
        assert [peer.hello.name for peer in requests.handlers.peers.known.values()] == ["greedy"]


@pytest.mark.parametrize("mechanism", [b"CURVE", b"PLAIN", b"NULL", b""])
@in_loop
async def test_half_a_handshake_without_a_key_is_cut_off_early(mechanism: bytes) -> None:
    """Whatever comes before the handshake is done belongs to a connection without a Hello."""
    async with buffer(make_requests(max_message=50 * 2**20)) as it, client(it.address, "o", "observer") as observer:
        found = await asyncio.gather(*(half_a_handshake(it.address, 2**20 * 20, mechanism) for _ in range(6)))
        assert all(closed for _, closed in found), found
        assert sum(sent for sent, _ in found) < 60 * 2**20, "of 120 MiB"
        state = await observer.expect(Status(), State)
        assert state.errors == 0 and len(it.requests.handlers.peers.known) == 1


@in_loop
async def test_a_server_sends_large_groups_after_its_hello() -> None:
    async with buffer(make_requests(max_message=2**25)) as it, rollout(it.address) as server:
        for _ in range(3):
            (item,) = await server.ask(1) or []
            assert (await server.put(item, group(item.item, tokens=150_000))).accepted
        assert not it.requests.errors


@contextmanager
def connected(files: float = 10_000) -> Iterator[tuple[ConnectionLimits, list[socket.socket], list[socket.socket]]]:
    """Limits over three connections that said nothing, and both ends of each."""

    class Files(OpenFiles):
        def left(self) -> float:
            return files

    limits, ours, theirs = ConnectionLimits(Files(0)), [], []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limits.endpoint = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        for number in range(3):
            theirs.append(socket.create_connection(listener.getsockname()))
            ours.append(listener.accept()[0])
            limits.on_event(zmq.EVENT_ACCEPTED, ours[-1].fileno(), float(number))
    try:
        yield limits, ours, theirs
    finally:
        for one in ours + theirs:
            one.close()


def test_another_socket_under_the_descriptor_of_a_connection_is_left_alone() -> None:
    with connected() as (limits, ours, theirs), socket.create_server(("127.0.0.1", 0)) as other:
        far = socket.create_connection(other.getsockname())
        near, descriptor = other.accept()[0], ours[0].fileno()
        os.dup2(near.fileno(), descriptor)
        limits.close(descriptor, "sent too much")
        far.sendall(b"x")
        assert near.recv(1) == b"x" and not is_closed(far)
        limits.close(ours[1].fileno(), "sent too much")
        assert is_closed(theirs[1])
        near.close()
        far.close()


def is_closed(end: socket.socket) -> bool:
    end.settimeout(0.2)
    try:
        return end.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_only_the_connection_that_sent_too_much_is_closed() -> None:
    with connected() as (limits, ours, theirs):
        theirs[0].sendall(bytes(UNKNOWN_BYTES + 1))
        theirs[1].sendall(bytes(UNKNOWN_BYTES))
        theirs[2].sendall(bytes(UNKNOWN_BYTES + 2))
        limits.admit(ours[2].fileno(), large=True)
        wait_until_arrived(ours[0], UNKNOWN_BYTES + 1)
        limits.close_large(0.0)
        assert [is_closed(one) for one in theirs] == [True, False, False]


def wait_until_arrived(end: socket.socket, size: int) -> None:
    until = time.monotonic() + 60
    while router.bytes_received(end.fileno()) < size:
        assert time.monotonic() < until
        os.sched_yield()


def test_bytes_that_were_read_do_not_count() -> None:
    half = UNKNOWN_BYTES // 2
    with connected() as (limits, ours, theirs):
        fd = ours[0].fileno()
        for number in range(1, 6):
            theirs[0].sendall(bytes(half))
            wait_until_arrived(ours[0], number * half)
            assert len(ours[0].recv(half, socket.MSG_WAITALL)) == half
            limits.read[fd] += half + router.FRAME_OVERHEAD
        limits.close_large(0.0)
        assert not is_closed(theirs[0])
        theirs[0].sendall(bytes(UNKNOWN_BYTES + 1))
        wait_until_arrived(ours[0], 5 * half + UNKNOWN_BYTES + 1)
        limits.close_large(0.0)
        assert is_closed(theirs[0])


def test_strangers_are_closed_while_files_are_few_the_oldest_first_and_the_known_never() -> None:
    with connected(files=router.KEPT_FILES - 0.5) as (limits, ours, theirs):
        limits.admit(ours[0].fileno(), large=False)
        limits.keep_files()
        assert [is_closed(one) for one in theirs] == [False, True, True]


def test_a_connection_that_says_no_hello_is_closed_in_time() -> None:
    with connected() as (limits, ours, theirs):
        limits.close_silent(router.HELLO_S + 1.5)
        assert [is_closed(one) for one in theirs] == [True, True, False]
        assert list(limits.unknown) == [ours[2].fileno()]


def test_a_descriptor_that_is_closed_or_no_socket_is_left_alone(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb") as file:
        assert router.bytes_received(file.fileno()) == 0
        router.end(file.fileno(), "tcp://127.0.0.1:5600")
        file.write(b"still open")
    assert router.bytes_received(10**6) == 0


def test_a_process_that_reads_nothing_gets_one_large_answer_and_then_no_more() -> None:
    unsent = UnsentAnswers()
    unsent.budget = 10.0 * UNSENT_BYTES
    assert not unsent.too_many(b"a")
    unsent.add(b"a", UNSENT_BYTES)
    assert unsent.too_many(b"a") and not unsent.too_many(b"b")
    unsent.add(b"b", 10)
    assert not unsent.too_many(b"b")
    unsent.budget = 0.0  # groups that wait for room have taken the rest
    assert unsent.too_many(b"b") and not unsent.too_many(b"c")
    unsent.remove(b"a", UNSENT_BYTES)
    unsent.remove(b"b", 10)
    assert unsent.total == 0 and not unsent.too_many(b"a")


@in_loop
async def test_a_client_that_reads_nothing_loses_its_connection_and_holds_little() -> None:
    requests = make_requests()
    async with buffer(requests) as it:
        for name in [f"rollout-{number}" for number in range(40)]:
            async with rollout(it.address, name) as server:
                await server.beat({f"{name}-{'s' * 150}-{figure}": 0.0 for figure in range(256)})
        deaf = zmq.asyncio.Context()
        deaf_socket = deaf.socket(zmq.DEALER)
        for option, value in {zmq.RCVHWM: 1, zmq.RCVBUF: 4096, zmq.LINGER: 0, zmq.IDENTITY: b"deaf"}.items():
            deaf_socket.setsockopt(option, value)
        unlock(deaf_socket, "observer").connect(it.address)
        await deaf_socket.send(pack(1, hello("deaf", "observer")))
        size = len(pack(1, status.state(requests.handlers, [], 0, 0.0)))
        number = 3 * UNSENT_BYTES // size
        for each in range(number):
            await deaf_socket.send(pack(each + 2, Status()))
        async with client(it.address, "o", "observer") as observer:
            await observer.expect(Status(), State)
            assert requests.unsent_bytes < UNSENT_BYTES + 4 * size < number * size
        deaf_socket.close(0)
        deaf.term()


def test_observers_make_room_for_each_other_and_never_more_than_a_number_are_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests = make_requests()
    clients = Clients(requests)
    for number in range(3 * quotas.MOST_OBSERVERS):
        requests.receive(
            [f"o{number}".encode(), pack(1, hello(f"o{number}", "observer"))], float(number) / 1000, "observer"
        )
    known = [one for one in requests.handlers.peers.known.values() if one.hello.role == "observer"]
    assert len(known) == quotas.MOST_OBSERVERS
    assert {one.hello.name for one in known} == {
        f"o{number}" for number in range(2 * quotas.MOST_OBSERVERS, 3 * quotas.MOST_OBSERVERS)
    }
    assert b"a" in requests.handlers.peers.known, "servers stay"
    assert clients.requests.handlers.peers._roles == {"rollout": 3, "learner": 1, "observer": quotas.MOST_OBSERVERS}


def test_further_names_of_servers_are_refused_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(quotas.MOST_PEERS, "rollout", 3)
    requests = make_requests()
    clients = Clients(requests)
    clients.turn()
    clients.say("d", hello("d"))
    assert "3 rollout processes have said Hello, and 3 may" in clients.turn()[-1][2].reason
    clients.say("a", hello("a"))
    assert type(clients.turn()[-1][2]).__name__ == "Welcome", "a known one is always let in"


def test_a_connection_that_says_hello_under_many_names_is_refused() -> None:
    requests = make_requests()
    clients = Clients(requests)
    clients.turn()
    for number in range(2 * quotas.MOST_HELLOS):
        clients.say("a", hello(f"name-{number}"))
    answers = [answer for _, _, answer in clients.turn()]
    assert [type(one).__name__ for one in answers] == ["Welcome"] * quotas.MOST_HELLOS + [
        "Refused"
    ] * quotas.MOST_HELLOS
    assert "has said Hello under 16 other names" in answers[-1].reason


def test_a_repeated_hello_has_nothing_tried_again() -> None:
    requests = make_requests()
    clients = Clients(requests)
    before = revision_of(requests.handlers)
    for _ in range(100):
        clients.say("a", hello("a"))
    assert revision_of(requests.handlers) == before


@pytest.mark.parametrize(("who", "kind"), [("l0", "Take"), ("a", "Where")])
def test_the_oldest_request_of_a_kind_makes_room(who: str, kind: str) -> None:
    requests = make_requests()
    clients = Clients(requests)
    message = {"Take": Take(version=0, rank=0, world=1), "Where": Where(known=None)}[kind]
    numbers = [clients.say(who, message) for _ in range(3 * quotas.MOST_PENDING[kind])]
    assert sorted(request.number for request in requests._parked) == numbers[-quotas.MOST_PENDING[kind] :]


def test_tokens_of_replaced_processes_are_remembered_up_to_a_number() -> None:
    remembered: quotas.Remembered[int] = quotas.Remembered(3)
    for number in (1, 2, 3, 4, 2):
        remembered.add(number)
    assert 1 not in remembered and 4 in remembered and len(remembered) == 3


@in_loop
async def test_a_group_is_stored_though_strangers_took_all_open_files(tmp_path: Path) -> None:
    """The buffer ended with the words of a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    async with buffer(make_requests(tmp_path / "buffer.sqlite")) as it, rollout(it.address) as server:
        (item,) = await server.ask(1) or []
        lowest = os.open(os.devnull, os.O_RDONLY)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + 1, hard))
        try:
            with pytest.raises(OSError, match="Too many open files"):
                os.open(os.devnull, os.O_RDONLY)
            stored = await server.put(item, group(item.item))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(lowest)
        assert isinstance(stored, Stored) and stored.accepted


def test_the_page_of_the_protocol_names_the_limits() -> None:
    page = (Path(__file__).parents[3] / "docs/design/samples-wire.md").read_text()
    pending = ", ".join(f"{most:,} `{kind}`" for kind, most in quotas.MOST_PENDING.items())
    for words in (
        f"read | {UNKNOWN_BYTES >> 10} KiB |",
        f"observer | {router.SMALL_BYTES >> 20} MiB |",
        f"Hello | {router.HELLO_S:g} s |",
        f"read | {UNSENT_BYTES >> 20} MiB, and {PARKED_BYTES >> 20} MiB",
        f"read | {OPTIONS[zmq.SNDHWM]:,} |",
        f"says Hello | {quotas.MOST_HELLOS} |",
        f"observers | {quotas.MOST_PEERS['rollout']:,}, {quotas.MOST_OBSERVERS} |",
        f"process | {pending} |",
        f"fewer than {router.KEPT_FILES} open files",
    ):
        assert words in page, words
