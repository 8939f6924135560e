"""How much one process may ask of the buffer. Honest clients stay far below."""

from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

from buffer.wire.message import MOST_NAMED, MOST_RANKS

MOST_OBSERVERS = 256
"""The one silent for longest makes room, and says Hello again if it lives."""
MOST_PEERS = {"rollout": MOST_NAMED, "learner": MOST_RANKS, "launcher": MOST_OBSERVERS, "observer": MOST_OBSERVERS}
MOST_HELLOS = 16
MOST_PUTS = 4096
MOST_PENDING = {"Take": 8, "Results": 4, "Where": 64, "Put": MOST_PUTS}
"""Requests of one process. The oldest makes room: its client may have given it up."""
K = TypeVar("K", bound=Hashable)


class Remembered(Generic[K]):
    def __init__(self, most: int) -> None:
        self._most = most
        self._keys: dict[K, None] = {}

    def add(self, key: K) -> None:
        self._keys[key] = None
        if len(self._keys) > self._most:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __len__(self) -> int:
        return len(self._keys)


def crowded(role: str, number: int) -> str:
    """Why a further process is refused, or ""."""
    most = MOST_PEERS[role]
    if role == "observer" or number < most:
        return ""
    return f"{number:,} {role} processes have said Hello, and {most:,} may: give each process one name, and keep it"


def renamed(name: str, hellos: int) -> str:
    if hellos < MOST_HELLOS:
        return ""
    return (
        f"{name}: its connection has said Hello under {hellos} other names: give each process a connection of its own"
    )


def longest_silent(heard: Iterable[tuple[float, bytes]], number: int) -> list[bytes]:
    return [identity for _, identity in sorted(heard)[:number]]
