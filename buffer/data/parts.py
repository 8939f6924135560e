"""Opens a source: its files, or its set of reasoning-gym, one `SourcePart` each."""

import hashlib
import importlib.util
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, NamedTuple

from buffer.data.columns import ColumnRules, ProblemsError
from buffer.data.entry_maker import EntryError, GeneratedRows
from buffer.data.formats import FileRows, read
from configs.data.sources import INSTALL, GeneratedSet, files_of, generated
from configs.schema import DataConfig, MixedSource


class SourcePart(NamedTuple):
    """One file, or one generated set."""

    path: Path
    where: str
    """Introduces errors. Example: `data.train a.parquet`"""
    rows: FileRows
    digest: str
    made: GeneratedRows | None = None


def open_source(
    source: MixedSource,
    data: DataConfig,
    key: str,
    truth: bool,
    index: Path | None = None,
    demonstrations: bool = False,
) -> list[SourcePart]:
    """Raises ProblemsError, and SourceError for a path of nothing."""
    found = generated(source.path)
    if found:
        return [_generated(source, found, f"{key} {source.path}")]
    rules = ColumnRules(data.columns if source.columns is None else source.columns, truth, demonstrations)
    parts = [_file(path, rules, f"{key} {path}", index) for path in files_of(source.path)]
    for part in parts[1:]:
        _require_alike(parts[0], part)
    if not any(part.rows.number for part in parts):
        raise ProblemsError(f"{key} {source.path}: no rows; name a file with problems")
    return parts


def _file(path: Path, rules: ColumnRules, where: str, index: Path | None) -> SourcePart:
    try:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        return SourcePart(path, where, read(path, rules, where, index), digest)
    except OSError as error:
        line = (error.strerror or str(error)).splitlines()[0]
        raise ProblemsError(f"{where}: {line}; name a file that can be read") from None


def _generated(source: MixedSource, found: GeneratedSet, where: str) -> SourcePart:
    if importlib.util.find_spec("reasoning_gym") is None:
        raise ProblemsError(f"{where}: reasoning-gym is not installed here; {INSTALL}")
    try:
        rows = GeneratedRows(found)
    except EntryError as error:
        raise ProblemsError(f"{where}: {error}; correct it") from None
    text = json.dumps([found.name, found.config, rows.version], sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return SourcePart(source.path, where, FileRows(found.size, rows, None), digest, rows)


def _require_alike(first: SourcePart, part: SourcePart) -> None:
    """A column without values fits all types."""
    ours, theirs = first.rows.types, part.rows.types
    if ours is None or theirs is None:
        return
    for name in sorted({*ours, *theirs}):
        here, there = theirs.get(name, "absent"), ours.get(name, "absent")
        if here != there and "null" not in (here, there):
            remedy = "write the files alike, or list them in data.train as {path}"
            raise ProblemsError(f"{part.where}: column {name} is {here}, in {first.path.name} it is {there}; {remedy}")


def digest_of(parts: Sequence[SourcePart]) -> str:
    """The digest of a single part, or the SHA-256 of the digests of all parts in order."""
    digests = [part.digest for part in parts]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


class JoinedRows:
    """The rows of several parts, numbered on."""

    def __init__(self, parts: Sequence[SourcePart]) -> None:
        self.parts = parts
        self.starts = list(accumulate((part.rows.number for part in parts), initial=0))
        """The last is the number of rows."""

    def _place(self, index: int) -> tuple[int, int]:
        part = bisect_right(self.starts, index) - 1
        return part, index - self.starts[part]

    def place(self, index: int) -> str:
        """Example: `data.train a.jsonl: line 7`"""
        part, row = self._place(index)
        return f"{self.parts[part].where}: {self.parts[part].rows.place(row)}"

    def row(self, index: int) -> dict[str, Any]:
        part, row = self._place(index)
        return self.parts[part].rows.row(row)

    def name(self, index: int) -> str:
        """As `data/train.jsonl line 14`; rows are counted from 0."""
        part, row = self._place(index)
        line = self.parts[part].rows.line
        return f"{self.parts[part].path} row {row}" if line is None else f"{self.parts[part].path} line {line(row)}"

    def expect(self, rows: Iterable[int]) -> None:
        for part, found in groupby(map(self._place, rows), lambda place: place[0]):
            if made := self.parts[part].made:
                made.expect(row for _, row in found)

    def is_ready(self, index: int) -> bool:
        part, row = self._place(index)
        made = self.parts[part].made
        return made is None or made.is_made(row)

    @property
    def made(self) -> list[GeneratedRows]:
        return [part.made for part in self.parts if part.made]
