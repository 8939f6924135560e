"""Keys of a run: made once, read by those that need them; and the addresses and sockets that they open."""

import asyncio
import logging
import multiprocessing
import os
import random
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from zmq.auth.thread import AuthenticationThread

from buffer.curve import LOCAL, SOCKET, buffer_keys, client_keys_for, is_loopback, judge_connections
from buffer.keys import (
    NAMES,
    OLD_NAMES,
    TOKEN,
    KeysError,
    NoKeys,
    ServerKeys,
    load_client_keys,
    load_server_keys,
    load_token,
    make_keys,
    read_key,
    require_keys,
)
from buffer.wire.client import Connection
from buffer.wire.protocol import State, Status
from buffer.wire.router import ListenError
from buffer.wire.server import BufferServer
from learner.weights.protocol import router
from tests.harness.buffer_process import Process, buffer, client, in_loop
from tests.harness.fakes import until
from tests.harness.keys import client_keys, foreign_keys, server_keys


@pytest.mark.parametrize(
    ("address", "loopback"),
    [
        ("tcp://127.0.0.1:5600", True), ("tcp://127.3.2.1:5600", True), ("tcp://localhost:5600", True),
        ("tcp://[::1]:5600", True), ("tcp://*:5600", False), ("tcp://0.0.0.0:5600", False), ("tcp://[::]:5600", False),
        ("tcp://10.1.2.3:5600", False), ("ipc://buffer", True),
    ],
)  # fmt: skip
def test_what_is_loopback(address, loopback):
    assert is_loopback(address) == loopback


def stat_of(folder):
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def test_keys_are_made_once_and_for_us_alone(tmp_path):
    folder = make_keys(tmp_path / "run" / "keys")
    assert stat_of(folder) == dict.fromkeys(NAMES, 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    keys = load_server_keys(folder, passwords=True)
    make_keys(folder)
    assert load_server_keys(folder, passwords=True) == keys
    for role in ("learner", "rollout", "launcher", "observer"):
        known = load_client_keys(folder, role)
        assert known.server_public == keys.public and keys.clients[known.public] == role
        assert known.secret.decode() == keys.passwords[role] and known.secret.decode() not in repr((known, keys))
    assert keys.secret.decode() not in repr(keys)
    weights = load_server_keys(folder, "learner")
    assert [*weights.clients.values()] == ["rollout"]
    assert load_client_keys(folder, "rollout", server="learner").server_public == weights.public


def test_of_many_processes_that_start_at_once_one_makes_the_keys(tmp_path):
    """Also in the place of older keys: two that replace them at the same time must not remove each other's."""
    for name in OLD_NAMES:
        (tmp_path / "keys").mkdir(exist_ok=True)
        (tmp_path / "keys" / name).write_text("x" * 40)
    context = multiprocessing.get_context("fork")
    together = context.Barrier(6)
    made = context.Queue()

    def start() -> None:
        together.wait()
        made.put(load_server_keys(make_keys(tmp_path / "keys")).public)

    processes = [context.Process(target=start) for _ in range(6)]
    for process in processes:
        process.start()
    publics = {made.get(timeout=60) for _ in processes}
    for process in processes:
        process.join(60)
    assert publics == {load_server_keys(tmp_path / "keys").public}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".keys.lock", "keys"]
    assert stat_of(tmp_path / "keys") == dict.fromkeys(NAMES, 0o600)


def test_a_kill_while_older_keys_are_replaced_leaves_a_folder_that_gets_new_ones(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / OLD_NAMES[2]).write_text("x" * 40)  # the first two are removed already
    assert load_client_keys(make_keys(tmp_path / "keys"), "rollout")


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / "keys").mkdir()
    (tmp_path / "keys" / "notes").write_text("mine")
    with pytest.raises(KeysError, match=f"{tmp_path}/keys: keys cannot be made: Directory not empty"):
        make_keys(tmp_path / "keys")
    assert [path.name for path in tmp_path.iterdir() if path.is_dir()] == ["keys"]


