"""The run that is soaked: its problems, its model, its run file, and the launcher that keeps it.

The learning rate is too small to change a weight, so answers keep their length, and the pace is the machine's.
Written and started by `__main__.py`; `python -m actors launch` does the rest, as for any run.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from benchmarks.learns import make
from benchmarks.runs.ports import free_port
from configs.load import load

EXAMPLES = Path(__file__).parents[2] / "examples" / "countdown"
LAUNCH = (sys.executable, "-m", "actors", "launch")
END_S = 120.0
"""Time for the end after SIGINT: the learner's version and its last checkpoint, and the drain of the others."""
KV_BYTES = 128 * 2**20
TOY: dict[str, dict[str, Any]] = {
    "rollout": {"sequences": 256, "engine": {"max_num_seqs": 256, "kv_cache_memory_bytes": KV_BYTES}},
}
SMOLLM2_PROBLEMS = ("--numbers", "2", "3", "--largest", "20", "--target", "40", "--count", "4000", "--prompt", "words")


def prepare(work: Path, model: Path | None) -> tuple[Path, Path]:
    """The folders of problems and model; without a `model`, those of the quickstart. What the same arguments made is
    kept."""
    data = work / ("toy-problems" if model is None else "problems")
    train = data / "train.parquet"
    make("examples.countdown.make_problems", "--out", data, "--eval", "12", *(SMOLLM2_PROBLEMS if model else ()))
    if model is not None:
        return data, model.resolve()
    toy = work / "toy"
    make("examples.countdown.make_model", "--problems", train, "--out", toy, "--steps", "200")
    return data, toy


def write_run(work: Path, data: Path, model: Path, toy: bool, servers: int, checkpoint_every: int) -> Path:
    """Write the run file of a new run; returns it. With `toy`, for two CPU cores."""
    source = EXAMPLES / ("quickstart.yaml" if toy else "smollm2.yaml")
    config: dict[str, dict[str, Any]] = yaml.safe_load(source.read_text(encoding="utf-8"))
    changes: dict[str, dict[str, Any]] = {
        "run": {"name": f"soak-{int(time.time())}", "folder": str(work), "versions": 1_000_000},
        "model": {"path": str(model)},
        "data": {"train": str(data / "train.parquet"), "eval": str(data / "eval.parquet")},
        "learner": {"lr": 1e-12, "schedule": "constant", "checkpoint_every": checkpoint_every},
        "rollout": {"servers": servers},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}", "keep": "all"},
    }
    for more in (TOY if toy else {}, changes):
        for section, keys in more.items():
            config[section] = {**config.get(section, {}), **keys}
    if toy:
        config["rollout"]["engine"]["max_model_len"] = 64
    file = work / f"{config['run']['name']}.yaml"
    file.write_text(yaml.safe_dump(config, sort_keys=False))
    return file


class Launched:
    """A context manager around the launcher of `file`, and all that it starts; `launch` is its command line."""

    def __init__(self, file: Path, launch: Sequence[str] = LAUNCH) -> None:
        self.file, self.config = file, load([str(file)])
        self._command = [*launch, str(file), "--no-report"]

    def __enter__(self) -> "Launched":
        self.terminal = self.file.with_suffix(".terminal")
        with self.terminal.open("wb") as sink:
            quiet = subprocess.DEVNULL
            self._launcher = subprocess.Popen(
                self._command, stdin=quiet, stdout=sink, stderr=sink, start_new_session=True
            )
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):  # its guard ends everything below it
            os.kill(self._launcher.pid, signal.SIGKILL)
        self._launcher.wait()

    def alive(self) -> bool:
        """Whether the launcher runs."""
        return self._launcher.poll() is None

    def end(self) -> int:
        """End the run as Ctrl-C does, and wait for it; returns the launcher's exit code. Raises
        subprocess.TimeoutExpired after END_S."""
        self._launcher.send_signal(signal.SIGINT)
        return self._launcher.wait(END_S)

    def last_lines(self) -> str:
        """The end of what the launcher has printed."""
        return "\n".join(self.terminal.read_text(errors="replace").splitlines()[-12:])
