"""Trains a model on demonstrations that a script of an example makes, with `python -m learner sft`.

Used by `lesson.py` and `warm_start.py`. The demonstrations, the run file and the run stay in a folder, so that a person
can read them, and repeat the command.
"""

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain, islice
from pathlib import Path
from typing import Any, NoReturn

import yaml

from configs.entrypoint import PARENT
from configs.writing import removed_on_failure, writing
from examples.kept import copy_whole

Row = dict[str, Any]
"""A demonstration, as docs/sft.md has it."""
Sections = dict[str, dict[str, Any]]
"""A run file, by section."""
LOOKED_AT = 1000
RUN_FILE = "lesson.yaml"
"""Made first and removed never: a folder without it is another's."""


def first_shown(rows: Iterator[Row]) -> tuple[str, Iterator[Row]]:
    """A digest of the first of `rows`, which belongs in the record of a model that they teach: they also depend on what
    no argument names. With all of `rows`, the first ones included."""
    first = list(islice(rows, LOOKED_AT))
    return sha256(json.dumps(first).encode()).hexdigest(), chain(first, rows)


def write_down(file: Path, rows: Iterable[Row]) -> None:
    """Write demonstrations, one a line. Raises WriteError."""
    with writing(file), removed_on_failure(file), file.open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)


@contextmanager
def begun(folder: Path) -> Iterator[None]:
    """Make the folder of a training, or empty one that an earlier call made, and keep other processes out meanwhile.

    This process ends with exit code 2 if the folder is another's, is in use, or cannot be written.
    """
    mark, lock = folder / RUN_FILE, -1
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not mark.exists() and any(folder.iterdir()):
            _refuse(f"{folder} has no {RUN_FILE}, so another program made it; move it away, or name another --out")
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _empty(folder)
    except BlockingIOError:
        _refuse(f"{folder} is in use by another process that makes a model there; wait until it ends")
    except OSError as error:
        _refuse(f"{error.filename or folder}: {error.strerror}; make it writable, or name another --out")
    try:
        yield
    finally:
        os.close(lock)


def _empty(folder: Path) -> None:
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        elif each.name != RUN_FILE:
            each.unlink()


def _refuse(problem: str) -> NoReturn:
    print(problem, file=sys.stderr)
    sys.exit(2)


def tune(out: Path, folder: Path, rows: Iterator[Row] | None, sections: Sections) -> float:
    """Train on as many rows as the run needs, each once, and write the model to `out`; returns the last loss.

    `folder`, which is `begun`, gets demonstrations, run file and run. `sections` name the model, `run.versions` and
    `sft.rows`, and `data.train` if `rows` is None. If the training fails, this process ends with its exit code.
    """
    demonstrations, file = folder / "demonstrations.jsonl", folder / RUN_FILE
    versions = sections["run"]["versions"]
    own = {"run": {**sections["run"], "name": "run", "folder": str(folder)}}
    if rows is not None:
        write_down(demonstrations, islice(rows, versions * sections["sft"]["rows"]))
        own |= {"data": {**sections.get("data", {}), "train": str(demonstrations), "shuffle": False, "epochs": 1}}
    file.write_text(yaml.safe_dump(sections | own, sort_keys=False), encoding="utf-8")
    _run("learner", "sft", str(file))
    checkpoints, records = folder / "run" / "checkpoints", folder / "run" / "metrics.jsonl"
    trained = checkpoints / f"v{versions:06d}" / "huggingface"
    if not trained.is_dir():
        print(f"{folder / 'run'}: the training was ended before version {versions}; start it again", file=sys.stderr)
        sys.exit(1)
    shutil.copytree(trained, out, copy_function=copy_whole, dirs_exist_ok=True)
    shutil.rmtree(checkpoints)
    return float(json.loads(records.read_text(encoding="utf-8").splitlines()[-1])["loss"])


def _run(*words: str) -> None:
    """Run `python -m WORDS` and wait. It ends with this process, which alone gets the terminal's Ctrl-C."""
    environment = os.environ | {PARENT: str(os.getpid())}
    if code := subprocess.run([sys.executable, "-m", *words], env=environment, process_group=0).returncode:
        sys.exit(code if code > 0 else 128 - code)
