"""Reads one data file: parquet, JSON lines, JSON, CSV; text also with gzip.

Images are apart from the rows, so that none stays in memory. Raises ProblemsError, in one line; OSError for a file that
cannot be read.
"""

import csv
import gzip
import io
import json
import re
import sys
import zlib
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from itertools import repeat
from math import isinf
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq

from buffer.data.columns import ColumnRules, ProblemsError, plain, require_servable
from buffer.data.image_columns import (
    APART,
    AS_LINE,
    AS_TEXT,
    BRIGHTEST,
    CHANNELS,
    IMAGE_STRUCT,
    LEAST_BRIGHT,
    LEAST_SIDE,
    SEPARATE,
    declared_as,
    may_hide,
    may_hold,
    unread,
)
from buffer.data.image_rows import IMAGES
from buffer.data.line_index import LineIndex, bounds_of
from buffer.data.servable import MOST_BYTES, MOST_ENTRIES, MOST_NESTED, is_deep
from configs.data.sources import GZIPPED, kind_of, the_list
from configs.model_folder import POINTER

ROWS_AT_ONCE = 16
MEND = "correct it, or leave the row out"
TOO_DEEP = f"it is nested more than {MOST_NESTED} levels deep"
TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[][{},]')
"""JSON strings, brackets and commas."""
CHATS = ("prompt", "messages")
TEXTS = ("prompt", "problem", "answer", "data_source")
"""These columns are text: `007` stays `007`."""
EXACT = 2.0**53
"""From here on a float may be another number than the digits that were written."""
MOST_BLOCK = 2**30

Found = Iterable[tuple[Any, Any, str]]
"""Images and text of each row, and why an image in another column would not be seen, or ""."""


class FileRows(NamedTuple):
    number: int
    row: Callable[[int], dict[str, Any]]
    """By index, without images."""
    images: Found | None
    types: dict[str, str] | None = None
    """Example: `{"problem": "string"}`"""
    line: Callable[[int], int] | None = None
    """Counted from 1; None for files without lines."""

    def place(self, index: int) -> str:
        return f"line {self.line(index)}" if self.line else f"row {index}"


def read(path: Path, rules: ColumnRules, where: str, index: Path | None = None) -> FileRows:
    """`where` introduces errors. `index`: folder for the places of JSON lines."""
    kind = kind_of(path)
    with path.open("rb") as opened:
        if opened.read(len(POINTER)) == POINTER:
            raise ProblemsError(f"{where}: a pointer of Git LFS, not the file itself; run `git lfs pull` there")
    if kind == ".parquet":
        return _parquet(path, rules, where)
    data = _unpacked(path, where)
    if kind in (".jsonl", ".ndjson"):
        return _json_lines(data, rules, where, index)
    if kind == ".json":
        return _json(data, rules, where)
    return _table(_csv(data, "\t" if kind == ".tsv" else ",", rules, where), rules, where, None)


def _unpacked(path: Path, where: str) -> bytes:
    if path.suffix != GZIPPED:
        return path.read_bytes()
    try:
        with gzip.open(path, "rb") as file:
            return file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ProblemsError(f"{where}: gzip cannot unpack it ({error}); write it again") from None


def _parquet(path: Path, rules: ColumnRules, where: str) -> FileRows:
    try:
        file = pq.ParquetFile(path, memory_map=True)
        names = file.schema_arrow.names
        rules.names(names, where)
        held = next((name for name in names if rules.ours(name) == IMAGES), None)
        table = pq.ParquetFile(path).read(columns=[name for name in names if name != held])
    except pa.ArrowException as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{where}: not a readable parquet file ({line}); write it again") from None
    return _table(table, rules, where, _images_in(file, held) if held else None)


