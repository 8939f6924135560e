"""The problems of a run: the rows of its data file, unchanged. Read once at the start of `python -m buffer`.

Rows keep all their columns; the rollout servers interpret them (prompt, reward). Accepted are TinyZero
and verl rows, `{data_source, prompt, ability, reward_model: {ground_truth}, extra_info}`, and EasyR1 rows,
`{problem, answer}`. Rows of either kind may have `images`, which are not held in memory (`image_rows.py`).
"""

import hashlib
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from math import ceil
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from buffer.image_rows import IMAGES, ImageRows
from buffer.images import ImageError, ImageFormat
from configs.load import ConfigError
from configs.schema import MOST_MESSAGE_MIB, Config, DataConfig

ACCEPTED = {"TinyZero/verl": ("prompt", "reward_model"), "EasyR1": ("problem", "answer")}
ROWS_AT_ONCE = 16
"""Rows whose images are in memory at a time while a parquet file is read."""
LOOKED_AT = 1000
"""Rows, evenly spread, whose images' sizes are read."""


class ProblemsError(ConfigError):
    """The data file cannot be trained on; the text names key, file and remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__([reason])


class Problems(Sequence[dict[str, Any]]):
    """The rows, each converted when it is read, with Python's built-in types only, as MessagePack takes them; but the
    `images` of a row that has some are ImageFiles.

    Example: `problems[0]` -> `{"problem": "1 + 1 = ?", "answer": "2"}`
    """

    def __init__(
        self, number: int, row: Callable[[int], dict[str, Any]], digest: str, images: ImageRows | None = None
    ) -> None:
        self._number, self._text, self.images = number, row, images
        self.digest = digest
        """SHA-256 of the file."""

    def _row(self, index: int) -> dict[str, Any]:
        files = self.images and self.images.of(index)
        return self._text(index) | ({IMAGES: files} if files else {})

    def __len__(self) -> int:
        return self._number

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...
    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        if isinstance(index, slice):
            return [self._row(i) for i in range(*index.indices(self._number))]
        return self._row(range(self._number)[index])


def load_problems(path: Path, data: DataConfig, room: Path | None = None) -> Problems:
    """The rows of `path`, one of the files of `data`. Raises ProblemsError for a file that cannot be trained on.

    `room`: an existing folder on the disk that has room for a copy of the images in a parquet file.
    """
    key = next((key for key, source in data.sources().items() if source == str(path)), "train")
    where = f"data.{key} {path}"
    readers = {".parquet": _parquet, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise ProblemsError(f"{where}: neither .parquet nor .jsonl; convert it, or name another file")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        number, row, found = readers[path.suffix](path, where)
    except OSError as error:
        line = (error.strerror or str(error)).splitlines()[0]
        raise ProblemsError(f"{where}: {line}; name a file that can be read") from None
    if not number:
        raise ProblemsError(f"{where}: no rows; name a file with problems")
    images = _images(found, path, data, number, room, where) if found is not None else None
    return Problems(number, row, digest, images)


def check_images(config: Config, problems: Problems, key: str = "train") -> ImageFormat | None:
    """How the model sees the images of the file at `data.KEY`; None if no row has any. Raises ConfigError if they
    contradict the run file."""
    sizes = problems.images.num_bytes() if problems.images else []
    if not sizes:
        return None
    form = ImageFormat.of(config.model.path, config.data)
    if form is None:
        problem = f"{len(sizes):,} rows have images, but model.path {config.model.path} is a text model"
        remedy = "name a vision-language model, or leave these rows out"
        raise ProblemsError(f"data.{key} {config.data.sources()[key]}: {problem}; {remedy}")
    limit, rows = config.buffer.max_message_mib, ceil(config.batch.groups / config.learner.ranks)
    needed = ceil(sum(sizes[:rows]) / 2**20)
    if key == "train" and needed > limit:
        what = f"the images of {rows} rows, a rank's part of a batch"
        remedy = f"set it to {needed} or more"
        if needed > MOST_MESSAGE_MIB:
            remedy = "store smaller images, or add learner.ranks"
        raise ProblemsError(f"buffer.max_message_mib: {limit} is less than {what}, can take, {needed:,} MiB; {remedy}")
    return form


Found = Iterable[tuple[Any, Any]]
"""Images and text of each row."""
Rows = tuple[int, Callable[[int], dict[str, Any]], Found | None]
"""How many; each by its index, without images; and their images, None for a file that has none."""


def _images(found: Found, path: Path, data: DataConfig, number: int, room: Path | None, where: str) -> ImageRows:
    every = max(1, number // LOOKED_AT)
    try:
        return ImageRows(found, data.image_dir or path.parent, data.max_images, every, room)
    except ImageError as error:
        raise ProblemsError(f"{where}: {error}") from None
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{where}: its images cannot be read ({line}); write it again") from None
    except OSError as error:
        place = room or tempfile.gettempdir()
        raise ProblemsError(f"{where}: no copy of its images in {place}: {error.strerror}; make room there") from None


def _parquet(path: Path, where: str) -> Rows:
    try:
        file = pq.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
        table = pq.read_table(path, columns=[name for name in names if name != IMAGES])
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{where}: not a readable parquet file ({line}); write it again") from None
    needed = _required_columns(names, where)
    for name in needed:
        _require_filled(table.column(name), name, where)
    if needed == ACCEPTED["TinyZero/verl"]:
        kind = table.schema.field("reward_model").type
        if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
            raise ProblemsError(f"{where}: reward_model is {kind}, not a struct with ground_truth")
        _require_filled(
            pc.struct_field(table.column("reward_model"), "ground_truth"), "reward_model.ground_truth", where
        )
    found = _images_in(file, table.select([needed[0]])) if IMAGES in names else None
    return table.num_rows, lambda index: _plain(table.slice(index, 1).to_pylist()[0]), found


def _images_in(file: pq.ParquetFile, texts: pa.Table) -> Iterator[tuple[Any, Any]]:
    """The images and the text of each row, few rows in memory at a time."""
    row = 0
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=[IMAGES]):
        images = batch.column(0).to_pylist()
        yield from zip(images, texts.slice(row, len(images)).column(0).to_pylist(), strict=True)
        row += len(images)
    pa.default_memory_pool().release_unused()  # a page of a column may hold a thousand images


def _require_filled(column: pa.ChunkedArray, name: str, where: str) -> None:
    if column.null_count:
        first = pc.index(column.is_null(), True).as_py()
        raise ProblemsError(f"{where}: row {first}: {name} is empty; fill it, or leave the row out")


def _jsonl(path: Path, where: str) -> Rows:
    lines: list[bytes] = []
    with_images = False
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            with_images |= IMAGES in _checked(line, f"{where}: line {number}")
            lines.append(line)

    def row(index: int) -> dict[str, Any]:
        return {name: _plain(value) for name, value in json.loads(lines[index]).items() if name != IMAGES}

    def found() -> Iterator[tuple[Any, Any]]:
        for row in map(json.loads, lines):
            yield row.get(IMAGES), row[_required_columns(list(row), where)[0]]

    return len(lines), row, found() if with_images else None


def _checked(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ProblemsError(f"{where}: not JSON ({error}); write one object per line") from None
    if not isinstance(row, dict):
        raise ProblemsError(f"{where}: not an object of columns; write one object per line")
    needed = _required_columns(list(row), where)
    for name in needed:
        if row[name] is None:
            raise ProblemsError(f"{where}: {name} is empty; fill it, or leave the line out")
    model = row.get("reward_model")
    if "reward_model" in needed and not (isinstance(model, dict) and model.get("ground_truth") is not None):
        raise ProblemsError(f"{where}: reward_model has no ground_truth")
    return row


def _required_columns(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The required columns, of the first accepted format that the file has."""
    for needed in ACCEPTED.values():
        if set(needed) <= set(names):
            return needed
    accepted = " or ".join(f"{', '.join(needed)} ({who})" for who, needed in ACCEPTED.items())
    raise ProblemsError(f"{where}: needs the columns {accepted}; it has {', '.join(names) or 'none'}")


def _plain(value: Any) -> Any:
    """The value in types that MessagePack has."""
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return str(value) if large or isinstance(value, Decimal) else value
