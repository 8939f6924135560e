"""Ports for the servers of tests, some of which are started long after their port was picked."""

import itertools
import os
import socket
from collections.abc import Iterator

FIRST, LAST = 12_000, 32_000
"""Below the ports that Linux gives to outgoing connections: one of those may be taken by any client at any moment."""


def in_turn(ports: range, process: int) -> Iterator[int]:
    """All of `ports` again and again. Processes that were started at the same time begin far apart, also those of two
    checkouts that are tested on one machine."""
    first = process * (round(0.618 * len(ports)) | 1) % len(ports)  # the golden ratio keeps multiples apart
    return itertools.cycle([*ports[first:], *ports[:first]])


_candidates = in_turn(range(FIRST, LAST), os.getpid())


def keep_to_share(number: int, of: int) -> None:
    """Pick ports of the given share from now on: processes with different shares never pick the same port, not even
    while the server of one is starting again."""
    global _candidates
    size = (LAST - FIRST) // of
    _candidates = in_turn(range(FIRST + number * size, FIRST + (number + 1) * size), os.getpid())


def free_port() -> int:
    """A port of this machine that nobody listens on, and that this process was not given before."""
    for port in _candidates:
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AssertionError("the candidates never end")