def _table(table: pa.Table, rules: ColumnRules, where: str, images: Iterator[Any] | None) -> FileRows:
    kept = {name: ours for name in table.column_names if (ours := rules.ours(name)) is not None}
    declared = {kept[name] for name in declared_as(table.schema.metadata, "Image", "Video") if name in kept}
    arrays = {kept[name] for name in declared_as(table.schema.metadata, "Array3D") if name in kept}
    table = table.select(list(kept)).rename_columns(list(kept.values()))
    needed = rules.required(table.column_names, where)
    for name in needed:
        _require_filled(table.column(name), name, where)
    if "reward_model" in needed:
        kind = table.schema.field("reward_model").type
        if not pa.types.is_struct(kind) or kind.get_field_index("ground_truth") < 0:
            remedy = "write one, or name the column of the truth in data.columns as answer"
            raise ProblemsError(f"{where}: reward_model is {kind}, not a struct with ground_truth; {remedy}")
        truth = pc.struct_field(table.column("reward_model"), "ground_truth")
        _require_filled(truth, "reward_model.ground_truth", where)
    _require_servable(table, where)
    pictured, pixels = _without_pixels(table, arrays)
    found = _found(pictured, needed[0], images, declared.union(pixels).difference(SEPARATE))
    types = {field.name: str(field.type).removeprefix("large_") for field in table.schema}
    return FileRows(table.num_rows, lambda index: _own_keys(plain(table.slice(index, 1).to_pylist()[0])), found, types)


def _own_keys(row: dict[str, Any]) -> dict[str, Any]:
    """Drop null keys of calls, whose arguments have the keys of all calls of the file."""
    chats = {name: row[name] for name in CHATS if isinstance(row.get(name), list)}
    return row | {name: [_with_calls(message) for message in chat] for name, chat in chats.items()}


def _with_calls(message: Any) -> Any:
    calls = message.get("tool_calls") if isinstance(message, dict) else None
    return message | {"tool_calls": _filled(calls)} if calls else message


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _filled(part) for name, part in value.items() if part is not None}
    return [_filled(part) for part in value] if isinstance(value, list) else value


def _require_servable(table: pa.Table, where: str) -> None:
    """Looks at columns of rare types, unless a text is not UTF-8 or a value is very long."""
    doubtful = [field.name for field in table.schema if not _is_plain(field.type)]
    try:
        table.validate(full=True)
        wrong = any(_longest(column) > 1 for column in table.columns)
    except pa.ArrowException:
        wrong = True
    looked_at = table if wrong else table.select(doubtful)
    for row in range(table.num_rows if looked_at.num_columns else 0):
        try:
            values = plain(looked_at.slice(row, 1).to_pylist()[0])
        except (LookupError, OSError) as error:  # as the library of time zones raises them
            remedy = "cast the column that has it, or leave that out"
            raise ProblemsError(f"{where}: row {row}: no such time zone: {error}; {remedy}") from None
        except (ValueError, OverflowError, NotImplementedError) as error:
            raise ProblemsError(f"{where}: row {row}: {' '.join(str(error).split())}; {MEND}") from None
        require_servable(values, f"{where}: row {row}")


def _is_plain(kind: pa.DataType) -> bool:
    """Every valid value can be served, unless it is too long."""
    types = pa.types
    if types.is_struct(kind):
        names = [field.name for field in kind]
        return len(set(names)) == len(names) and all(_is_plain(field.type) for field in kind)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_dictionary(kind):
        return _is_plain(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind)
    return _is_number(kind) or text


def _is_number(kind: pa.DataType) -> bool:
    """Whether values are numbers or booleans. True for a column of nulls, too."""
    types = pa.types
    number = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    return bool(number or types.is_boolean(kind) or types.is_decimal(kind) or types.is_null(kind))


