"""What `data.train` and `data.eval` name: files, sets of reasoning-gym, or several with weights."""

import ast
import glob
import gzip
import importlib.util
import io
import json
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl

import yaml

from configs.schema import Config, MixedSource

GENERATED = "reasoning_gym:"
INSTALL = 'pip install "reasoning-gym>=0.1.25,<0.2"'
SUFFIXES = (".parquet", ".jsonl", ".ndjson", ".json", ".csv", ".tsv")
GZIPPED = ".gz"
TRUTHLESS = ("none", "task", "judge", "reward_model", "reasoning_gym", "regex", "length")
READS_TRUTH = {"ground_truth", "ground_truths", "reward_input", "reward_inputs"}
"""Parameters by which a user's reward function gets the ground truth."""

URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]+:/")

Source = Path | str | Sequence[MixedSource]


class SourceError(ValueError):
    """One line, without the key that names the source."""


class GeneratedSet(NamedTuple):
    """A set of reasoning-gym, `size` and `seed` in its config."""

    name: str
    config: dict[str, Any]

    @property
    def size(self) -> int:
        return int(self.config["size"])

    def __str__(self) -> str:
        return f"{GENERATED}{self.name}"


def parts_of(source: Source) -> list[MixedSource]:
    """The parts of a source: one for a path or a name. Raises SourceError."""
    parts = [MixedSource(path=Path(source))] if isinstance(source, Path | str) else list(source)
    unweighted = [part for part in parts if part.weight is None]
    if unweighted and len(unweighted) < len(parts):
        raise SourceError(f"{unweighted[0].path} has no weight, others have one; give each a weight, or none")
    return parts


def source_name(source: Source) -> str:
    parts = [source] if isinstance(source, Path | str) else [part.path for part in source]
    return f"{parts[0]}{f' and {len(parts) - 1} more' if len(parts) > 1 else ''}"


def generated(source: Path | str) -> GeneratedSet | None:
    """The set that `reasoning_gym:NAME?size=N&seed=S&...` names; None for a path. Raises SourceError."""
    text = str(source)
    if not text.startswith(GENERATED):
        return None
    name, _, query = text.removeprefix(GENERATED).partition("?")
    try:
        config = {key: yaml.safe_load(value) for key, value in parse_qsl(query, strict_parsing=bool(query))}
    except (ValueError, yaml.YAMLError) as error:
        line = str(error).splitlines()[0]
        raise SourceError(f"not {GENERATED}NAME?size=N&seed=S: {line}; correct it") from None
    example = f"{GENERATED}{name or 'leg_counting'}?size=10000&seed=1"
    for key, least in (("size", 1), ("seed", 0)):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            given = "is missing" if value is None else f"is {value!r}, no whole number >= {least}"
            raise SourceError(f"{key} {given}; write both, such as {example}")
    if name in ("", "composite"):
        raise SourceError(f"names no single set; write {example}, and several as a list of {{path, weight}}")
    return GeneratedSet(name, config)


def files_of(source: Path | str) -> list[Path]:
    """Data files of a path, folder or glob. Raises SourceError."""
    path = Path(source)
    if path.is_file():
        _require_known(path)
        return [path]
    if path.is_dir():
        files = sorted(file for file in path.iterdir() if file.is_file() and kind_of(file) and file.name[0] != ".")
        if not files:
            raise SourceError(f"a folder without data files ({', '.join(SUFFIXES)}); name another, or a file")
    elif glob.has_magic(str(path)):
        files = [file for file in map(Path, sorted(glob.glob(str(path), recursive=True))) if file.is_file()]
        if not files:
            raise SourceError(f"no file matches it (from {Path.cwd()}); correct the pattern")
    else:
        problem = "not a file" if path.exists() else "no such file"
        raise SourceError(f"{problem} (from {Path.cwd()}); {_found_elsewhere(path) or 'correct the path'}")
    for file in files:
        _require_known(file)
        if kind_of(file) != kind_of(files[0]):
            raise SourceError(
                f"has {files[0].name} and {file.name}; name files of one kind, as by *{kind_of(files[0])}"
            )
    return files


def _found_elsewhere(path: Path) -> str:
    if URL.match(str(path)):
        return "files are read from this machine: download it and name the file"
    if len(path.parts) == 2 and not path.is_absolute() and not kind_of(path) and not path.parent.exists():
        return f"if it is a data set of the hub, save it: datasets.load_dataset({str(path)!r}) and to_parquet"
    return ""


