"""Addresses by which the nodes of a cluster reach each other. Asks the routing table only; sends nothing."""

import socket
from collections.abc import Iterator
from typing import Any

import psutil

from actors.doctor.run_file import LOOPBACK, hosts
from buffer.curve import is_loopback, split
from configs.schema import BUFFER_PORT, Config

FAR = "192.0.2.1"
"""A documentation address: its route is the one to other machines in general."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without them gloo listens where the host's name resolves to, often loopback, and fails between machines."""


def address_towards(cluster: str) -> str:
    host = split(cluster)[0] if ":" in cluster else ""
    for target in (host, FAR):
        try:
            found = socket.getaddrinfo(target or FAR, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return next(_addresses(), ("", "127.0.0.1"))[1]


def _addresses() -> Iterator[tuple[str, str]]:
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                yield name, each.address


def interface_hints(address: str, interface: str | None) -> dict[str, str]:
    """Empty on loopback."""
    name = interface or next((name for name, found in _addresses() if found == address), None)
    return dict.fromkeys(INTERFACES, name) if name else {}


def on_cluster(config: Config, cluster: str) -> Config:
    """Puts this machine's addresses in place of defaults. What a person wrote stays: `doctor.run_file.unreachable`
    names it."""
    host = address_towards(cluster)
    changed: dict[str, dict[str, Any]] = {"run": {"folder": config.run.folder.absolute()}}
    if not is_loopback(f"tcp://{host}:0"):  # else the cluster is on this machine alone
        for key in (key for key, value in hosts(config).items() if value == LOOPBACK[key]):
            section, name = key.split(".")
            shown = f"[{host}]" if ":" in host else host
            value = f"tcp://{shown}:{BUFFER_PORT}" if name == "address" else host
            changed[section] = {name: value}
    sections = {name: getattr(config, name).model_copy(update=update) for name, update in changed.items()}
    return config.model_copy(update=sections)