def _longest(column: pa.ChunkedArray) -> float:
    """The longest value, as a share of the limit."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        return max((_longest(pc.struct_field(column, [at])) for at in range(kind.num_fields)), default=0)
    if types.is_list(kind) or types.is_large_list(kind):
        entries = pc.max(pc.list_value_length(column)).as_py() or 0
        return max(entries / MOST_ENTRIES, _longest(pc.list_flatten(column)))
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        return (pc.max(pc.binary_length(column)).as_py() or 0) / MOST_BYTES
    return 0


def _found(table: pa.Table, text: str, images: Iterator[Any] | None, declared: Collection[str]) -> Found | None:
    """`text`: the column of prompts. `declared`: columns that are images in Hugging Face's words. None if no column may
    hold an image."""
    named = {*may_hold(tuple(table.column_names)), *declared}
    others = [
        name
        for name, column in zip(table.column_names, table.columns, strict=True)
        if name in named or (name not in SEPARATE and _may_show(column))
    ]
    if images is None and not others and not _may_show(table.column(text), AS_LINE):
        return None
    slices = (table.slice(row, ROWS_AT_ONCE) for row in range(0, table.num_rows, ROWS_AT_ONCE))
    rows = (row for some in slices for row in some.select([text, *others]).to_pylist())
    both = zip(rows, images or repeat(None, table.num_rows), strict=True)
    return ((image, row[text], unread(row | {IMAGES: image}, declared)) for row, image in both)


def _may_show(column: pa.ChunkedArray, text: str = AS_TEXT) -> bool:
    """Whether some value may be an image or have one in it. `text`: the pattern of a text that has one."""
    kind, types = column.type, pa.types
    if types.is_struct(kind):
        parts, names = [pc.struct_field(column, [at]) for at in range(kind.num_fields)], {field.name for field in kind}
        return IMAGE_STRUCT.issuperset(names) or may_hide(names) or any(_may_show(part, text) for part in parts)
    if _is_list(kind):
        return _has_pixels(column) or _may_show(pc.list_flatten(column), text)
    if types.is_dictionary(kind):
        return any(_may_show(pa.chunked_array([chunk.dictionary]), text) for chunk in column.chunks)
    if types.is_string(kind) or types.is_large_string(kind):
        return bool(pc.any(pc.match_substring_regex(column, text)).as_py())
    return not (_is_number(kind) or types.is_temporal(kind))


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind))


def _without_pixels(table: pa.Table, declared: Collection[str]) -> tuple[pa.Table, set[str]]:
    """Replace columns of pixels by whether a row has some: as Python's numbers they would take minutes. Return also
    their names. `declared`: columns of arrays by the file's own account."""
    found = set[str]()
    for at, (name, column) in enumerate(zip(table.column_names, table.columns, strict=True)):
        inner = column
        while _is_list(inner.type) and not _has_pixels(inner, name in declared):
            inner = pc.list_flatten(inner)
        if _is_list(inner.type) and name not in APART:
            found.add(name)
            table = table.set_column(at, name, pc.greater(pc.coalesce(pc.list_value_length(column), 0), 0))
    return table, found


def _has_pixels(column: pa.ChunkedArray, declared: bool = False) -> bool:
    """Whether the values are [height, width, channels] whole numbers of pixels; if `declared`, in any order."""
    if not (_is_list(kind := column.type) and _is_list(kind := kind.value_type) and _is_list(kind := kind.value_type)):
        return False
    if not pa.types.is_integer(kind.value_type):
        return False
    lengths = []
    for _ in range(3):
        found = pc.list_value_length(column)
        lengths.append(pc.min_max(found.filter(pc.greater(found, 0))).as_py())
        column = pc.list_flatten(column)
    values = pc.min_max(column).as_py()
    if values["min"] is None or values["min"] < 0 or not LEAST_BRIGHT <= values["max"] <= BRIGHTEST:
        return False
    height, width, channels = lengths
    is_high = height["min"] >= LEAST_SIDE and width["min"] >= LEAST_SIDE
    return declared or (is_high and channels["min"] == channels["max"] in CHANNELS)


def _images_in(file: pq.ParquetFile, column: str) -> Iterator[Any]:
    for batch in file.iter_batches(ROWS_AT_ONCE, columns=[column]):
        yield from batch.column(0).to_pylist()
    pa.default_memory_pool().release_unused()  # a page of a column may hold a thousand images


def _require_filled(column: pa.ChunkedArray, name: str, where: str) -> None:
    if pc.any(empty := column.is_null(nan_is_null=True)).as_py():
        first = pc.index(empty, True).as_py()
        raise ProblemsError(f"{where}: row {first}: {name} is empty; fill it, or leave the row out")


