"""Addresses by which the nodes of a cluster reach each other: this machine's, its interface, and what a run file says.

Used by the launcher before it connects to Ray, and on each node before a process starts. Asks the routing table only;
sends nothing.
"""

import socket
from collections.abc import Iterator
from typing import Any

import psutil

from actors.doctor.run_file import LOOPBACK, hosts
from buffer.curve import is_loopback, split
from configs.schema import BUFFER_PORT, Config

FAR = "192.0.2.1"
"""An address for documentation: the route to it is the one to other machines in general."""
INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Without them gloo listens where the host's name resolves to, often loopback, and its groups fail between machines."""


def address_towards(cluster: str) -> str:
    """This machine's address as other nodes of `cluster` reach it; loopback if that is how the cluster is reached."""
    host = split(cluster)[0] if ":" in cluster else ""
    for target in (host, FAR):
        try:
            found = socket.getaddrinfo(target or FAR, 1, type=socket.SOCK_DGRAM)[0]
            with socket.socket(found[0], socket.SOCK_DGRAM) as probe:
                probe.connect(found[4])  # chooses the route, sends nothing
                return str(probe.getsockname()[0])
        except OSError:
            continue
    return next(_addresses(), ("", "127.0.0.1"))[1]


def _addresses() -> Iterator[tuple[str, str]]:
    """Interface and IPv4 address of each interface but loopback."""
    for name, found in psutil.net_if_addrs().items():
        for each in found:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                yield name, each.address


def interface_hints(address: str, interface: str | None) -> dict[str, str]:
    """Variables that name gloo's and NCCL's interface: `interface`, or that of `address`; nothing on loopback."""
    name = interface or next((name for name, found in _addresses() if found == address), None)
    return dict.fromkeys(INTERFACES, name) if name else {}


def on_cluster(config: Config, cluster: str) -> Config:
    """`config` with an absolute run folder and with this machine's address where a host has its default.

    What a person wrote stays: `doctor.run_file.unreachable` names it.
    """
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
