"""Runs in a script or a notebook: `launch` starts one, and `Run` reads it and waits for its end.

The program may have packages `configs` or `buffer` of its own, so this module imports none and runs the command
`headrace`. A guard ends the launcher with all its processes when this program dies.
"""

import atexit
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.function_source import reward_file

ENTRY = Path(__file__).absolute().with_name("__main__.py")
GUARD = ENTRY.parents[1] / "actors" / "supervise" / "guard.py"
ABOVE = "HEADRACE_ABOVE"
"""As in `configs.entrypoint`: of two signals, the command takes the second one for a duplicate."""
LINES = 1000
SHOWN = 20
DEAD = 1
"""Exit code of `headrace status` without an answer."""
ENDED_WELL = (0, 3, 128 + signal.SIGINT)
"""Last version reached, data ended, stopped."""
Record = dict[str, Any]


class HeadraceError(RuntimeError):
    """A command refused or failed; the text is its output."""


def launch(
    config: str | Path | Mapping[str, Any],
    overrides: Mapping[str, Any] | None = None,
    *,
    reward: Callable[..., Any] | None = None,
) -> "Run":
    """Launch a run, or go on with it; returns once it is accepted.

    `config` is a run file or a dict of its sections, `overrides` are further keys, `reward` replaces `reward.function`.
    Raises HeadraceError with every problem of the run file, and NoSource for a function that cannot be sent to the
    reward workers.
    """
    with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
        if isinstance(config, Mapping):
            file = Path(folder) / "config.yaml"
            file.write_text(json.dumps(config, default=_plain), encoding="utf-8")
        else:
            file = Path(config)
        words = [
            str(file),
            *(f"--{key}={json.dumps(value, default=_plain)}" for key, value in (overrides or {}).items()),
        ]
        first = [] if reward is None else ["--reward.function=reward.py:reward"]  # the folder is not known yet
        where = json.loads(command("configs.run_path", *words, *first))
        if reward is not None:
            words.append(f"--reward.function={json.dumps(reward_file(reward, Path(where['folder']) / '.rewards'))}")
        run = Run(where["path"])
        run.launcher = Launcher(words, run.path)
        if run.launcher.accepted.wait() and run.launcher.code not in (None, *ENDED_WELL):
            raise HeadraceError(run.launcher.last_lines())
    return run