def _json_lines(data: bytes, rules: ColumnRules, where: str, folder: Path | None) -> FileRows:
    """Lines with an index were checked when it was written; rows with images have none."""
    index = LineIndex(folder, data, [rules.renamed, rules.truth]) if folder else None
    line_of = _line_numbers(data)
    if index and (bounds := index.read()) is not None:
        return _rows_of(_Lines(data, bounds), rules, where, False)._replace(line=line_of)
    lines = data.splitlines(keepends=True)
    numbered = ((f"line {n}", line.rstrip(b"\r\n")) for n, line in enumerate(lines, 1) if line.strip())
    with_images = _checked(numbered, rules, where, "one object per line")
    bounds = bounds_of(lines)
    if index and not with_images:
        with suppress(OSError):  # only the next start is slower; opening the ledger reports a full disk
            index.write(bounds)
    return _rows_of(_Lines(data, bounds), rules, where, with_images)._replace(line=line_of)


def _line_numbers(data: bytes) -> Callable[[int], int]:
    """Blank lines are no rows."""

    @cache
    def numbers() -> "array[int]":
        return array("q", (number for number, line in enumerate(data.splitlines(), 1) if line.strip()))

    return lambda row: numbers()[row]


class _Lines(Sequence[bytes]):
    """A million `bytes` objects would take half as much memory again."""

    def __init__(self, data: bytes, bounds: Sequence[int]) -> None:
        self._data, self._bounds = data, bounds

    def __len__(self) -> int:
        return len(self._bounds) // 2

    def __getitem__(self, index: Any) -> Any:
        return self._data[self._bounds[2 * index] : self._bounds[2 * index + 1]]


def _checked(lines: Iterable[tuple[str, bytes]], rules: ColumnRules, where: str, form: str) -> bool:
    with_images = False
    for place, line in lines:
        values = _object(line, rules, f"{where}: {place}", form)
        rules.checked(values, f"{where}: {place}")
        with_images |= IMAGES in values or bool(unread(values))
    return with_images


def _rows_of(kept: Sequence[bytes], rules: ColumnRules, where: str, with_images: bool) -> FileRows:
    def row(index: int) -> dict[str, Any]:
        values = rules.row(json.loads(kept[index]), where)
        return {name: plain(value) for name, value in values.items() if name != IMAGES}

    def found() -> Iterator[tuple[Any, Any, str]]:
        for values in (rules.row(json.loads(kept[at]), where) for at in range(len(kept))):
            yield values.get(IMAGES), values[rules.required(list(values), where)[0]], unread(values)

    return FileRows(len(kept), row, found() if with_images else None)