def test_a_place_that_takes_no_keys_is_named_with_its_remedy(tmp_path):
    (tmp_path / "runs").write_text("a file")
    problem = "keys cannot be made: Not a directory; make it writable, or name another place"
    with pytest.raises(KeysError, match=f"{tmp_path}/runs/one/keys: {problem}"):
        make_keys(tmp_path / "runs" / "one" / "keys")


def test_a_key_that_others_can_read_or_that_is_none_is_refused(tmp_path):
    folder = make_keys(tmp_path / "keys")
    (folder / "rollout.secret").chmod(0o640)
    with pytest.raises(KeysError, match=r"0640.*chmod 600"):
        load_client_keys(folder, "rollout")
    (folder / "rollout.secret").chmod(0o600)
    (folder / "rollout.secret").write_text("short")
    with pytest.raises(KeysError, match="5 bytes are no key"):
        load_client_keys(folder, "rollout")
    with pytest.raises(NoKeys, match="python -m buffer"):
        load_server_keys(tmp_path / "none")
    (folder / TOKEN).write_text("t" * 40)
    with pytest.raises(KeysError, match="40 bytes are no key"):
        load_token(folder)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_of_a_key_is_refused_by_name_or_changes_nothing(tmp_path, name):
    folder = make_keys(tmp_path / "keys")
    whole, draw, refused = (folder / name).read_bytes(), random.Random(name), 0
    for _ in range(60):
        bit = draw.randrange(8 * len(whole))
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        (folder / name).write_bytes(data)
        try:
            require_keys(folder)
            for role in ("buffer", "learner"):
                load_server_keys(folder, role, passwords=True)
            load_client_keys(folder, "rollout")
            load_token(folder)
        except KeysError as error:
            assert str(folder) in str(error) and name.partition(".")[0] in str(error) and "\n" not in str(error)
            refused += 1
        (folder / name).write_bytes(whole)
    require_keys(folder)
    assert refused > (10 if name == TOKEN else 50)


def test_keys_of_an_older_headrace_name_the_remedy(tmp_path):
    for name in OLD_NAMES:
        (tmp_path / name).write_text("x" * 40)
    with pytest.raises(NoKeys, match=r"those of an older Headrace: .*python -m buffer.* replaces them, then copy"):
        load_client_keys(tmp_path, "rollout")


def test_a_process_that_starts_first_makes_the_keys_only_where_all_are_on_this_machine(tmp_path):
    for number, address in enumerate(("tcp://127.0.0.1:1", LOCAL)):
        keys = client_keys_for(address, tmp_path / str(number), "rollout")
        assert buffer_keys(address, tmp_path / str(number)).clients[keys.public] == "rollout"
    with pytest.raises(NoKeys, match="or copy the folder from there"):
        client_keys_for("tcp://10.0.0.1:1", tmp_path / "far", "learner")
    assert not (tmp_path / "far").exists()
    assert buffer_keys("tcp://10.0.0.1:1", tmp_path / "far"), "the buffer's machine is where keys are made"


@in_loop
async def test_a_foreign_server_learns_no_secret_and_is_not_spoken_to():
    """Keys of another run are at the address: the client's Hello cannot be read there."""
    async with buffer() as it:
        lost = Connection(it.address, "rollout-0", "rollout", retry_s=0.1, keys=another_runs_server())
        connecting = asyncio.create_task(lost.__aenter__())
        await until(lambda: "keys" in lost.problem)
        assert it.requests.handlers.peers.known == {} and not it.requests.errors
        connecting.cancel()
        await asyncio.wait({connecting})


def another_runs_server():
    return replace(client_keys(), server_public=zmq.curve_keypair()[0])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", LOCAL])
