"""Reads the run file: YAML files and `--section.key=value` overrides become one validated Config, or a ConfigError.

OmegaConf reads the files (so `1e-6` is a number) and resolves `${section.key}`, pydantic validates. Imports no torch.
"""

import logging
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import google_crc32c
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from configs.help import (
    EXAMPLES,
    FACTORS,
    RENAMED_KEYS,
    TYPES,
    VALUES_ELSEWHERE,
    key_of,
    keys,
    overview,
    sections,
    suggest,
)
from configs.help import show as in_yaml
from configs.origins import MissingVariable, Origin, Place, at, credentials, resolved, traced, written
from configs.plain_text import print_visible
from configs.schema import Config
from configs.variables import run_folder
from configs.writing import write_text, writing

log = logging.getLogger(__name__)
KEYS = "python -m configs --keys"
TIMES = "times"
"""A product in the merged tree: `{"times": [32, "${batch.samples}"]}`."""
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # as OmegaConf chooses: the two accept different files

CHECKED = "# crc32c {:08x} of the lines above; if you edit them, remove this line\n"


class ConfigError(ValueError):
    """The run file is wrong, for one reason a line."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(dict.fromkeys(problems))  # two checks may find the same
        super().__init__("\n".join(self.problems))


class MergedTree:
    """Files and overrides merged, and where each leaf is written (`run.yaml:12`, `--batch.groups`)."""

    def __init__(self) -> None:
        self.tree: dict[str, Any] = {}
        self.places: dict[str, str] = {}

    def add(self, tree: dict[str, Any], place: Callable[[str], str]) -> None:
        _lay(self.tree, tree)
        new = {key: place(key) for key in _leaves(tree)}
        replaced = [old for old in self.places if any(key.startswith(f"{old}.") for key in new)]
        self.places = {old: where for old, where in self.places.items() if old not in replaced} | new

    def where(self, key: str) -> str:
        place = next((self.places[known] for known in self.places if known == key or known.startswith(f"{key}.")), None)
        return f" ({place})" if place else ""

    def rename(self, renamed: Mapping[str, str]) -> None:
        """Raise ConfigError where both keys are written."""
        for old, new in renamed.items():
            (section, leaf), (new_section, new_leaf) = old.split("."), new.split(".")
            below = self.tree.get(section)
            if not isinstance(below, dict) or leaf not in below:
                continue
            problem = f"{old}{self.where(old)} is now {new}"
            if self.where(new):
                raise ConfigError([f"{problem}{self.where(new)}, and both are set; remove {old}"])
            value, place = below.pop(leaf), new
            if factor := FACTORS.get(old):  # known once everything is merged and resolved
                value, place = {TIMES: [value, f"${{{factor}}}"]}, f"{new}.{TIMES}"
            log.warning("%s: taken as such%s; rename it", problem, f", times {factor}" if factor else "")
            _lay(self.tree, {new_section: {new_leaf: value}})
            if not below:
                del self.tree[section]
            for key in [key for key in self.places if f"{key}.".startswith(f"{old}.")]:
                self.places[place + key.removeprefix(old)] = self.places.pop(key)


def load(
    argv: Sequence[str],
    environment: Mapping[str, str] = os.environ,
    lenient: bool = False,
    warn: Callable[[str], object] | None = None,
) -> Config:
    """Return the config of `["RUN.yaml", "--batch.groups=16", ...]`. Raises ConfigError with every problem found.

    `lenient`: variables of credentials may be missing. `warn` gets a line about a file that does not fit its checksum;
    None refuses it.
    """
    files, overrides = _split(argv)
    merged = MergedTree()
    problems: list[str] = []
    sources = [partial(_read_file, file, warn) for file in files] + [partial(_read_override, *one) for one in overrides]
    for read_source in sources:
        try:
            source = MergedTree()
            source.add(*read_source())
            source.rename(RENAMED_KEYS)
            merged.add(source.tree, source.places.__getitem__)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return _validate(merged, environment, lenient)


def parse(text: str) -> Config:
    """The config that another process gave as `dump`."""
    merged = MergedTree()
    merged.add(_parse(text, "the run file"), lambda key: "")
    return _validate(merged, os.environ, False)


def dump(config: Config) -> str:
    """Text of `config.yaml`, with `${oc.env:KEY}` for values from variables."""
    return OmegaConf.to_yaml(OmegaConf.create(written(config, _literal)))


def read(
    argv: Sequence[str], prog: str, checks: Callable[[Config], object] = lambda config: None, lenient: bool = False
) -> Config:
    """`load` for an entry point: problems go to stderr, then exit code 2. `lenient`: for commands that only look at a
    run."""
    usage = f"usage: {prog} RUN.yaml [MORE.yaml ...] [--section.key=value ...]"
    if "-h" in argv or "--help" in argv:
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `--help | head` ends quietly
        print_visible(f"{usage}\n\nFiles are merged left to right, then the overrides. Values are YAML.")
        print_visible(
            "${section.key} refers to another key, ${oc.env:NAME} to a variable.\n"
            "Below, `.key` is a key of the same group as the key before it.\n\n" + overview(text_width())
        )
        print_visible(f"\n{KEYS} [SECTION] lists every key with its type, default and meaning")
        sys.exit(0)
    if not argv:
        print_visible(f"{usage}\n{KEYS} lists every key", sys.stderr)
        sys.exit(2)
    try:
        config = load(argv, lenient=lenient, warn=_warn if lenient else None)
        checks(config)
    except ConfigError as error:
        print_visible(error, sys.stderr)
        sys.exit(2)
    return config


def text_width() -> int:
    return min(max(shutil.get_terminal_size().columns, 40), 120)


def write(config: Config, path: Path) -> None:
    """Write YAML, atomically, that `load` reads back to an equal Config. Only the user can read a file with
    credentials. Raises WriteError."""
    with writing(path.parent):
        run_folder(path.parent)
    text = dump(config)
    write_text(path, text + CHECKED.format(_crc32c(text)), private=any(credentials(config)))


def _crc32c(text: str) -> int:
    return int(google_crc32c.value(text.encode()))


def _warn(line: str) -> None:
    print_visible(f"warning: {line}", sys.stderr)


def _check_sum(file: str, source: str, warn: Callable[[str], object] | None) -> None:
    above, line = source.rpartition("\n# crc32c ")[::2]
    if not above or f"# crc32c {line}" == CHECKED.format(_crc32c(above + "\n")):
        return
    problem = f"{file}: its text does not fit its checksum, so a byte may be damaged"
    remedy = "bring the file back; if a person edited it, remove its last line, which is the checksum"
    if warn is None:
        raise ConfigError([f"{problem}: {remedy}"])
    warn(f"{problem}, and no process of the run starts with it: {remedy}")


def _split(argv: Sequence[str]) -> tuple[list[str], list[tuple[str, str]]]:
    files, overrides, problems, rest = [], [], [], list(argv)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("-"):
            files.append(word)
        elif not word.startswith("--") or not all(name.split(".")):
            problems.append(f"{word}: not an option; overrides are written --section.key=value")
        elif equals:
            overrides.append((name, value))
        elif rest and not rest[0].startswith("--"):
            overrides.append((name, rest.pop(0)))
        elif "." in name or name in sections():
            problems.append(f"{word}: no value; write {word}=true, or whatever it should be")
        else:
            problems.append(f"{word}: no such option; keys of the run file are written --section.key=value")
    if problems:
        raise ConfigError(problems)
    return files, overrides


def _read_file(file: str, warn: Callable[[str], object] | None) -> tuple[dict[str, Any], Callable[[str], str]]:
    if os.path.isdir(file):
        raise ConfigError([f"{file}: a folder; name a run file, such as {Path(file) / 'config.yaml'}"])
    try:
        source = Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        missing = f"no such file (from {Path.cwd()}); correct the path"
        problem = missing if isinstance(error, FileNotFoundError) else f"cannot be read as text: {error}"
        raise ConfigError([f"{file}: {problem}"]) from None
    _check_sum(file, source, warn)
    tree = _parse(source, file)
    lines: dict[str, int] = {}
    for key, line, empty in _lines(yaml.compose(source, Loader=LOADER)):
        lines[key] = line
        if empty:
            _refuse_empty(key, f"{file}:{line}")
    return tree, lambda key: f"{file}:{lines[key]}" if key in lines else file


def _parse(source: str, name: str) -> dict[str, Any]:
    try:
        parsed = OmegaConf.to_container(OmegaConf.create(source), resolve=False) if source.strip() else {}
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{name}:{mark.line + 1}:{mark.column + 1}" if mark else name
        raise ConfigError([f"{place}: not YAML: {error.problem or error.context}"]) from None
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        key = getattr(error, "full_key", None)
        raise ConfigError([f"{name}: {f'{key}: ' if key else ''}{str(error).splitlines()[0]}"]) from None
    if not isinstance(parsed, dict) or (len(parsed) == 1 and parsed == {source.strip(): None}):
        raise ConfigError(
            [f"{name}: must be a map of sections ({', '.join(sections())}), is {in_yaml(source.strip())}"]
        )
    # all lines of the section may be commented out
    return {str(key): {} if value is None and key in sections() else value for key, value in parsed.items()}


def _refuse_empty(key: str, where: str) -> None:
    if key in keys() and keys()[key].default == "null" and any(name.startswith(f"{key}.") for name in keys()):
        remedy = f"write {key.rpartition('.')[2]}: {{}} for all its defaults, null to do without, or keys below it"
        if keys()[key].required:
            remedy = f"set it, e.g. {key}: {EXAMPLES[key]}"
        raise ConfigError([f"{key}: nothing stands after it ({where}); {remedy}"])


def _read_override(name: str, value: str) -> tuple[dict[str, Any], Callable[[str], str]]:
    if not value.strip():
        _refuse_empty(name, f"--{name}")
    if value != value.encode(errors="replace").decode():
        raise ConfigError([f"--{name}: {value}: not UTF-8, as a run file must be; correct it, or rename the file"])
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"{name}={value}"]), resolve=False)
    except (yaml.YAMLError, OmegaConfBaseException) as error:
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError([f"--{name}: {in_yaml(value)} is not a YAML value: {reason}"]) from None
    return {str(key): inner for key, inner in tree.items()}, lambda _: f"--{name}"


def _lay(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    for key, value in over.items():
        below = under.get(key)
        if isinstance(value, dict):
            value = _lay(below if isinstance(below, dict) else {}, value)
        under[key] = value
    return under


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        dotted = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{dotted}.")
        else:
            yield dotted


def _values(tree: Any, place: tuple[int | str, ...] = ()) -> Iterator[tuple[tuple[int | str, ...], Any]]:
    if place:
        yield place, tree
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree if isinstance(tree, list) else ()):
        yield from _values(value, (*place, key))


def _lines(node: yaml.Node | None, prefix: str = "") -> Iterator[tuple[str, int, bool]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            empty = value.value == "" and value.tag.endswith(":null")
            yield f"{prefix}{key.value}", key.start_mark.line + 1, empty
            yield from _lines(value, f"{prefix}{key.value}.")


def _resolve(
    merged: MergedTree, environment: Mapping[str, str], lenient: bool
) -> tuple[dict[str, Any], dict[Place, Origin]]:
    """An interpolation may refer to a default."""
    tree = {
        name: section.annotation.model_construct().model_dump(mode="json")  # type: ignore[union-attr]
        for name, section in Config.model_fields.items()
    }
    try:
        found, origins = resolved(_lay(tree, merged.tree), environment, lenient)
    except MissingVariable as error:
        key, name = error.args
        raise ConfigError([_missing(key, name, merged)]) from None
    except OmegaConfBaseException as error:
        key, reason = str(error.full_key or "the run file"), str(error).splitlines()[0]
        if variable := re.search(r"Environment variable '(.+)' not found", reason):
            raise ConfigError([_missing(key, variable[1], merged)]) from None
        remedy = "${section.key} must name a key that has a value"
        raise ConfigError([f"{key}: {reason}{merged.where(key)}; {remedy}"]) from None
    return {str(key): _multiplied(value) for key, value in found.items()}, origins


def _missing(key: str, variable: str, merged: MergedTree) -> str:
    remedy = f"export {variable} where the run is started"
    return f"{key}: Environment variable '{variable}' not found{merged.where(key)}; {remedy}"


def _multiplied(section: Any) -> Any:
    if not isinstance(section, dict):
        return section
    section = dict(section)
    for leaf, value in section.items():
        if isinstance(value, dict) and set(value) == {TIMES}:
            one, other = value[TIMES]
            section[leaf] = one * other if isinstance(one, int) and isinstance(other, int) else one
    return section


def _validate(merged: MergedTree, environment: Mapping[str, str], lenient: bool) -> Config:
    tree, origins = _resolve(merged, environment, lenient)
    problems = {}
    for place, value in _values(tree):
        key = keys().get(key_of(place))
        whole = key and key.name.count(".") == len(place) - 1
        if key and whole and isinstance(value, bool) and TYPES["boolean"] not in key.type:  # `on` must not become 1
            name = ".".join(map(str, place))
            problems[name] = f"{name}: {in_yaml(value)} is not {key.type}{merged.where(name)}"
    try:
        config = Config.model_validate(tree)
    except ValidationError as error:
        errors = [(_within(found["loc"], tree, found["type"]), found) for found in error.errors(include_url=False)]
        for place, found in errors:
            deeper = [other for other, _ in errors if len(other) > len(place) > 1 and other[: len(place)] == place]
            if not deeper:  # else the other forms of a value of several forms
                value = next((origins[above].text for above in _above(place) if above in origins), found["input"])
                problems |= _problems(found["type"], place, value, merged)
    if problems:
        raise ConfigError(list(problems.values()))
    return traced(config, origins, environment)


def _above(place: tuple[int | str, ...]) -> Iterator[tuple[int | str, ...]]:
    return (place[:end] for end in range(len(place), 0, -1))


def _within(loc: Sequence[int | str], tree: Any, kind: str) -> tuple[int | str, ...]:
    """pydantic's `loc` also names the form of a value that it tried."""
    place: list[int | str] = []
    for number, part in enumerate(loc):
        here = isinstance(tree, dict) and (part in tree or (kind == "missing" and number == len(loc) - 1))
        if here or (isinstance(tree, list) and isinstance(part, int) and part < len(tree)):
            place.append(part)
            tree = tree.get(part) if isinstance(tree, dict) else tree[part]
    return tuple(place)


