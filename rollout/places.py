"""Places for groups in flight on one server. `roll` waits here; a finished group gives its place back."""

import asyncio
from typing import Any


class Places:
    """`number` places, `open` of them free."""

    def __init__(self, number: int) -> None:
        self.number = self.open = number
        self._given = asyncio.Event()

    async def free(self) -> int:
        """How many places are free, once at least one is."""
        while not self.open:
            self._given.clear()
            await self._given.wait()
        return self.open

    def take(self) -> None:
        """Occupy a place."""
        self.open -= 1

    def give(self, _: Any = None) -> None:
        """Free a place; a task's done callback."""
        self.open += 1
        self._given.set()