@in_loop
async def test_a_client_with_a_foreign_key_is_told_so(address):
    async with buffer(address=address) as it:
        lost = Connection(it.address, "rollout-0", "rollout", retry_s=0.1, keys=foreign_keys())
        connecting = asyncio.create_task(lost.__aenter__())
        await until(lambda: "does not know our key" in lost.problem)
        assert not connecting.done()
        connecting.cancel()  # which closes it
        await asyncio.wait({connecting})


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:*", LOCAL])
@in_loop
async def test_keys_that_were_removed_open_nothing_after_new_ones_are_made(tmp_path, address):
    folder = make_keys(tmp_path / "keys")
    before, token = load_client_keys(folder, "rollout"), load_token(folder)
    shutil.rmtree(folder)
    make_keys(folder)
    assert load_token(folder) != token
    async with buffer(address=address, keys=load_server_keys(folder, passwords=address == LOCAL)) as it:
        lost = Connection(it.address, "rollout-0", "rollout", retry_s=0.1, keys=before)
        connecting = asyncio.create_task(lost.__aenter__())
        await until(lambda: "key" in lost.problem)
        async with client(it.address, "rollout-1", keys=load_client_keys(folder, "rollout")):
            assert [peer.hello.name for peer in it.requests.handlers.peers.known.values()] == ["rollout-1"]
        connecting.cancel()
        await asyncio.wait({connecting})


@pytest.mark.parametrize("length", [10, 150])
@in_loop
async def test_a_unix_socket_serves_a_run_however_long_its_path_is(tmp_path, length):
    folder = make_keys(tmp_path / ("x" * length) / "keys")
    async with buffer(address=LOCAL, keys=load_server_keys(folder, passwords=True)) as it:
        assert it.address == LOCAL and (folder / SOCKET).is_socket()
        async with client(it.address, keys=load_client_keys(folder, "rollout")) as one:
            assert await one.expect(Status(), State)
            with pytest.raises(ListenError, match=f"in use by process {os.getpid()}, another buffer"):
                async with BufferServer(LOCAL, 2**20, load_server_keys(folder, passwords=True)):
                    pass
            assert await one.expect(Status(), State), "the second buffer has not taken the path"
    async with buffer(address=LOCAL, keys=load_server_keys(folder, passwords=True)):
        pass


@in_loop
async def test_a_folder_that_holds_no_socket_names_the_remedy(tmp_path, monkeypatch):
    folder = make_keys(tmp_path / "keys")
    (folder / SOCKET).mkdir()
    with pytest.raises(ListenError, match=r"ipc://buffer: .*set it to tcp://127.0.0.1:5600"):
        async with buffer(address=LOCAL, keys=load_server_keys(folder, passwords=True)):
            pass


def test_the_command_makes_the_keys_of_a_run(tmp_path):
    it = Process(tmp_path)
    done = subprocess.run(it.arguments("keys"), capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout.strip() == str(it.run / "keys")
    assert load_client_keys(it.run / "keys", "observer")


@in_loop
async def test_passwords_reach_no_log(caplog):
    caplog.set_level(logging.DEBUG)
    async with buffer(address=LOCAL) as it, client(it.address):
        pass
    assert client_keys().secret.decode() not in caplog.text


def judges() -> list[threading.Thread]:
    """Threads that judge connections; the end of a context waits for ever for the sockets of its own."""
    return [thread for thread in threading.enumerate() if isinstance(thread, AuthenticationThread)]


def test_keys_that_are_none_end_the_thread_that_judges_connections():
    """40 bytes long, as a file of them may be, and no key: libzmq refuses them only where they are set."""
    context, before = zmq.asyncio.Context(), judges()
    socket = context.socket(zmq.ROUTER)
    with pytest.raises(zmq.ZMQError):
        judge_connections(context, socket, ServerKeys(Path(), b"~" * 40, b"~" * 40, {}))
    assert judges() == before
    socket.close()
    context.term()


def test_a_weights_wire_that_cannot_be_bound_ends_the_thread_that_judges_connections():
    context, before = zmq.asyncio.Context(), judges()
    with pytest.raises(zmq.ZMQError):
        router(context, "203.0.113.1", server_keys("learner"))
    assert judges() == before
    context.term()


def test_keys_in_a_folder_that_cannot_be_looked_into_are_refused_in_words(tmp_path):
    """As where a run's group may read its files: `keys` is its user's only."""
    with pytest.raises(KeysError, match="File name too long; keys are made by `python -m actors launch`"):
        read_key(tmp_path / ("k" * 300) / "observer.secret")
