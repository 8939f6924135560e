"""CURVE keys of the samples wire: made once per run, needed as soon as the buffer listens beyond loopback.

`<run>/keys/` holds four files of one Z85 key each, mode 0600: `server.public server.secret client.public
client.secret`. `python -m actors launch` and `python -m buffer keys` make them; a rollout server or learner on another
machine needs `server.public`, `client.public` and `client.secret` only. Waits for nothing.
"""

import ipaddress
import os
import shutil
import socket
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

DOMAIN = "headrace"
"""The ZAP domain of both wires."""
NAMES = ("server.public", "server.secret", "client.public", "client.secret")


class KeysError(ValueError):
    """Keys are missing, unreadable or readable by others; the text names file and remedy."""


@dataclass(frozen=True)
class ServerKeys:
    """The buffer's: its own pair, and the one client key it lets in."""

    public: bytes
    secret: bytes = field(repr=False)
    client_public: bytes

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether this client key is the run's. (Called by pyzmq's authenticator with the key in Z85.)"""
        return key == self.client_public


@dataclass(frozen=True)
class ClientKeys:
    """Every other process's: the buffer's public key and the run's client pair."""

    server_public: bytes
    public: bytes
    secret: bytes = field(repr=False)


def judge_connections(
    context: zmq.asyncio.Context, socket: zmq.asyncio.Socket, keys: ServerKeys | None
) -> ThreadAuthenticator:
    """Start an authenticator that accepts or rejects each connection to `socket`, which is not bound yet.

    It runs in a thread, so a busy event loop delays no connection. The caller stops it before the context ends.

    With keys, only the run's clients are accepted. Without keys, every peer on this machine that speaks ZMTP 3 is
    accepted. libzmq takes foreign bytes, such as a browser's HTTP request, for ZMTP 1 or 2, and a socket with a ZAP
    domain rejects these (https://rfc.zeromq.org/spec/27).
    """
    authenticator = ThreadAuthenticator(zmq.Context.shadow(context))
    try:
        authenticator.start()
        socket.zap_domain = DOMAIN.encode()
        if keys:
            authenticator.configure_curve_callback(DOMAIN, keys)
            socket.curve_server = True
            socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    except BaseException:  # the end of the context would wait for the thread's sockets for ever
        authenticator.stop()
        raise
    return authenticator


def make_keys(folder: Path) -> Path:
    """Make the keys of a run in `folder` unless they are there. All four files appear at once or not at all."""
    if (folder / NAMES[0]).exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}")
    fresh.mkdir(mode=0o700)
    try:
        pairs = (*zmq.curve_keypair(), *zmq.curve_keypair())
        for name, key in zip(NAMES, pairs, strict=True):
            with open(fresh / name, "xb", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
                file.write(key + b"\n")
        fresh.rename(folder)
    except OSError:
        shutil.rmtree(fresh)
        if not (folder / NAMES[0]).exists():  # unless another process made them first
            raise
    return folder


def load_server_keys(folder: Path) -> ServerKeys:
    """The buffer's keys; raises KeysError."""
    return ServerKeys(*(_key(folder / name) for name in ("server.public", "server.secret", "client.public")))


def load_client_keys(folder: Path) -> ClientKeys:
    """The keys of a process that talks to the buffer; raises KeysError."""
    return ClientKeys(*(_key(folder / name) for name in ("server.public", "client.public", "client.secret")))


def is_loopback(address: str) -> bool:
    """Whether `tcp://host:port` is reachable from this machine only."""
    host = split(address)[0]
    if host == "*":
        return False
    try:
        found = {info[4][0] for info in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(str(ip).partition("%")[0]).is_loopback for ip in found)


def split(address: str) -> tuple[str, str]:
    """`tcp://host:port` -> (host, port), without the brackets of IPv6."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), port


def server_keys_for(address: str, run: Path) -> ServerKeys | None:
    """Keys the buffer must use to listen on `address`: None on loopback, else those of the run. Raises KeysError."""
    return None if is_loopback(address) else load_server_keys(run / "keys")


def client_keys_for(address: str, run: Path) -> ClientKeys | None:
    """Keys to reach the buffer at `address` with: None on loopback, else those of the run. Raises KeysError."""
    return None if is_loopback(address) else load_client_keys(run / "keys")


def _key(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode & 0o777
        key = path.read_bytes().strip()
    except OSError as error:
        raise KeysError(
            f"{path}: {error.strerror}; beyond loopback the samples wire needs keys: `python -m buffer keys CONFIG`"
        ) from None
    if mode & 0o077:
        raise KeysError(f"{path}: mode {mode:04o} lets others read the key; `chmod 600 {path}`, or make new keys")
    if len(key) != 40:
        raise KeysError(f"{path}: {len(key)} bytes, a key has 40; remove the folder and make new keys")
    return key