def _problems(kind: str, place: tuple[int | str, ...], value: Any, merged: MergedTree) -> dict[str, str]:
    loc, above = ".".join(map(str, place)), ".".join(map(str, place[:2]))
    if kind == "extra_forbidden":
        within = isinstance(value, dict) and value and len(place) < 3  # else it is a key of an entry
        wrong = list(_leaves(value, f"{loc}.")) if within else [loc]
        return {key: f"{key}: no such key{merged.where(key) or merged.where(above)}; {suggest(key)}" for key in wrong}
    name = key_of(place)
    if kind == "missing" and name in EXAMPLES:  # else the list is too short
        return {loc: f"{loc}: missing{merged.where(above)}; set it, e.g. {loc}: {EXAMPLES[name]}"}
    if name not in keys():
        remedy = f"write its keys below it, e.g. {next(key for key in keys() if key.startswith(f'{name}.'))}"
        return {name: f"{name}: {in_yaml(value)} is not a section{merged.where(name)}; {remedy}"}
    held = place[: len(name.split("."))]
    where, whole = ".".join(map(str, held)), at(merged.tree, held)
    quote = f"; put it in quotes: '{value}'" if kind == "string_type" and isinstance(value, int | float) else ""
    if isinstance(whole, dict) and set(whole) == {TIMES}:
        whole = value = whole[TIMES][0]  # as it was written, under the old name of the key
    shown, wanted = in_yaml(whole), keys()[name].type
    if value is not whole and value != whole:  # an entry of a list
        shown, wanted = f"{in_yaml(value)} in {shown}", wanted.partition(", each ")[2] or wanted
    said = merged.where(where) or merged.where(above)
    other = VALUES_ELSEWHERE.get(where, {}).get(str(value).lower())
    return {where: f"{where}: {shown} is not {wanted}{said}{quote}{f'; {other}' if other else ''}"}


def _literal(text: str) -> str:
    return re.sub(r"(\\*)\$\{", r"\1\1\\${", text)
