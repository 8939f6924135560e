"""`python -m configs --from FILE [--out RUN.yaml]`: writes a run file for settings of verl, TRL, EasyR1 or OpenRLHF.

Lists on stderr what has no counterpart. Exit code 2 for a file of none of these systems.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import yaml

from configs.entrypoint import BAD_INPUT, DONE
from configs.load import ConfigError
from configs.migration import easyr1, openrlhf, trl, verl
from configs.migration.draft import Draft, Given
from configs.migration.settings import read_settings
from configs.plain_text import print_visible
from configs.schema import Config
from configs.writing import removed_on_failure


class System(NamedTuple):
    recognises: Callable[[Given], bool]
    convert: Callable[[Given, Draft], None]


SYSTEMS = {
    "verl": System(verl.recognises, verl.convert),
    "EasyR1": System(easyr1.recognises, easyr1.convert),
    "OpenRLHF": System(openrlhf.recognises, openrlhf.convert),
    "TRL": System(trl.recognises, trl.convert),
}
REQUIRED = {
    "model.path": "models/MODEL",
    "data.train": "data/train.parquet",
    "reward.function": "math",
}
"""Stand in for keys that the settings lack."""


def main(file: Path, out: Path | None) -> int:
    try:
        system, draft = convert(file)
        text = run_file(file, system, draft)
        if out is None:
            print_visible(text, end="")
        else:
            write_new(out, text)
    except ConfigError as error:
        print_visible(error, sys.stderr)
        return BAD_INPUT
    print_visible("\n".join(report(system, draft)), sys.stderr)
    return DONE


def convert(file: Path) -> tuple[str, Draft]:
    given, draft = Given(read_settings(file)), Draft()
    name = next((name for name, system in SYSTEMS.items() if system.recognises(given)), None)
    if name is None:
        known = ", ".join(SYSTEMS)
        seen = ", ".join(list(given.settings)[:5])
        raise ConfigError([f"--from: {file}: its settings ({seen}, ...) are of none of {known}"])
    draft.set("data", {})
    try:
        SYSTEMS[name].convert(given, draft)
    except (TypeError, ValueError, AttributeError, ArithmeticError) as error:
        problem = f"--from: {file}: a setting of {name} has a value that cannot be: {error}"
        unset = [f"{key}={value}" for key, value in given.settings.items() if "$" in str(value)]
        remedy = f"give the script numbers for {', '.join(unset)}" if unset else "correct it"
        raise ConfigError([f"{problem}; {remedy}"]) from None
    for key, value in REQUIRED.items():
        section, leaf = key.split(".")
        if leaf not in draft.tree.get(section, {}):
            draft.set(key, value)
            draft.lacks(key, "not in the file", f"{value} stands in the run file; name your own")
    return name, draft


def run_file(file: Path, system: str, draft: Draft) -> str:
    ordered = {name: draft.tree[name] for name in Config.model_fields if draft.tree.get(name)}
    head = [f"From {file.name}, settings of {system}. docs/from-other-systems.md explains.", *draft.notes]
    comment = "\n".join(f"# {' '.join(line.split())}" for line in head)
    return f"{comment}\n{yaml.safe_dump(ordered, sort_keys=False, allow_unicode=True, width=1000)}"


def report(system: str, draft: Draft) -> list[str]:
    found = [f"settings of {system}:", *(f"  {line}" for line in draft.notes)]
    if draft.missing:
        found += ["without a counterpart, or to be set by you:", *(f"  {line}" for line in draft.missing)]
    return [*found, "next: python -m configs RUN.yaml --gpu H100 checks the run file and estimates what it takes"]


def write_new(out: Path, text: str) -> None:
    try:
        with out.open("x", encoding="utf-8") as stream, removed_on_failure(out):
            stream.write(text)
            stream.flush()
    except FileExistsError:
        raise ConfigError([f"--out: {out} is already there; name another file"]) from None
    except OSError as error:
        raise ConfigError([f"--out: {out}: cannot be written: {error.strerror}; name another file"]) from None
