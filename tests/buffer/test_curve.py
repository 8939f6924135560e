"""Who may connect: on loopback everybody, beyond it only clients with the run's keys."""

import asyncio
import subprocess
import threading
from dataclasses import replace

import pytest
import zmq
import zmq.asyncio
from zmq.auth.thread import AuthenticationThread

from buffer.curve import (
    NAMES,
    ClientKeys,
    KeysError,
    ServerKeys,
    client_keys_for,
    is_loopback,
    judge_connections,
    load_client_keys,
    load_server_keys,
    make_keys,
    server_keys_for,
)
from buffer.wire.client import Connection
from buffer.wire.protocol import State, Status
from buffer.wire.server import BufferServer, ListenError
from learner.weights.protocol import router
from tests.harness.buffer_process import Process, buffer, client, in_loop
from tests.harness.fakes import until
from tests.harness.ports import free_port


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:5600", True), ("tcp://127.3.2.1:5600", True), ("tcp://localhost:5600", True),
        ("tcp://[::1]:5600", True), ("tcp://*:5600", False), ("tcp://0.0.0.0:5600", False), ("tcp://[::]:5600", False),
        ("tcp://10.1.2.3:5600", False),
    ],
)  # fmt: skip
def test_what_is_loopback(address, loopback):
    assert is_loopback(address) == loopback


def test_keys_are_made_once_and_for_us_alone(tmp_path):
    folder = make_keys(tmp_path / "run" / "keys")
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700
    keys = load_server_keys(folder)
    make_keys(folder)
    assert load_server_keys(folder) == keys
    assert load_client_keys(folder).server_public == keys.public
    assert load_client_keys(folder).public == keys.client_public
    assert keys.secret.decode() not in repr(keys)


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path):
    folder = make_keys(tmp_path / "keys")
    (folder / "client.secret").chmod(0o640)
    with pytest.raises(KeysError, match=r"0640.*chmod 600"):
        load_client_keys(folder)
    (folder / "client.secret").chmod(0o600)
    (folder / "client.secret").write_text("short")
    with pytest.raises(KeysError, match="40"):
        load_client_keys(folder)
    with pytest.raises(KeysError, match="python -m buffer keys"):
        load_server_keys(tmp_path / "none")


def test_keys_are_asked_for_beyond_loopback_only(tmp_path):
    assert server_keys_for("tcp://127.0.0.1:1", tmp_path) is None
    assert client_keys_for("tcp://127.0.0.1:1", tmp_path) is None
    make_keys(tmp_path / "keys")
    assert server_keys_for("tcp://10.0.0.1:1", tmp_path) == load_server_keys(tmp_path / "keys")
    assert client_keys_for("tcp://10.0.0.1:1", tmp_path) == load_client_keys(tmp_path / "keys")


def stranger_keys(known: ClientKeys) -> ClientKeys:
    public, secret = zmq.curve_keypair()
    return replace(known, public=public, secret=secret)


@in_loop
async def test_beyond_loopback_the_runs_keys_get_in_and_nobody_else_gets_anything(tmp_path):
    folder = make_keys(tmp_path / "keys")
    known = load_client_keys(folder)
    async with buffer(address="tcp://*:*", keys=load_server_keys(folder)) as it:
        address = f"tcp://127.0.0.1:{it.address.rpartition(':')[2]}"
        another_server = replace(known, server_public=zmq.curve_keypair()[0])
        for keys in (None, stranger_keys(known), another_server):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.5), client(address, keys=keys):
                    pass
        assert it.requests.handlers.peers == {} and not it.requests.errors
        async with client(address, keys=known) as friend:
            assert await friend.expect(Status(), State)


@in_loop
async def test_a_client_with_a_foreign_key_is_told_so(tmp_path, caplog):
    folder = make_keys(tmp_path / "keys")
    async with buffer(address="tcp://*:*", keys=load_server_keys(folder)) as it:
        address = f"tcp://127.0.0.1:{it.address.rpartition(':')[2]}"
        lost = Connection(address, "rollout-0", "rollout", retry_s=0.1, keys=stranger_keys(load_client_keys(folder)))
        connecting = asyncio.create_task(lost.__aenter__())
        await until(lambda: "keys" in lost.problem)
        assert "keys" in lost.problem and not connecting.done()
        connecting.cancel()  # which closes it
        await asyncio.wait({connecting})


def test_beyond_loopback_without_keys_is_refused(tmp_path):
    with pytest.raises(ListenError, match=r"tcp://\*:0.*python -m buffer keys"):
        BufferServer("tcp://*:0", 2**20)
    it = Process(tmp_path)
    it.overrides = {"buffer.address": f"tcp://*:{free_port()}"}
    done = subprocess.run(it.arguments(), capture_output=True, text=True, timeout=240)
    assert done.returncode == 2
    assert "python -m buffer keys" in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not it.run.exists()


def test_the_command_makes_the_keys_of_a_run(tmp_path):
    it = Process(tmp_path)
    done = subprocess.run(it.arguments("keys"), capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == str(it.run / "keys")
    assert load_client_keys(it.run / "keys")


def judges() -> list[threading.Thread]:
    """Threads that judge connections; the end of a context waits for ever for the sockets of its own."""
    return [thread for thread in threading.enumerate() if isinstance(thread, AuthenticationThread)]


def test_keys_that_are_none_end_the_thread_that_judges_connections():
    """40 bytes long, as a file of them may be, and no key: libzmq refuses them only where they are set."""
    context, before = zmq.asyncio.Context(), judges()
    socket = context.socket(zmq.ROUTER)
    with pytest.raises(zmq.ZMQError):
        judge_connections(context, socket, ServerKeys(b"~" * 40, b"~" * 40, b"~" * 40))
    assert judges() == before
    socket.close()
    context.term()


def test_a_weights_wire_that_cannot_be_bound_ends_the_thread_that_judges_connections():
    context, before = zmq.asyncio.Context(), judges()
    with pytest.raises(zmq.ZMQError):
        router(context, "203.0.113.1", None)
    assert judges() == before
    context.term()
