"""A run small enough for a test: Countdown rows, a barely trained model of 0.2 M parameters, and commands."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from buffer.store.sqlite import reading
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[2]


def python(*words: str | Path, timeout_s: float = 240.0) -> subprocess.CompletedProcess[str]:
    """Run `python -m WORDS` in the repository's root and wait for its end."""
    line = [sys.executable, "-m", *map(str, words)]
    return subprocess.run(line, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


@dataclass(frozen=True)
class Toy:
    """Where the problems and the model are."""

    folder: Path

    def settings(self, name: str, *more: str) -> list[str]:
        """The quickstart's file, smaller: 4 groups of 4 samples, every version probed, every sample kept."""
        return [
            "examples/countdown/quickstart.yaml",
            f"--run.folder={self.folder}",
            f"--run.name={name}",
            f"--model.path={self.folder / 'model'}",
            f"--data.train={self.folder / 'data' / 'train.parquet'}",
            f"--data.eval={self.folder / 'data' / 'eval.parquet'}",
            f"--buffer.address=tcp://127.0.0.1:{free_port()}",
            "--batch.groups=4",
            "--batch.samples=4",
            "--rollout.sequences=32",
            "--rollout.engine.max_num_seqs=32",
            "--weights.probe_every=1",
            "--buffer.keep=all",
            *more,
        ]

    def run(self, name: str) -> "Run":
        return Run(self.folder / name)


def make_toy(folder: Path) -> Toy:
    """Make problems and model with the example's own commands; 15 steps of warm start."""
    made = python("examples.countdown.make_problems", "--out", folder / "data", "--eval", "12")
    assert made.returncode == 0, made.stderr
    train = folder / "data" / "train.parquet"
    made = python("examples.countdown.make_model", "--problems", train, "--out", folder / "model", "--steps", "15")
    assert made.returncode == 0, made.stderr
    return Toy(folder)


@dataclass(frozen=True)
class Run:
    """A run's folder, read after or during the run."""

    path: Path

    def metrics(self) -> list[dict[str, Any]]:
        """The records of versions, without a line that is still being written."""
        return [record for record in self.records() if "eval/version" not in record]

    def evaluations(self) -> list[dict[str, Any]]:
        """The records of evaluations."""
        return [record for record in self.records() if "eval/version" in record]

    def records(self) -> list[dict[str, Any]]:
        """All records of versions and evaluations, as they stand in the file."""
        file = self.path / "metrics.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record for record in records if "version" in record]

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the ledger's file; `data_of(segment, position, bytes)` is a packed sample."""
        with closing(reading(self.path / "buffer.sqlite")) as database:
            return database.execute(sql).fetchall()

    def log(self, process: str) -> str:
        file = self.path / "logs" / f"{process}.log"
        return file.read_text() if file.exists() else ""

    def processes(self, module: str) -> list[psutil.Process]:
        """Processes that run `python -m MODULE` with this run's config file."""
        config, found = str(self.path / "config.yaml"), []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if config in words and ("-m", module) in pairwise(words):
                found.append(process)
        return found

    def kill(self, module: str) -> int:
        """Send SIGKILL to the processes of `module`; returns their number."""
        victims = self.processes(module)
        for victim in victims:
            os.kill(victim.pid, signal.SIGKILL)
        return len(victims)

    def left_behind(self) -> list[str]:
        """Command lines of living processes that name this run's folder."""
        lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        return [line for line in lines if re.search(re.escape(str(self.path)) + r"(/|\b)", line)]