def problems_with(source: Source) -> Iterator[str]:
    """Yield why nothing can be read from `source`; no file is opened."""
    try:
        parts = parts_of(source)
    except SourceError as error:
        yield str(error)
        return
    for part in parts:
        try:
            if generated(part.path) is None:
                files_of(part.path)
            elif importlib.util.find_spec("reasoning_gym") is None:
                raise SourceError(f"reasoning-gym is not installed here; {INSTALL}")
        except SourceError as error:
            yield f"{part.path}: {error}"


def shared_entries(train: Source, held_out: Source) -> Iterator[str]:
    """Yield sets of reasoning-gym with entries in both."""
    known = [found for part in parts_of(train) if (found := generated(part.path))]
    for part in parts_of(held_out):
        theirs = generated(part.path)
        for ours in known if theirs else ():
            assert theirs is not None
            seed = ours.config["seed"]
            alike = ours == theirs._replace(config=theirs.config | {"size": ours.size, "seed": seed})
            last = min(seed + ours.size, theirs.config["seed"] + theirs.size)
            shared = last - max(seed, theirs.config["seed"])
            if alike and shared > 0:
                why = f"entry i is drawn from seed + i; set seed={seed + ours.size} or more"
                yield f"{part.path}: {shared:,} of its {theirs.size:,} entries are in data.train too: {why}"


def needs_truth(config: Config) -> bool:
    """Whether rows must have a ground truth, as far as a user's file shows."""
    function: Any = config.reward.function
    names = [function] if isinstance(function, str) else [each.function for each in function]
    return not all(name in TRUTHLESS or _is_blind(name) for name in names)


def count_rows(source: Source) -> int | None:
    """Rows of a source; None if they cannot be counted quickly."""
    try:
        total = 0
        for part in parts_of(source):
            found = generated(part.path)
            for file in [] if found else files_of(part.path):
                total += _count(file)
            total += found.size if found else 0
    except (SourceError, OSError, ValueError, EOFError, RecursionError):  # pyarrow raises ValueError or OSError
        return None
    return total


def _count(file: Path) -> int:
    opened: Callable[..., Any] = gzip.open if file.suffix == GZIPPED else open
    if kind_of(file) == ".parquet":
        from pyarrow import parquet  # slow to import

        return int(parquet.ParquetFile(file).metadata.num_rows)
    with opened(file, "rb") as data:
        if kind_of(file) in (".jsonl", ".ndjson"):
            with io.TextIOWrapper(data, "latin-1", newline=None) as lines:  # a lone CR ends a line too
                return sum(1 for line in lines if line.strip(" \t\n\v\f"))
        if kind_of(file) == ".json":
            return len(the_list(json.load(data)))
        from pyarrow import csv

        delimiter = "\t" if kind_of(file) == ".tsv" else ","
        options = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True)
        return int(csv.read_csv(data, parse_options=options).num_rows)


def the_list(value: Any) -> list[Any]:
    """The rows of a JSON file: a list, or its one list."""
    lists = [value] if isinstance(value, list) else []
    if isinstance(value, dict):
        lists = [inner for inner in value.values() if isinstance(inner, list)]
    if len(lists) != 1:
        number = "no list" if not lists else f"{len(lists)} lists"
        raise ValueError(f"{number}; write a list of rows, an object with one, or one object per line (.jsonl)")
    return lists[0]


def kind_of(file: Path) -> str:
    """The suffix without .gz; "" for a file of other kind."""
    packed = file.suffix == GZIPPED
    suffix = file.with_suffix("").suffix if packed else file.suffix
    return suffix if suffix in SUFFIXES and not (packed and suffix == ".parquet") else ""


def _require_known(file: Path) -> None:
    if not kind_of(file):
        known = ", ".join(SUFFIXES)
        raise SourceError(f"{file.name} is none of {known} (text also with .gz); convert it, or name another file")


def _is_blind(name: str) -> bool:
    path, _, function = name.rpartition(":")
    with suppress(OSError, SyntaxError, ValueError):
        for node in ast.parse(Path(path).read_bytes()).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
                given = node.args
                names = {each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)}
                return not (names & READS_TRUTH or given.kwarg)
    return False
