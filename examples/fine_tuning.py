"""Trains a model on demonstrations that a script of an example makes, with `python -m learner sft`.

Used by `lesson.py` and `warm_start.py`. The demonstrations, the run file and the run stay in a folder, so that a person
can read them, and repeat the command.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from configs.entrypoint import PARENT

Row = dict[str, Any]
"""A demonstration, as docs/sft.md has it."""
Sections = dict[str, dict[str, Any]]
"""A run file, by section."""


def write_down(file: Path, rows: Iterable[Row]) -> None:
    """Write demonstrations, one a line."""
    with file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


def tune(out: Path, folder: Path, rows: Iterator[Row], sections: Sections) -> float:
    """Train on as many rows as the run needs, each once, and write the model to `out`; returns the last loss.

    `folder` gets demonstrations, run file and run. `sections` name the model, `run.versions` and `sft.rows`. If the
    training fails, this process ends with its exit code.
    """
    folder.mkdir(parents=True, exist_ok=True)
    demonstrations, file = folder / "demonstrations.jsonl", folder / "lesson.yaml"
    versions = sections["run"]["versions"]
    write_down(demonstrations, islice(rows, versions * sections["sft"]["rows"]))
    own = {"run": {**sections["run"], "name": "run", "folder": str(folder)}}
    own |= {"data": {**sections.get("data", {}), "train": str(demonstrations), "shuffle": False, "epochs": 1}}
    file.write_text(yaml.safe_dump(sections | own, sort_keys=False), encoding="utf-8")
    _run("learner", "sft", str(file))
    checkpoints, records = folder / "run" / "checkpoints", folder / "run" / "metrics.jsonl"
    trained = checkpoints / f"v{versions:06d}" / "huggingface"
    if not trained.is_dir():
        sys.exit(f"{folder / 'run'}: the training was ended before version {versions}; start it again")
    shutil.copytree(trained, out, dirs_exist_ok=True)
    shutil.rmtree(checkpoints)
    return float(json.loads(records.read_text(encoding="utf-8").splitlines()[-1])["loss"])


def _run(*words: str) -> None:
    """Run `python -m WORDS` and wait. It ends with this process, which alone gets the terminal's Ctrl-C."""
    environment = os.environ | {PARENT: str(os.getpid())}
    if code := subprocess.run([sys.executable, "-m", *words], env=environment, process_group=0).returncode:
        sys.exit(code if code > 0 else 128 - code)
