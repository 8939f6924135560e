"""The problems of a run: the rows of its data file, unchanged. Read once at the start of `python -m buffer`.

Rows keep all their columns; the rollout servers interpret them (prompt, reward). Accepted are TinyZero
and verl rows, `{data_source, prompt, ability, reward_model: {ground_truth}, extra_info}`, and EasyR1 rows,
`{problem, answer}`.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from pathlib import Path
from typing import Any, overload

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from configs.load import ConfigError
from configs.schema import DataConfig

ACCEPTED = {"TinyZero/verl": ("prompt", "reward_model"), "EasyR1": ("problem", "answer")}
IMAGES = "images"


class ProblemsError(ConfigError):
    """The data file cannot be trained on; the text names key, file and remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__([reason])


class Problems(Sequence[dict[str, Any]]):
    """The rows, each converted when it is read, with Python's built-in types only, as MessagePack takes them.

    Example: `problems[0]` -> `{"problem": "1 + 1 = ?", "answer": "2"}`
    """

    def __init__(self, number: int, row: Callable[[int], dict[str, Any]], digest: str) -> None:
        self._number, self._row = number, row
        self.digest = digest
        """SHA-256 of the file."""

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


def load_problems(path: Path, data: DataConfig) -> Problems:
    """The rows of `path`, one of the files of `data`. Raises ProblemsError for a file that cannot be trained on."""
    key = next((name for name in ("train", "eval") if getattr(data, name) == path), "train")
    where = f"data.{key} {path}"
    readers = {".parquet": _parquet, ".jsonl": _jsonl}
    if path.suffix not in readers:
        raise ProblemsError(f"{where}: neither .parquet nor .jsonl; convert it, or name another file")
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        number, row = readers[path.suffix](path, where)
    except OSError as error:
        line = (error.strerror or str(error)).splitlines()[0]
        raise ProblemsError(f"{where}: {line}; name a file that can be read") from None
    if not number:
        raise ProblemsError(f"{where}: no rows; name a file with problems")
    return Problems(number, row, digest)


def _parquet(path: Path, where: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    try:
        table = pq.read_table(path)
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{where}: not a readable parquet file ({line}); write it again") from None
    needed = _required_columns(table.column_names, where)
    for name in needed:
        _require_filled(table.column(name), name, where)
    if needed == ACCEPTED["TinyZero/verl"]:
        kind = table.schema.field("reward_model").type
        if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
            raise ProblemsError(f"{where}: reward_model is {kind}, not a struct with ground_truth")
        _require_filled(
            pc.struct_field(table.column("reward_model"), "ground_truth"), "reward_model.ground_truth", where
        )
    if IMAGES in table.column_names:
        for number, images in enumerate(table.column(IMAGES).to_pylist()):
            _no_images(images, f"{where}: row {number}")
        table = table.drop_columns([IMAGES])
    return table.num_rows, lambda index: _plain(table.slice(index, 1).to_pylist()[0])


def _require_filled(column: pa.ChunkedArray, name: str, where: str) -> None:
    if column.null_count:
        first = pc.index(column.is_null(), True).as_py()
        raise ProblemsError(f"{where}: row {first}: {name} is empty; fill it, or leave the row out")


def _jsonl(path: Path, where: str) -> tuple[int, Callable[[int], dict[str, Any]]]:
    lines: list[bytes] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if line.strip():
            _check_line(line, f"{where}: line {number}")
            lines.append(line)

    def row(index: int) -> dict[str, Any]:
        return {name: _plain(value) for name, value in json.loads(lines[index]).items() if name != IMAGES}

    return len(lines), row


def _check_line(line: bytes, where: str) -> None:
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
    _no_images(row.get(IMAGES), where)


def _required_columns(names: Sequence[str], where: str) -> tuple[str, ...]:
    """The required columns, of the first accepted format that the file has."""
    for needed in ACCEPTED.values():
        if set(needed) <= set(names):
            return needed
    accepted = " or ".join(f"{', '.join(needed)} ({who})" for who, needed in ACCEPTED.items())
    raise ProblemsError(f"{where}: needs the columns {accepted}; it has {', '.join(names) or 'none'}")


def _no_images(images: Any, where: str) -> None:
    if images:
        raise ProblemsError(f"{where}: has images, which Headrace does not train on; leave such rows out")


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
