"""Chooses the row of each new item: an epoch is a shuffled pass over all rows, or over several sources by weight."""

import math
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Protocol

from buffer.ledger import schedule
from buffer.ledger.state import LedgerState

DRAWS_PER_STEP = schedule.STEP // 256
"""Draws for each step towards the next epoch's order, which is there long before it is needed."""


class Order(Protocol):
    """Draws rows as a function of what is committed: a restart draws the same rows."""

    def draw(self, state: LedgerState) -> int | None:
        """The row of item `state.next_item`; None: no row may be drawn any more."""

    def upcoming(self, state: LedgerState, number: int) -> Sequence[int]:
        """The next `number` rows, as far as they are known."""

    def skip(self, state: LedgerState) -> None:
        """Move `state.next_item` past rows that are left out."""

    @property
    def counters(self) -> Mapping[str, int]:
        """What the store keeps of the draws."""

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Continue with saved `counters`."""

    def counts(self, state: LedgerState) -> dict[str, int]:
        """Numbers of rows for people."""


class EpochOrder:
    """Item s is problem `s % problems` of epoch `s // problems`; rows that are left out have no items."""

    counters: Mapping[str, int] = MappingProxyType({})

    def __init__(
        self, problems: int, seed: int, shuffle: bool, epochs: int | None, shares: Sequence[tuple[int, float]]
    ) -> None:
        self._problems, self._seed, self._shuffle, self._shares = problems, seed, shuffle, shares
        self._epochs = math.inf if epochs is None else epochs
        self._epoch: tuple[int, Sequence[int]] = (-1, ())
        self._following: tuple[int, schedule.Drawing] | None = None

    def draw(self, state: LedgerState) -> int | None:
        self.skip(state)
        state.rows.moved.clear()
        epoch, place = divmod(state.next_item, self._problems)
        if epoch >= self._epochs:
            return None
        row = self.rows(epoch)[place]
        if self._following and place % DRAWS_PER_STEP == 0:
            self._following[1].step()
        return None if row in state.rows.left_out else row  # `skip` stays where all rows are left out

    def upcoming(self, state: LedgerState, number: int) -> Sequence[int]:
        epoch, place = divmod(state.next_item, self._problems)
        if epoch >= self._epochs:
            return ()
        rows, out = self.rows(epoch), state.rows.left_out
        if not out:
            return rows[place : place + number]
        return list(islice((rows[at] for at in range(place, self._problems) if rows[at] not in out), number))

    def skip(self, state: LedgerState) -> None:
        while state.rows.left_out and not state.rows.all_left_out:
            epoch, place = divmod(state.next_item, self._problems)
            if epoch >= self._epochs or self.rows(epoch)[place] not in state.rows.left_out:
                return
            state.next_item += 1

    def restore(self, scalars: Mapping[str, int]) -> None:
        """Does nothing: the order follows from the seed."""

    def counts(self, state: LedgerState) -> dict[str, int]:
        return {}

    def rows(self, epoch: int) -> Sequence[int]:
        if self._epoch[0] != epoch:
            begun = self._following and self._following[0] == epoch and self._following[1]
            self._epoch = epoch, (begun or self._drawing(epoch)).rows()
            self._following = None if epoch + 1 >= self._epochs else (epoch + 1, self._drawing(epoch + 1))
        return self._epoch[1]

    def _drawing(self, epoch: int) -> schedule.Drawing:
        drawn = (self._seed, epoch, self._shuffle)
        steps = schedule.mixing(self._shares, *drawn) if self._shares else schedule.ordering(self._problems, *drawn)
        return schedule.Drawing(steps)