class Run:
    """A run's folder, and its launcher if this program launched it. `Run("runs/my")` reads any run."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.launcher: Launcher | None = None

    def metrics(self) -> list[Record]:
        """Return a dict for each trained version, in order."""
        other = {"kind", "eval/version"}  # looks at the servers, evaluations
        found = {record["version"]: record for record in self._records() if not other & record.keys()}
        return [found[version] for version in sorted(found)]

    def evaluations(self) -> list[Record]:
        """Return a dict for each evaluation, by version."""
        found = {record["eval/version"]: record for record in self._records() if "eval/version" in record}
        return [found[version] for version in sorted(found)]

    def samples(self, version: int | None = None) -> list[Record]:
        """Return a dict for each stored sample: `item`, `problem`, `answer`, `reward`, `batch`, `tokens`, ...

        `version` selects the batch that made `version + 1`; batches before the oldest checkpoint are gone. Raises
        HeadraceError if nothing is there yet.
        """
        import pyarrow.parquet  # slow

        with tempfile.TemporaryDirectory(prefix="headrace-") as folder:
            file = Path(folder) / "samples.parquet"
            command("export", str(file), str(self.path))
            only = None if version is None else [("batch", "=", version)]
            samples: list[Record] = pyarrow.parquet.read_table(file, filters=only).to_pylist()
        return samples

    def status(self) -> str:
        """Return the output of `headrace status`."""
        return command("status", str(self.path), well=(0, DEAD))

    @property
    def output(self) -> list[str]:
        """The last lines of the launcher."""
        return list(self.launcher.lines) if self.launcher else []

    def wait(self, timeout_s: float | None = None, show: bool = True) -> int:
        """Wait for the end of the run and return its exit code; print the launcher's lines if `show`.

        Ctrl-C stops the run, then raises KeyboardInterrupt. Raises HeadraceError if the run failed, and TimeoutError.
        """
        launcher = self._own()
        try:
            code = launcher.wait(timeout_s, print if show else lambda line: None)
        except KeyboardInterrupt:
            self.stop(show=show)
            raise
        if code not in ENDED_WELL:
            raise HeadraceError(f"the run ended with exit code {code}:\n{launcher.last_lines()}")
        return code

    def stop(self, show: bool = True) -> int:
        """Let every process finish and save its work, and return the exit code. Ctrl-C kills the run."""
        launcher = self._own()
        launcher.guarded.signal(signal.SIGINT)
        try:
            return launcher.wait(None, print if show else lambda line: None)
        except KeyboardInterrupt:
            launcher.guarded.kill()
            launcher.ended.wait()
            raise

    def _own(self) -> "Launcher":
        if self.launcher is None:
            raise HeadraceError(f"{self.path}: this program did not launch the run; the terminal that did can stop it")
        return self.launcher

    def _records(self) -> Iterator[Record]:
        """The learner may still write the last line."""
        file = self.path / "metrics.jsonl"
        for line in file.read_bytes().splitlines() if file.exists() else ():
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict):
                yield record

    def __repr__(self) -> str:
        ended = self.launcher and self.launcher.ended.is_set()
        state = "read only" if self.launcher is None else f"ended with {self.launcher.code}" if ended else "runs"
        return f"Run({str(self.path)!r}: {state}, {len(self.metrics())} versions)"


class Launcher:
    def __init__(self, words: list[str], run: Path) -> None:
        self.lines = deque[str](maxlen=LINES)
        self.code: int | None = None
        self.accepted, self.ended = threading.Event(), threading.Event()
        self._fresh = deque[str](maxlen=LINES)
        self._config, self._changed = run / "config.yaml", threading.Condition()
        self._before, self._name, self._program = _stamp(self._config), run.name, os.getpid()
        source, sink = os.pipe()
        with os.fdopen(sink, "wb"):
            line = [sys.executable, "-P", str(ENTRY), "launch", *words, "--log.display=plain"]
            env = os.environ | {ABOVE: str(os.getpid())}
            self.guarded = _guard().Guarded("launcher", line, env=env, stdout=sink, stderr=sink)
        threading.Thread(target=self._read, args=(source,), name="headrace", daemon=True).start()
        atexit.register(self._stop_at_exit)

    def wait(self, timeout_s: float | None, show: Callable[[str], object]) -> int:
        """Gives each line to `show` once. Raises TimeoutError."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            with self._changed:
                left = None if end is None else max(end - time.monotonic(), 0.0)
                if not self._changed.wait_for(lambda: bool(self._fresh) or self.ended.is_set(), left):
                    raise TimeoutError(f"the run {self._name} has not ended in {timeout_s:g} s")
                fresh, over = [*self._fresh], self.ended.is_set()
                self._fresh.clear()
            for line in fresh:
                show(line)
            if over and self.code is not None:
                return self.code

    def last_lines(self) -> str:
        return "\n".join(list(self.lines)[-SHOWN:])

    def _read(self, source: int) -> None:
        with os.fdopen(source, encoding="utf-8", errors="replace") as output:
            for line in output:
                with self._changed:
                    self.lines.append(line.rstrip("\n"))
                    self._fresh.append(line.rstrip("\n"))
                    self._changed.notify_all()
                if not self.accepted.is_set() and _stamp(self._config) != self._before:
                    self.accepted.set()
        self.code = self.guarded.wait()
        atexit.unregister(self._stop_at_exit)
        with self._changed:
            self.ended.set()
            self._changed.notify_all()
        self.accepted.set()

    def _stop_at_exit(self) -> None:
        """Else the end of the program would kill the run. A process that it forked has the same hook."""
        if os.getpid() != self._program:
            return
        print(f"headrace: stopping the run {self._name}, because the program that launched it ends; call run.wait() "
              "to let it reach its last version", file=sys.stderr, flush=True)  # fmt: skip
        self.guarded.signal(signal.SIGINT)
        self.ended.wait()


def command(*words: str, well: Sequence[int] = (0,)) -> str:
    """Return what `headrace WORDS` prints. Raises HeadraceError."""
    done = subprocess.run([sys.executable, "-P", str(ENTRY), *words], capture_output=True, text=True)
    if done.returncode and (done.returncode not in well or not done.stdout):
        raise HeadraceError((done.stderr or done.stdout).strip() or f"headrace {words[0]}: exit code {done.returncode}")
    return done.stdout


def _guard() -> Any:
    spec = importlib.util.spec_from_file_location("headrace.guard", GUARD)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _stamp(file: Path) -> tuple[int, int] | None:
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _plain(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item"):
        return value.item()
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{value!r} cannot stand in a run file; write a number, a text, a list or a dict")
