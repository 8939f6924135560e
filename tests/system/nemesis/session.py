"""A launched run under the nemesis, as it is seen from outside: processes, history, logs, and whether it goes on."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, nullcontext, suppress
from pathlib import Path
from statistics import median

import psutil

from actors.watch.run_state import ask
from buffer.store.sqlite import reading
from buffer.wire.protocol import State
from configs.load import load
from tests.harness.toy import ROOT
from tests.system.chaos_faults import Disk, clocked
from tests.system.nemesis.checker import Violation, check
from tests.system.nemesis.history import Ended, Event, Loaded, Reader, Restored, Trained
from tests.system.nemesis.proxy import Network, at, named_by_address
from tests.system.nemesis.run import CLIENTS, SAMPLES, SERVERS, STALENESS, NemesisRun

MARK = "HEADRACE_NEMESIS"
"""Environment variable of every process of a launch; their children inherit it."""
DISK_MIB = 192
"""More than ledger, logs and checkpoints of a run take."""
START_S, GONE_S, STOP_S = 240.0, 120.0, 120.0
"""Until the first version is trained; until all processes are gone after a kill; for a drain."""
FAILURE = re.compile(r"^--- ([a-z]+)(?:-\d+)? (failed|refused|gave_up): (.*)", re.MULTILINE)


class Session:
    """One run, launched any number of times."""

    def __init__(self, outer: Path, seed: int, with_disk: bool = False) -> None:
        self.run = NemesisRun.make(outer, seed)
        self.network, self.reader = Network(), Reader(self.run.histories)
        self.disk = Disk(self.run.path, DISK_MIB)
        self._mounted: AbstractContextManager[None] = self.disk.mounted() if with_disk else nullcontext()
        self.launcher: subprocess.Popen[bytes] | None = None
        self.mark = uuid.uuid4().hex
        address = int(load([str(self.run.first_file)]).buffer.address.rpartition(":")[2])
        for name in CLIENTS:
            self.network.add(f"{name} buffer", self.run.port_of(name, "buffer"), at(address))
        for name in SERVERS:
            self.network.add(f"{name} weights", self.run.port_of(name, "weights"), named_by_address)

    def __enter__(self) -> "Session":
        self._mounted.__enter__()
        self.launch()
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.network.close()
        self._mounted.__exit__(None, None, None)

    # its processes

    def launch(self) -> None:
        """Start it, for the first time or again."""
        command = [sys.executable, "-m", "tests.system.nemesis.launch", str(self.run.outer)]
        environment = clocked(os.environ | {MARK: self.mark}, self.run.clock("launcher"))
        with self.run.terminal.open("ab") as sink:
            self.launcher = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=sink, stderr=sink)

    def kill(self) -> None:
        """SIGKILL to the launcher, by which everything ends; what outlives it by GONE_S is an error."""
        if self.launcher is None:
            return
        with suppress(psutil.Error):
            for process in self.find("launcher"):
                process.resume()
        self.launcher.kill()
        self.launcher.wait()
        self.launcher = None
        self.gone()

    def gone(self) -> None:
        """Wait until no process of the run is left."""
        deadline = time.monotonic() + GONE_S
        while left := list(self.left()):
            if time.monotonic() > deadline:
                lines = [" ".join(process.cmdline()) for process in left]
                for process in left:
                    process.kill()
                raise AssertionError(f"processes that outlive the launcher: {lines}")
            time.sleep(0.1)

    def stop(self) -> int:
        """SIGTERM to the launcher, and its exit code."""
        assert self.launcher is not None
        self.launcher.send_signal(signal.SIGTERM)
        code = self.launcher.wait(STOP_S)
        self.launcher = None
        self.gone()
        return code

    @property
    def ended(self) -> int | None:
        """The launcher's exit code, if it ended by itself."""
        return self.launcher.poll() if self.launcher else None

    def left(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self.mark:
                    yield process

    def find(self, name: str) -> list[psutil.Process]:
        """Processes of this name: `buffer`, `learner`, `rollout-0`, `launcher` (that under guard), or `guard NAME`."""
        kind, _, guarded = name.partition(" ")
        if kind == "guard":
            return [parent for process in self.find(guarded) if (parent := process.parent())]
        outer = str(self.run.outer)
        words = {
            "buffer": ["-m", "buffer", str(self.run.file)],
            "learner": ["-m", "tests.system.nemesis.learner", outer],
            "launcher": ["-m", "tests.system.nemesis.launch", outer, "inner"],
        }.get(name, ["-m", "tests.system.nemesis.server", outer, name])
        found = []
        for process in psutil.process_iter(["cmdline"]):
            if (process.info["cmdline"] or [])[1:] == words:
                found.append(process)
        return found

    def process(self, name: str, within_s: float = 60.0) -> psutil.Process:
        """The process of this name, which may be starting."""
        deadline = time.monotonic() + within_s
        while not (found := self.find(name)):
            assert time.monotonic() < deadline, f"no process {name}: {self.last_lines()}"
            time.sleep(0.1)
        return found[0]

    # what it does

    def events(self) -> list[Event]:
        return self.reader.refresh()

    def trained(self, since: float = 0.0) -> list[Trained]:
        return [event for event in self.events() if isinstance(event, Trained) and event.at > since]

    def until(self, holds: Callable[[], object], within_s: float) -> bool:
        """Wait; False if it does not hold in time, or the launcher ends before."""
        deadline = time.monotonic() + within_s
        while not holds():
            if time.monotonic() > deadline or self.ended is not None:
                return bool(holds())
            time.sleep(0.05)
        return True

    def well(self, since: float) -> bool:
        """Whether the learner has trained and each server has loaded a new version since then."""
        events = [event for event in self.events() if event.at > since]
        loaded = {event.who.partition("#")[0] for event in events if isinstance(event, Loaded)}
        return loaded >= {*SERVERS} and any(isinstance(event, Trained) for event in events)

    def version_s(self) -> float:
        """Median time of a version, those left out that follow a start of the learner."""
        times, before = list[float](), None
        for event in self.events():
            if isinstance(event, Trained):
                times += [event.at - before.at] if isinstance(before, Trained) else []
                before = event
            elif isinstance(event, Restored):
                before = event
        return median(times) if times else 0.0

    def violations(self) -> list[Violation]:
        return check(self.events(), STALENESS, SAMPLES)

    def state(self) -> State | None:
        """What the buffer says, if it answers."""
        return asyncio.run(ask(self.run.config()))

    def failures(self) -> list[tuple[str, str]]:
        """Role and text of each end of a process that its keeper has reported, in order for each process."""
        logs = sorted((self.run.path / "logs").glob("*.log"))
        texts = [(path.stem, path.read_text(errors="replace")) for path in logs]
        return [(role, f"{name} {how}: {why}") for name, text in texts for role, how, why in FAILURE.findall(text)]

    def log_bytes(self) -> int:
        return sum(path.stat().st_size for path in (self.run.path / "logs").glob("*.log*"))

    def said(self, since: int = 0) -> str:
        """What the launcher has said since its output had so many characters."""
        return self.run.terminal.read_text(errors="replace")[since:]

    def last_lines(self, number: int = 8) -> str:
        """The end of that, in one line, without what only processes of the run have said."""
        lines = [line for line in self.said().splitlines() if not line.startswith("[rollout")]
        return " / ".join(lines[-number:])

    def note_end(self) -> None:
        """Write into the history what the ledger holds. The run is stopped."""
        with closing(reading(self.run.ledger)) as db:
            items = db.execute("SELECT item, state, reason, batch FROM items ORDER BY item").fetchall()
        of = {state: [item for item in items if item[1] == state] for state in ("dropped", "trained")}
        self.run.history("nemesis").add(
            Ended,
            dropped=[(item, reason or "") for item, _, reason, _ in of["dropped"]],
            trained=[(item, batch) for item, _, _, batch in of["trained"]],
            open=[(item, state) for item, state, *_ in items if state not in of],
        )
