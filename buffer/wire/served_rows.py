"""The rows of the data set as they are dispatched and trained.

Rows of reasoning-gym have to be made first, and image files may be away for a while. Then requests wait, and the buffer
does not.
"""

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from buffer.data.image_rows import IMAGES, ImageUnavailable
from buffer.data.images import ImageError
from buffer.problems import READ_AHEAD, Problems
from buffer.wire.protocol import RowImages

log = logging.getLogger(__name__)
AWAY_S = 1.0
"""Pause before image files are read again."""
WARN_S = 10.0
Upcoming = Callable[[int], Sequence[int]]


class NothingMade:
    """Stands for `Problems` where the rows are there from the start."""

    num_made = 0


class ServedRows:
    """`problems` are the rows of the data set, by the number that the ledger calls `index`."""

    def __init__(self, problems: Sequence[Mapping[str, Any]]) -> None:
        self._rows, self._problems = problems, problems if isinstance(problems, Problems) else None
        self.away = ""
        self._away_until = self._warned_at = -math.inf
        self.returns = 0
        """How often files that were away could be tried again."""
        self.made = self._problems or NothingMade

    @property
    def why_away(self) -> str:
        return f"images cannot be read: {self.away}" if self.away else ""

    def expire(self, now: float) -> float | None:
        """Try image files again when it is time; returns when to call again."""
        if now < self._away_until:
            return self._away_until
        self.away = ""
        self.returns += 1
        return None

    def note_away(self, error: ImageUnavailable, now: float, pause: bool = True) -> None:
        """`pause`: no other file is read for AWAY_S."""
        if now >= self._warned_at + WARN_S:
            self._warned_at = now
            log.warning("images cannot be read now, and are tried again: %s", error)
        if pause:
            self.away, self._away_until = str(error), now + AWAY_S

    def room(self, upcoming: Upcoming, wanted: int) -> int:
        """The next rows are made meanwhile."""
        if not self._problems:
            return wanted
        self._problems.expect(lambda: upcoming(READ_AHEAD))
        ready = self._problems.num_ready(lambda: upcoming(wanted))
        return wanted if ready is None else min(wanted, ready)

    def has_next(self, upcoming: Upcoming) -> bool:
        """If the next row is not ready, no Ask gets a row."""
        return not self._problems or self._problems.num_ready(lambda: upcoming(1)) != 0

    def problem(self, row: int) -> dict[str, Any]:
        """Raises ImageError, or ImageUnavailable for an image that may come back."""
        problem = dict(self._rows[row])
        return problem | {IMAGES: list(problem[IMAGES])} if problem.get(IMAGES) else problem

    def images_of(self, row: int) -> Sequence[bytes]:
        """Does not make the row."""
        if self._problems:
            return (self._problems.images and self._problems.images.of(row)) or ()
        files: Sequence[bytes] = self._rows[row].get(IMAGES, ())
        return files

    def images_of_item(self, item: int, row: int) -> RowImages | None:
        """Raises ImageUnavailable, and ImageError for a file that is gone or has changed."""
        try:
            files = list(self.images_of(row))
        except ImageUnavailable:
            raise
        except ImageError as error:
            raise ImageError(f"item {item}, row {row}: {error}, and start the learner again") from None
        return RowImages(item=item, images=files) if files else None
