"""The proxies of the nemesis: bytes pass, wait and come late, in order; and a bit is flipped and given back."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.ports import free_port
from tests.system.nemesis.bits import Flip, whole
from tests.system.nemesis.proxy import Network, at, named_by_address


@pytest.fixture
def echo() -> Iterator[int]:
    """Port of a server that sends back what comes."""

    def serve(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def network() -> Iterator[Network]:
    made = Network()
    yield made
    made.close()


def exchange(client: socket.socket, data: bytes) -> bytes:
    client.sendall(data)
    return received(client, len(data))


def received(client: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := client.recv(1 << 16)):
        data += more
    return data


def test_a_partition_holds_bytes_and_new_connections_back_until_it_heals(network: Network, echo: int) -> None:
    network.add("wire", port := free_port(), at(echo))
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        assert exchange(client, b"before") == b"before"
        network.part("wire")
        client.settimeout(0.1)
        client.sendall(b"held")
        with pytest.raises(TimeoutError):
            client.recv(1)
        with socket.create_connection(("127.0.0.1", port), 60) as other:
            other.sendall(b"new")
            other.settimeout(0.1)
            with pytest.raises(TimeoutError):
                other.recv(1)
            network.heal("wire")
            for each, data in ((client, b"held"), (other, b"new")):
                each.settimeout(60)
                assert received(each, len(data)) == data


def test_a_delay_keeps_the_order(network: Network, echo: int) -> None:
    network.add("wire", port := free_port(), at(echo))
    data = random.Random(0).randbytes(1 << 20)
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        network.delay("wire", 0.1)
        began = time.monotonic()
        assert exchange(client, b"x") == b"x" and 0.2 <= time.monotonic() - began < 60
        sending = threading.Thread(target=client.sendall, args=(data,))
        sending.start()
        assert received(client, len(data)) == data
        sending.join()


def test_the_end_of_one_side_ends_the_other(network: Network) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        network.add("wire", port := free_port(), at(listener.getsockname()[1]))
        with socket.create_connection(("127.0.0.1", port), 60) as client:
            far, _ = listener.accept()
            far.close()
            assert client.recv(1) == b""
    with socket.create_connection(("127.0.0.1", port), 60) as client:
        assert client.recv(1) == b"", "nobody listens at the far end"


def test_a_port_is_named_by_the_address(network: Network, echo: int) -> None:
    network.add("wire", port := free_port(), named_by_address)
    with socket.create_connection((f"127.1.{echo >> 8}.{echo & 255}", port), 60) as client:
        assert exchange(client, b"found") == b"found"


def test_a_bit_is_flipped_and_given_back(tmp_path: Path) -> None:
    (file := tmp_path / "a").write_bytes(data := random.Random(0).randbytes(100))
    flip = Flip.of(whole(file), random.Random(1))
    damaged = file.read_bytes()
    assert sum((one ^ other).bit_count() for one, other in zip(data, damaged, strict=True)) == 1
    assert flip.undo() and file.read_bytes() == data
    assert not flip.undo(), "it was given back"
    file.write_bytes(b"")
    assert not flip.undo() and file.read_bytes() == b""
    file.unlink()
    assert not flip.undo()


def test_a_flip_is_within_its_span(tmp_path: Path) -> None:
    (file := tmp_path / "a").write_bytes(bytes(100))
    found = {Flip.of((file, 40, 2), random.Random(seed)).position for seed in range(20)}
    assert found == {40, 41} and file.stat().st_size == 100