class RefusedValue(ValueError):
    """JSON that Python would read otherwise than it was meant."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise RefusedValue(f"the key {twice!a} appears twice in an object; leave one out")
    return found


def _whole(digits: str) -> int:
    most = sys.get_int_max_str_digits()
    if most and len(digits.lstrip("-")) > most:
        raise RefusedValue(f"a number of {len(digits):,} digits, and Python reads {most:,}; write it as a text")
    return int(digits)


def _finite(digits: str) -> float:
    if isinf(number := float(digits)):
        raise RefusedValue(f"the number {digits[:20]}, and the largest is 1.8e308; write it as a text")
    return number


DECODER = json.JSONDecoder(object_pairs_hook=_once, parse_int=_whole, parse_float=_finite)


def _decoded(data: bytes) -> Any:
    """Refuses repeated keys by name. Raises ValueError, RecursionError."""
    return DECODER.decode(data.decode(json.detect_encoding(data), "surrogatepass"))


def _object(line: bytes, rules: ColumnRules, where: str, form: str) -> dict[str, Any]:
    try:
        row = _decoded(line)
    except RefusedValue as error:
        raise ProblemsError(f"{where}: {error}") from None
    except ValueError as error:
        remedy = "write the file as UTF-8" if isinstance(error, UnicodeDecodeError) else f"write {form}"
        raise ProblemsError(f"{where}: not JSON ({error}); {remedy}") from None
    except RecursionError:
        raise ProblemsError(f"{where}: {TOO_DEEP}; {MEND}") from None
    if not isinstance(row, dict):
        raise ProblemsError(f"{where}: not an object of columns; write {form}")
    return rules.row(row, where)


def _json(data: bytes, rules: ColumnRules, where: str) -> FileRows:
    form = "a list of objects"
    try:
        rows = the_list(_decoded(data))
    except (RefusedValue, RecursionError) as error:
        for number, text in enumerate(_elements(data.decode(json.detect_encoding(data), "surrogatepass"))):
            _object(text.encode(errors="surrogatepass"), rules, f"{where}: row {number}", form)  # finds the row
        raise ProblemsError(f"{where}: not JSON with rows: {error}") from None
    except ValueError as error:
        remedy = "" if "; write" in str(error) else f"; write {form}"
        raise ProblemsError(f"{where}: not JSON with rows: {error}{remedy}") from None
    for number, row in enumerate(rows):
        if is_deep(row):
            raise ProblemsError(f"{where}: row {number}: {TOO_DEEP}; {MEND}")
    lines = [json.dumps(row).encode() for row in rows]
    numbered = ((f"row {n}", line) for n, line in enumerate(lines))
    return _rows_of(lines, rules, where, _checked(numbered, rules, where, form))


def _elements(text: str) -> Iterator[str]:
    opened, start, level = list[str](), 0, 0
    for token in TOKENS.finditer(text):
        if token[0] in ("[", "{"):
            opened.append(token[0])
            if not level and token[0] == "[" and len(opened) <= 2:
                start, level = token.end(), len(opened)
        elif len(opened) == level and token[0] in (",", "]"):
            yield text[start : token.start()]
            start = token.end()
        if token[0] in ("]", "}") and opened:
            level = 0 if len(opened) == level else level
            opened.pop()


def _csv_table(data: bytes, delimiter: str, texts: Sequence[str]) -> pa.Table:
    """One block, so that types are those of all rows and no cell is too long. `texts`: columns that stay as written."""
    return pc_csv.read_csv(
        pa.BufferReader(data),
        read_options=pc_csv.ReadOptions(block_size=min(len(data) + 1, MOST_BLOCK)),
        parse_options=pc_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pc_csv.ConvertOptions(
            column_types=dict.fromkeys(texts, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
        ),
    )


def _is_changed(column: pa.ChunkedArray, texts: pa.ChunkedArray) -> bool:
    """Whether a column is not as written: `007`, digits beyond a float, times."""
    types, kind = pa.types, column.type
    if types.is_integer(kind):
        return bool(pc.any(pc.not_equal(pc.cast(column, pa.string()), pc.utf8_trim_whitespace(texts))).as_py())
    if types.is_floating(kind):
        return bool(pc.any(pc.greater_equal(pc.abs(column), EXACT)).as_py())
    return not (types.is_boolean(kind) or types.is_null(kind))


def _csv(data: bytes, delimiter: str, rules: ColumnRules, where: str) -> pa.Table:
    try:
        header = next(csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""), delimiter=delimiter), [])
        if IMAGES in rules.names(header, where):
            raise ProblemsError(f"{where}: a table of text has no images; write the rows as parquet or JSON lines")
        texts = [name for name in header if rules.ours(name) in TEXTS]
        found, written = (_csv_table(data, delimiter, names) for names in (texts, header))
        changed = [name for name in found.column_names if _is_changed(found.column(name), written.column(name))]
        for name in changed:
            found = found.set_column(found.column_names.index(name), name, written.column(name))
        return found
    except UnicodeDecodeError as error:
        raise ProblemsError(f"{where}: not UTF-8 ({error.reason} at byte {error.start:,}); write it again") from None
    except (pa.ArrowException, csv.Error) as error:
        line = str(error).splitlines()[0]
        raise ProblemsError(f"{where}: not a readable table ({line}); write it again") from None
