"""A cache of the groups that came in last: most are batched before they would have to be read back from the store.

Pure Python; used by `buffer/wire/handlers.py`. Forgetting a group costs one read and nothing else.
"""

from collections.abc import Collection

from buffer.ledger.types import SampleStats

Group = list[tuple[bytes, SampleStats]]
"""The packed samples of a group, in order, each with its figures."""


class GroupCache:
    """At most `max_bytes` of samples; the oldest groups make room."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes, self.bytes = max_bytes, 0
        self._groups: dict[int, Group] = {}

    def add(self, item: int, group: Group) -> None:
        """In place of an earlier group of the item."""
        self.forget(item)
        self._groups[item] = group
        self.bytes += _size(group)
        while self.bytes > self.max_bytes:
            self.forget(next(iter(self._groups)))

    def get(self, item: int) -> Group | None:
        """None if it is not cached."""
        return self._groups.get(item)

    def keep(self, items: Collection[int]) -> None:
        """Forget all others."""
        for item in [item for item in self._groups if item not in items]:
            self.forget(item)

    def forget(self, item: int) -> None:
        """An item that is not cached changes nothing."""
        self.bytes -= _size(self._groups.pop(item, []))


def _size(group: Group) -> int:
    return sum(len(data) for data, _ in group)
