"""Keys for tests, the same in every process, so that no test has to hand them over; and bare sockets that use them."""

import atexit
import hashlib
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import zmq
from zmq.utils import z85

from buffer.curve import identify
from buffer.keys import ROLES, ClientKeys, Pair, Role, ServerKeys, load_client_keys, load_server_keys, write_keys

TOKEN = "t" * 43


def _pair(role: str) -> Pair:
    secret = z85.encode(hashlib.sha256(f"a test's {role}".encode()).digest())
    return Pair(zmq.curve_public(secret), secret)


PAIRS: dict[Role, Pair] = {role: _pair(role) for role in ROLES}


def give_keys(run: Path) -> Path:
    """Write the keys into the folder of a run, unless it has some; returns the folder of the keys."""
    folder = run / "keys"
    if not folder.exists():
        run.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700)
        write_keys(folder, PAIRS, TOKEN)
    return folder


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="keys-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return give_keys(folder)


def server_keys(role: Role = "buffer") -> ServerKeys:
    """Keys of the buffer, or of a learner as the server of weights."""
    return load_server_keys(_folder(), role, passwords=role == "buffer")


def client_keys(role: Role = "rollout", server: Role = "buffer") -> ClientKeys:
    return load_client_keys(_folder(), role, server)


def foreign_keys(role: Role = "rollout", server: Role = "buffer") -> ClientKeys:
    """Keys of `role` in another run, whose holder knows the public key of this run's server."""
    known = client_keys(role, server)
    return ClientKeys(known.folder, role, known.server_public, *zmq.curve_keypair())


def lock_fake(socket: Any, role: Role = "buffer") -> None:
    """Give a test's own server the keys of the real one. It asks for no client's key."""
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = PAIRS[role]


def unlock(socket: Any, role: Role = "rollout", server: Role = "buffer", address: str = "tcp://") -> Any:
    """Have a test's own client show the key of `role`."""
    identify(socket, client_keys(role, server), address)
    return socket
