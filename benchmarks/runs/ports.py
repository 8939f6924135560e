"""Ports for the processes of benchmarks, of which several may start at the same moment on one machine."""

import random
import socket
from itertools import chain

FIRST, LAST = 12_000, 32_000
"""Below the ports that Linux gives to outgoing connections: any client may hold one of these at any moment."""
_reserved: list[socket.socket] = []
"""Kept until this process ends."""


def free_port(start: int | None = None) -> int:
    """A port on which nothing listens, reserved: `free_port` returns it to no other caller, of this process or another,
    until this process ends.

    The reservation is a name of an abstract Unix socket, which one socket of a network namespace can have. The search
    begins at `start`; None: anywhere between FIRST and LAST. Raises RuntimeError if no port is left.
    """
    first = random.SystemRandom().randrange(FIRST, LAST) if start is None else start
    for port in chain(range(first, LAST), range(FIRST, first)):
        reservation = socket.socket(socket.AF_UNIX)
        try:
            reservation.bind(f"\0headrace-benchmark-port-{port}")
            with socket.socket() as probe:
                probe.bind(("", port))
        except OSError:
            reservation.close()
            continue
        _reserved.append(reservation)
        return port
    raise RuntimeError(f"no port from {FIRST} to {LAST} is free")
