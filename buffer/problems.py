"""The problems of a run: the rows of its sources with all their columns."""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile
from math import ceil
from pathlib import Path
from typing import Any, overload

import pyarrow as pa

from buffer.data.columns import ProblemsError as ProblemsError  # whoever loads problems catches it
from buffer.data.image_rows import IMAGES, ImageRows, JoinedImages
from buffer.data.images import ImageError, ImageFormat, read_model_file
from buffer.data.parts import JoinedRows, SourcePart, digest_of, open_source
from configs.architecture import SEEING, reads_images, trains_text_alone
from configs.checks import existing
from configs.data.sources import Source, SourceError, parts_of, source_name
from configs.schema import MOST_MESSAGE_MIB, Config, DataConfig

LOOKED_AT = 1000
"""Rows, evenly spread, whose images' sizes are read."""
READ_AHEAD = 256
RECENT = 64
"""Rows kept as they were read: a row is served, and written to the store in the same turn."""


class Problems(Sequence[dict[str, Any]]):
    """Rows in types of MessagePack; their `images` are ImageFiles."""

    def __init__(
        self,
        number: int,
        row: Callable[[int], dict[str, Any]],
        digest: str,
        images: ImageRows | JoinedImages | None = None,
        shares: Sequence[tuple[int, float]] = (),
        made: JoinedRows | None = None,
        place: Callable[[int], str] = lambda row: f"row {row} of data.train",
        unread: str = "",
    ) -> None:
        self.place, self.unread = place, unread
        self._number, self._text, self.images = number, lru_cache(RECENT)(row), images
        self.digest = digest
        self.shares = shares
        """Rows and weight of each source."""
        self._made, self.num_made = made, 0

    def expect(self, rows: Callable[[], Iterable[int]]) -> None:
        if self._made:
            self._made.expect(rows())

    def num_ready(self, rows: Callable[[], Sequence[int]]) -> int | None:
        """Ready rows from the first one on; None: all, and those that follow."""
        if not self._made or not (asked := rows()):
            return None
        return sum(1 for _ in takewhile(self._made.is_ready, asked))

    def listen(self, on_made: Callable[[], object]) -> None:
        """`on_made` is called from a thread."""

        def count() -> None:
            self.num_made += 1
            on_made()

        for part in self._made.made if self._made else ():
            part.on_made = count

    def _row(self, index: int) -> dict[str, Any]:
        files = self.images and self.images.of(index)
        return self._text(index) | ({IMAGES: files} if files else {})

    def __len__(self) -> int:
        return self._number

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = range(self._number)
        for index in rows:
            if index % READ_AHEAD == 0:
                self.expect(lambda first=index: rows[first : first + 2 * READ_AHEAD])  # type: ignore[misc]
            yield self._row(index)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(self._number))]
        return self._row(range(self._number)[index])


def load_problems(
    source: Source,
    data: DataConfig,
    room: Path | None = None,
    key: str | None = None,
    truth: bool = True,
    index: Path | None = None,
) -> Problems:
    """Open the sources. Raises ProblemsError.

    `room`: folder for a copy of a parquet file's images. `truth`: rows must have a ground truth. `index`: folder for a
    faster next start.
    """
    key = key or next((f"data.{name}" for name, known in data.sources().items() if known == source), "data.train")
    try:
        sources = [(part.weight, open_source(part, data, key, truth, index)) for part in parts_of(source)]
    except SourceError as error:
        raise ProblemsError(f"{key} {source_name(source)}: {error}") from None
    parts = [part for _, found in sources for part in found]
    rows = JoinedRows(parts)
    shares = [(sum(part.rows.number for part in found), weight) for weight, found in sources if weight is not None]
    images, made = _images(rows, data, room), rows if rows.made else None
    given = images, shares, made, rows.name, _unread(rows, images)
    return Problems(rows.starts[-1], rows.row, digest_of(parts), *given)


