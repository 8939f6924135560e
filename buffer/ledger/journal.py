"""What changed in the ledger since it was last drained, for the store to write. Part of the ledger's state."""

from collections.abc import Mapping

from buffer.ledger.types import CLOSED, Changes, ItemState


class Journal:
    """`changes` are filled in by whoever makes them; items are noted by number, and read when they are drained."""

    def __init__(self) -> None:
        self.changes = Changes()
        self._touched = set[int]()
        self._counters: dict[str, int] = {}
        """As they were written last."""

    def touch(self, item: ItemState) -> None:
        """The item changed."""
        self._touched.add(item.number)

    def close(self, item: ItemState) -> None:
        """The item leaves memory: its last change is kept."""
        if item.number in self._touched:
            self._touched.remove(item.number)
            self.changes.items[item.number] = item.row_values()

    def closed(self, number: int) -> ItemState | None:
        """An item that was dropped or put into quarantine and is not in the store yet."""
        row = self.changes.items.get(number)
        item = ItemState(*row) if row else None  # type: ignore[arg-type]
        return item if item and item.state in CLOSED else None

    def drain(self, items: Mapping[int, ItemState], counters: Mapping[str, int]) -> Changes:
        """All changes since the last call."""
        for number in self._touched:
            self.changes.items[number] = items[number].row_values()
        changes, self.changes, self._touched = self.changes, Changes(), set()
        changes.scalars = {name: value for name, value in counters.items() if self._counters.get(name) != value}
        self._counters = dict(counters)
        return changes

    def restore(self, counters: Mapping[str, int]) -> None:
        """These counters are written down already."""
        self._counters = dict(counters)
