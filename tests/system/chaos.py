"""`python -m tests.system.chaos --kills 200 --seed 0`: runs whose processes are killed at random moments, then audited.

The buffer is `python -m buffer` itself; servers and learner run their real loops and clients, with stand-ins for vLLM
and the model (`chaos_rollout.py`, `chaos_learner.py`). A killed process is restarted at once. A few servers are frozen
instead, for longer than their leases, and continue late. After the last kill the run continues to its own end; then
`chaos_audit.py` reads the ledger. Prints one line; exit code 1 and the finding if something is wrong.
"""

import argparse
import os
import queue
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil

from tests.harness.toy import ROOT
from tests.system.chaos_agent import DAEMON
from tests.system.chaos_audit import Counts, Finding, audit
from tests.system.chaos_run import SERVERS, VARIANTS, Run, Variant

MARK = "HEADRACE_CHAOS"
"""Environment variable of every process of a run; their children inherit it."""
GROUPS_PER_KILL, SPARE = 14, 80
"""Size of a run, so that it does not end before its last kill."""
FROZEN_S = 2.6
"""Longer than a lease, 5 heartbeats of 0.4 s."""
FINISH_S, PATIENCE_S = 300.0, 12.0
"""A run that takes longer than FINISH_S, plus PATIENCE_S per kill, counts as stuck."""
LAST_S, ORPHANS_S = 10.0, 60.0
"""Time after the end of the learner for servers to end by themselves, and for orphans to notice that they are."""