def check_images(config: Config, problems: Problems, key: str = "train") -> ImageFormat | None:
    """None if no row has images. Raises ConfigError if they contradict the run file."""
    if config.rollout.task == "single_turn":  # other tasks may show what they find in a row
        _require_read(config, problems.unread)
    sizes = problems.images.num_bytes() if problems.images else []
    if not sizes:
        return None
    form = require_seeing(config, f"data.{key} {source_name(config.data.sources()[key])}", len(sizes))
    limit, rows = config.buffer.max_message_mib, ceil(config.batch.groups / config.learner.ranks)
    needed = ceil(sum(sizes[:rows]) / 2**20)
    if key == "train" and needed > limit:
        what = f"the images of {rows} rows, a rank's part of a batch"
        remedy = f"set it to {needed} or more"
        if needed > MOST_MESSAGE_MIB:
            remedy = "store smaller images, or add learner.ranks"
        raise ProblemsError(f"buffer.max_message_mib: {limit} is less than {what}, can take, {needed:,} MiB; {remedy}")
    return form


def require_seeing(config: Config, where: str, rows: int) -> ImageFormat:
    """How the model sees the images of so many rows. Raises ProblemsError if it is not trained with images."""
    if form := ImageFormat.of_run(config):
        return form
    kind, alone = read_model_file(config.model.path, "config.json") or {}, config.model.text_alone
    what = (
        f"({kind.get('model_type')}) is trained on text alone" if trains_text_alone(kind, alone) else "is a text model"
    )
    problem = f"{rows:,} rows have images, but model.path {config.model.path} {what}"
    seeing = f"name a model whose images are trained ({' or '.join(SEEING)})"
    remedy = "remove model.text_alone" if reads_images(kind) else seeing
    raise ProblemsError(f"{where}: {problem}; {remedy}, or leave these rows out")


def demonstrated_images(
    config: Config, where: str, rows: JoinedRows
) -> tuple[ImageRows | JoinedImages, ImageFormat] | None:
    """The images of demonstrations, and how the model sees them; None if no row has some. Raises ConfigError."""
    images = _images(rows, config.data, existing(config.run.path))
    _require_read(config, _unread(rows, images))
    number = len(images.num_bytes()) if images else 0
    return (images, require_seeing(config, where, number)) if images and number else None


def _unread(rows: JoinedRows, images: ImageRows | JoinedImages | None) -> str:
    """The first row with an image that would not be seen, or ""."""
    found = images.unread if images else None
    return f"{rows.place(found[0])}: the row has {found[1]}" if found else ""


def _require_read(config: Config, unread: str) -> None:
    """Raise ProblemsError for an image that a model which sees would not see."""
    if unread and ImageFormat.of_run(config):
        raise ProblemsError(unread)


def _images(rows: JoinedRows, data: DataConfig, room: Path | None) -> ImageRows | JoinedImages | None:
    every = max(1, rows.starts[-1] // LOOKED_AT)
    found = [
        (start, str(part.path), _images_of(part, data, every, room))
        for start, part in zip(rows.starts, rows.parts, strict=False)
        if part.rows.images is not None
    ]
    if len(rows.parts) == 1:
        return found[0][2] if found else None
    return JoinedImages(found) if found else None


def _images_of(part: SourcePart, data: DataConfig, every: int, room: Path | None) -> ImageRows:
    assert part.rows.images is not None
    try:
        folder = data.image_dir or part.path.parent
        return ImageRows(part.rows.images, part.rows.place, folder, data.max_images, every, room)
    except ImageError as error:
        raise ProblemsError(f"{part.where}: {error}") from None
    except (pa.ArrowException, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{part.where}: its images cannot be read ({line}); write it again") from None
    except OSError as error:
        problem = f"no copy of its images in {room or tempfile.gettempdir()}: {error.strerror}; make room there"
        raise ProblemsError(f"{part.where}: {problem}") from None
