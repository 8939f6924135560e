"""Who may connect to a server of the run, and with which role, by its key.

TCP uses CURVE. One machine has a Unix socket that other users cannot enter, with a role's secret as password (PLAIN):
to encrypt megabytes takes as long as to store them. A frame names the role: `frame.get("User-Id")`.
"""

import ipaddress
import logging
import os
import socket
from functools import cache
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from buffer.keys import ClientKeys, Role, ServerKeys, load_client_keys, load_server_keys, make_keys

DOMAIN = "headrace"
LOCAL = "ipc://buffer"
"""A Unix socket in the folder of the run's keys."""
SOCKET, LOCK = "buffer.sock", "buffer.lock"
MOST_PATH = 100
"""Bytes; a longer path is reached through a descriptor of its folder."""


class RoleAuthenticator(ThreadAuthenticator):
    def __init__(self, context: "zmq.Context[Any]", keys: ServerKeys) -> None:
        log = logging.getLogger("zmq.auth.roles")
        log.setLevel(logging.WARNING)  # pyzmq writes passwords into lines of level DEBUG
        super().__init__(zmq.Context.shadow(context), log=log)
        self.keys = keys

    def curve_user_id(self, client_public_key: bytes) -> str:
        return self.keys.clients[super().curve_user_id(client_public_key).encode()]


def judge_connections(
    context: "zmq.Context[Any]", socket: zmq.asyncio.Socket, keys: ServerKeys, address: str = ""
) -> ThreadAuthenticator:
    """Start an authenticator for `socket`, which is not bound yet.

    It is a thread, so a busy event loop delays no connection. The caller stops it before the context ends. libzmq takes
    foreign bytes for ZMTP 1 or 2, which a socket with a mechanism rejects.
    """
    authenticator = RoleAuthenticator(context, keys)
    try:
        authenticator.start()
        socket.zap_domain = DOMAIN.encode()
        if address == LOCAL:
            authenticator.configure_plain(DOMAIN, dict(keys.passwords))
            socket.plain_server = True
        else:
            authenticator.configure_curve_callback(DOMAIN, keys)
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    except BaseException:  # else the end of the context would wait for ever
        authenticator.stop()
        raise
    return authenticator


def identify(socket: Any, keys: ClientKeys, address: str) -> None:
    if address == LOCAL:
        socket.plain_username, socket.plain_password = keys.role.encode(), keys.secret
    else:
        socket.curve_serverkey = keys.server_public
        socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret


def endpoint(address: str, folder: Path) -> str:
    """Where ZeroMQ binds or connects for `address`. `folder` holds the run's keys."""
    if address != LOCAL:
        return address
    path = folder.absolute() / SOCKET
    if len(os.fsencode(path)) > MOST_PATH:
        path = Path(f"/proc/self/fd/{_opened(path.parent)}", SOCKET)
    return f"ipc://{path}"


@cache
def _opened(folder: Path) -> int:
    return os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def is_loopback(address: str) -> bool:
    """Whether `tcp://host:port`, or LOCAL, is reachable from this machine only."""
    if address == LOCAL:
        return True
    host = split(address)[0]
    if host == "*":
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in found)


def split(address: str) -> tuple[str, str]:
    """`tcp://host:port` -> (host, port), without brackets."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def ready(address: str, run: Path) -> Path:
    """Return the folder of the run's keys. Makes them if the buffer is on this machine, so that any process may start
    first; on another machine they would fit no other."""
    return make_keys(run / "keys") if is_loopback(address) else run / "keys"


def buffer_keys(address: str, run: Path) -> ServerKeys:
    """Make the run's keys, if needed, and return the buffer's."""
    return load_server_keys(make_keys(run / "keys"), "buffer", passwords=address == LOCAL)


def client_keys_for(address: str, run: Path, role: Role) -> ClientKeys:
    """Raises KeysError."""
    return load_client_keys(ready(address, run), role)