class Chaos:
    """One run: starts everything, kills, restarts, waits for the end."""

    def __init__(self, run: Run, batches: int, kills: int, seed: int, agents: bool) -> None:
        self.run, self.batches, self.wanted, self.agents = run, batches, kills, agents
        self.random = random.Random(f"{seed}/{run.folder.name}")
        self.mark = uuid.uuid4().hex
        self.kills: Counter[str] = Counter()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ended: set[str] = set()
        self.events: queue.SimpleQueue[tuple[str, int]] = queue.SimpleQueue()
        self.pace_s = 1.0
        self.unfreezers: list[threading.Timer] = []
        self.met = 0
        """Agents whose server was killed in the middle of their episode."""
        folder = str(run.folder)
        rollout = ["tests.system.chaos_rollout", folder]
        self.commands = {
            "buffer": ["buffer", str(run.file)],
            "learner": ["tests.system.chaos_learner", folder],
            **{f"rollout-{number}": [*rollout, f"rollout-{number}"] for number in range(SERVERS)},
        }

    def go(self) -> None:
        """From the first start to the last end. Raises Finding; leaves no process behind either way."""
        limit = time.monotonic() + FINISH_S + PATIENCE_S * self.wanted
        try:
            began = time.monotonic()
            for name in self.commands:
                self.start(name)
            self.first_batch(limit)
            self.pace_s = (time.monotonic() - began) / 3  # kills leave time to start, however slow the machine is
            self.kill_at_random(limit)
            self.run.calm.touch()
            self.wait_for_end(limit)
        finally:
            for timer in self.unfreezers:
                timer.cancel()
            left = self.end()
        if left:
            raise Finding(f"orphans {ORPHANS_S:g} s after everything ended: {left}")

    def start(self, name: str) -> None:
        environment = os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", *self.commands[name]]
        with self.run.log(name).open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.processes[name] = process
        threading.Thread(target=lambda: self.events.put((name, process.wait())), daemon=True).start()

    def first_batch(self, limit: float) -> None:
        while not self.run.journal.exists():
            self.handle_exit(0.2, limit)

    def kill_at_random(self, limit: float) -> None:
        while self.kills.total() < self.wanted:
            due = time.monotonic() + self.pace_s * self.random.expovariate(1)
            while (wait_s := due - time.monotonic()) > 0 and self.progress() <= (self.kills.total() + 1) / self.wanted:
                self.handle_exit(min(wait_s, 0.2), limit)
            self.kill_some(limit)

    def progress(self) -> float:
        """Trained share of the first three quarters of the run; the last quarter follows the last kill."""
        lines = self.run.journal.read_text().splitlines()
        return len(lines) / (0.75 * self.batches)

    def wait_for_end(self, limit: float) -> None:
        while "learner" not in self.ended:
            self.handle_exit(1.0, limit)
        due = time.monotonic() + LAST_S
        while len(self.ended) < len(self.commands) - 1:
            if time.monotonic() > due:  # started too late to get a policy from the learner, which is done
                for name in self.commands.keys() - self.ended - {"buffer"}:
                    self.processes[name].terminate()
                due = limit
            self.handle_exit(0.5, limit)
        self.processes["buffer"].terminate()
        while "buffer" not in self.ended:
            self.handle_exit(1.0, limit)

    def handle_exit(self, wait_s: float, limit: float) -> None:
        """Wait for the next exit, at most `wait_s`; restart a killed process."""
        if time.monotonic() > limit:
            raise Finding(f"the run is stuck after {self.kills.total()} kills:\n{self.stats()}")
        try:
            name, code = self.events.get(timeout=wait_s)
        except queue.Empty:
            return
        if code == -signal.SIGKILL:
            self.kills[name.partition("-")[0]] += 1
            self.start(name)
        elif code == 0 or (code == -signal.SIGTERM and "learner" in self.ended):
            self.ended.add(name)
            if self.kills.total() < self.wanted:
                raise Finding(f"{name} ended after {self.kills.total()} kills: the run is too short, or lost something")
        else:
            log = self.run.log(name).read_text(errors="replace").splitlines()
            raise Finding(f"{name} ended by itself with code {code}:\n" + "\n".join(log[-20:]))

    def kill_some(self, limit: float) -> None:
        servers = [name for name in self.commands if name.startswith("rollout")]
        if self.random.random() < 0.1:
            self.freeze(self.random.choice(servers))
        targets = ["buffer", "learner", self.random.choice(servers)]
        two = self.random.random() < 0.2 and self.kills.total() + 2 <= self.wanted
        victims = self.random.sample(targets, 2 if two else 1)
        if self.agents and set(victims) & set(servers):
            busy, met = self.busiest(servers, limit)
            victims = [busy if name in servers else name for name in victims]
            self.met += met
        for name in victims:
            self.processes[name].kill()
        before = self.kills.total()
        while self.kills.total() < before + len(victims):
            self.handle_exit(10.0, time.monotonic() + 10.0)

    def busiest(self, servers: Sequence[str], limit: float) -> tuple[str, int]:
        """The server with the most agents in mid-episode, and how many, as soon as there is one: some may still be
        starting."""
        while True:
            playing = {name: len(agents_below(self.processes[name].pid)) for name in servers}
            if any(playing.values()):
                return max(playing.items(), key=lambda item: item[1])
            self.handle_exit(0.1, limit)

    def freeze(self, name: str) -> None:
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        timer = threading.Timer(FROZEN_S, process.send_signal, [signal.SIGCONT])
        self.unfreezers.append(timer)
        timer.start()

    def stats(self) -> str:
        command = [sys.executable, "-m", "actors", "status", str(self.run.file)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    def end(self) -> list[str]:
        """Kill the processes that still run; returns the command lines of descendants that outlive them."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        _, left = psutil.wait_procs(list(self.left()), timeout=ORPHANS_S)
        lines = [" ".join(process.cmdline()) for process in left]
        for process in left:
            process.kill()
        return lines

    def left(self) -> Iterator[psutil.Process]:
        """Living processes of this run."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark:
                    yield process


def agents_below(pid: int) -> list[psutil.Process]:
    """What episodes in the middle of which a server is have left behind so far (`chaos_agent.py`)."""
    found, below = [], []
    with suppress(psutil.Error):
        below = psutil.Process(pid).children(recursive=True)
    for process in below:
        with suppress(psutil.Error):
            found += [process] if process.cmdline() == DAEMON else []
    return found


def chaos(folder: Path, variant: Variant, kills: int, seed: int, spare: int = SPARE) -> tuple[Counter[str], Counts]:
    """One run in `folder` with so many `kills`, and `spare` groups more than they take. Raises Finding."""
    groups = GROUPS_PER_KILL * kills + spare
    run = Run.make(folder, variant, groups, seed)
    it = Chaos(run, groups // variant.groups, kills, seed, variant.agents)
    it.go()
    return it.kills, replace(audit(run), met=it.met)


def summary(kills: Counter[str], counts: Counts) -> str:
    """The line that is printed."""
    by = f"buffer {kills['buffer']}, servers {kills['rollout']}, learner {kills['learner']}"
    return (
        f"{kills.total()} kills ({by}), {counts.trained} groups trained in {counts.batches} batches, "
        f"{counts.replayed} repeated alike, {counts.dropped} dropped with a reason, {counts.open} open at the end of "
        f"the versions, {counts.met} agents met in mid-episode, {counts.samples} samples parsed, oldest token of age "
        f"{counts.oldest}, no orphan: audit clean"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all variants, each with its share of the kills; returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    wanted = parser.parse_args(argv)
    kills, counts, folder = Counter[str](), Counts(), Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    for number, variant in enumerate(VARIANTS):
        share = (wanted.kills + number) // len(VARIANTS)
        try:
            its, found = chaos(folder / variant.name, variant, share, wanted.seed)
        except Finding as finding:
            print(f"{variant.name}, seed {wanted.seed}: {finding}\nEverything is in {folder / variant.name}")
            return 1
        print(f"{variant.name:<12} {summary(its, found)}", flush=True)
        kills, counts = kills + its, counts.plus(found)
    print(summary(kills, counts))
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
