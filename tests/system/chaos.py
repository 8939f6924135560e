"""`python -m tests.system.chaos --kills 200 --seed 0`: runs that meet faults at random moments, then an audit.

The buffer is `python -m buffer` itself; servers and learner run their real loops and clients, with stand-ins for vLLM
and the model (`chaos_rollout.py`, `chaos_learner.py`). A killed process is restarted at once. A few servers are frozen
instead, for longer than their leases, and continue late. Between kills other faults are drawn (`--faults`): a process
is stopped and continued, the buffer's disk is full for a while, a wall clock jumps by an hour. A fault that silences no
server may end no lease: while buffer or learner are stopped, the disk is full or a clock jumps, no attempt is lost.

After the last fault the run continues to its own end; then `chaos_audit.py` reads the ledger. Prints one line for each
run; exit code 1 and the finding if something is wrong.
"""

import argparse
import asyncio
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
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import psutil

from actors.watch.run_state import ask
from tests.harness.toy import ROOT
from tests.system.chaos_agent import DAEMON
from tests.system.chaos_audit import LOST, Counts, Finding, audit
from tests.system.chaos_faults import JUMP_S, KINDS, Disk, chosen, clocked, jump, why_no_disk
from tests.system.chaos_run import SERVERS, VARIANTS, Run, Variant

MARK = "HEADRACE_CHAOS"
"""Environment variable of every process of a run; their children inherit it."""
GROUPS_PER_KILL, SPARE = 14, 80
"""Size of a run, so that it does not end before its last kill."""
GROUPS_PER_FAULT, KILLS_PER_FAULT = 150, 20
"""Groups that a run needs for each fault that is no kill, and how rarely each of them is drawn."""
FROZEN_S, LONGEST_S = 2.6, 60.0
"""Longer than a lease, 5 heartbeats of 0.4 s; and the longest that a process is stopped or the disk is full."""
HEARD_S, SETTLED_S = 1.0, 3.0
"""A server is well if its last message reached the buffer so long ago; all is well after more than a lease of that."""
FINISH_S, PATIENCE_S = 300.0, 12.0
"""A run that takes longer than FINISH_S, plus PATIENCE_S per kill and a minute more than its own time per other fault,
counts as stuck."""
LAST_S, ORPHANS_S = 10.0, 60.0
"""Time after the end of the learner for servers to end by themselves, and for orphans to notice that they are."""


class Chaos:
    """One run: starts everything, kills, restarts, waits for the end. `plan`: the other faults, by name of a method and
    of the process; `longest_s`: how long the first stop and the first full disk last."""

    def __init__(
        self, run: Run, batches: int, kills: int, seed: int, agents: bool, plan: Sequence[str], longest_s: float
    ) -> None:
        self.run, self.batches, self.wanted, self.agents = run, batches, kills, agents
        self.random = random.Random(f"{seed}/{run.folder.name}")
        self.draw = random.Random(f"{seed}/{run.folder.name}/faults")
        self.plan, self.planned, self.longest_s = self.draw.sample(plan, len(plan)), kills + len(plan), longest_s
        self.faults: Counter[str] = Counter()
        self.met_kinds: frozenset[str] = frozenset()
        self.disk = Disk(run.ledger.parent)
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
        others_s = (self.planned - self.wanted) * (60 + self.longest_s)
        limit = time.monotonic() + FINISH_S + PATIENCE_S * self.wanted + others_s
        with self.disk.mounted() if "fill" in self.plan else nullcontext():
            try:
                began = time.monotonic()
                for name in self.commands:
                    self.start(name)
                self.first_batch(limit)
                self.pace_s = (time.monotonic() - began) / 3  # kills leave time to start, however slow the machine is
                self.strike_at_random(limit)
                self.run.calm.touch()
                self.wait_for_end(limit)
            finally:
                for timer in self.unfreezers:
                    timer.cancel()
                left = self.end()
        if left:
            raise Finding(f"orphans {ORPHANS_S:g} s after everything ended: {left}")

    def start(self, name: str) -> None:
        environment = clocked(os.environ | {MARK: self.mark, "OMP_NUM_THREADS": "1"}, self.run.clock(name))
        command = [sys.executable, "-m", *self.commands[name]]
        with self.run.log(name).open("ab") as log:
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
        self.processes[name] = process
        threading.Thread(target=lambda: self.events.put((name, process.wait())), daemon=True).start()

    def first_batch(self, limit: float) -> None:
        while not self.run.journal.exists():
            self.handle_exit(0.2, limit)

    def strike_at_random(self, limit: float) -> None:
        while to_come := self.to_come():
            due = time.monotonic() + self.pace_s * self.random.expovariate(1)
            until = (self.planned - to_come + 1) / self.planned
            while (wait_s := due - time.monotonic()) > 0 and self.progress() <= until:
                self.handle_exit(min(wait_s, 0.2), limit)
            if self.draw.random() * to_come < len(self.plan):
                method, _, name = self.plan.pop().partition(" ")
                getattr(self, method)(name or self.draw.choice(list(self.commands)), limit)
            else:
                self.kill_some(limit)

    def to_come(self) -> int:
        """Kills and other faults that are yet to come."""
        return self.wanted - self.kills.total() + len(self.plan)

    def progress(self) -> float:
        """Trained share of the first three quarters of the run; the last quarter follows the last fault."""
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
            raise Finding(f"the run is stuck, {self.to_come()} faults before the last:\n{self.stats()}")
        try:
            name, code = self.events.get(timeout=wait_s)
        except queue.Empty:
            return
        if code == -signal.SIGKILL:
            self.kills[name.partition("-")[0]] += 1
            self.start(name)
        elif code == 0 or (code == -signal.SIGTERM and "learner" in self.ended):
            self.ended.add(name)
            if to_come := self.to_come():
                raise Finding(f"{name} ended {to_come} faults before the last: the run is too short, or lost something")
        else:
            log = self.run.log(name).read_text(errors="replace").splitlines()
            raise Finding(f"{name} ended by itself with code {code}:\n" + "\n".join(log[-20:]))

    def kill_some(self, limit: float) -> None:
        servers = [name for name in self.commands if name.startswith("rollout")]
        if self.random.random() < 0.1:
            self.freeze(self.random.choice(servers), FROZEN_S)
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

    def freeze(self, name: str, seconds: float) -> None:
        """Stop a process, and have it continued later."""
        process = self.processes[name]
        process.send_signal(signal.SIGSTOP)
        self.faults[f"{name.partition('-')[0]} stopped"] += 1
        timer = threading.Timer(seconds, process.send_signal, [signal.SIGCONT])
        self.unfreezers.append(timer)
        timer.start()

    def stop_server(self, name: str, limit: float) -> None:
        """Its leases end meanwhile, and it delivers late; kills go on."""
        self.freeze(name, self.seconds("stop"))

    def stop(self, name: str, limit: float) -> None:
        """Stop buffer or learner and continue it, with time for nothing else."""
        with self.nothing_lost(f"{name}, which was stopped and continued,", limit):
            seconds = self.seconds("stop")
            self.freeze(name, seconds)
            self.wait(seconds + 0.1, limit)

    def fill(self, name: str, limit: float) -> None:
        """Fill the disk until the buffer has met it, and for longer than a lease from then on."""
        with self.nothing_lost("the full disk", limit):
            before = self.times_full()
            while self.times_full() == before:
                self.disk.fill()  # once more: what was deleted meanwhile gives room
                self.handle_exit(0.2, limit)
            self.wait(self.seconds("disk"), limit)
            self.disk.free()
        self.faults["disk full"] += 1

    def times_full(self) -> int:
        """How often the buffer has said that it waits for its disk."""
        return self.run.log("buffer").read_text(errors="replace").count("make room on its disk")

    def turn_clock(self, name: str, limit: float) -> None:
        """The wall clock of a process, and what it starts, jumps."""
        by_s = self.draw.choice((-JUMP_S, JUMP_S))
        with self.nothing_lost(f"the clock of {name}, which jumped by {by_s} s,", limit):
            jump(self.run.clock(name), by_s)
        self.faults["clock jumped"] += 1

    def seconds(self, kind: str) -> float:
        """How long the next fault of this kind lasts: the first one of a run longest."""
        first, self.met_kinds = kind not in self.met_kinds, self.met_kinds | {kind}
        return self.longest_s if first else FROZEN_S * (self.longest_s / FROZEN_S) ** self.draw.random()

    def wait(self, seconds: float, limit: float) -> None:
        end = time.monotonic() + seconds
        while (left_s := end - time.monotonic()) > 0:
            self.handle_exit(min(left_s, 0.2), limit)

    @contextmanager
    def nothing_lost(self, fault: str, limit: float) -> Iterator[None]:
        """Raises Finding if an attempt ends in the block, or right after it, by no fault of its problem."""
        before = self.settled(limit)
        yield
        if more := self.settled(limit) - before:
            raise Finding(f"{fault} cost attempts: {dict(more)}")

    def settled(self, limit: float) -> Counter[str]:
        """Attempts of the run that were lost, by reason, once all servers were well for longer than a lease, no attempt
        was lost meanwhile, and some are under way."""
        config, lost, since, leased = self.run.config(), Counter[str](), time.monotonic(), False
        while time.monotonic() < since + SETTLED_S or not leased:
            self.handle_exit(0.2, limit)
            state = asyncio.run(ask(config))
            servers = state.servers.values() if state else ()
            leased = any(server["leases"] for server in servers)
            well = len(servers) == SERVERS and all(
                "gone_s" not in server and server["silent_s"] < HEARD_S for server in servers
            )
            failed = state.failed if state else {}
            found = Counter({why: times for why, times in failed.items() if any(known in why for known in LOST)})
            if not well or found != lost:
                lost, since = found, time.monotonic()
        return lost

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


def plan_of(faults: Collection[str], times: int) -> list[str]:
    """The faults that are no kills: each of the chosen kinds so often, of each process that it may meet."""
    plans = {
        "stop": ["stop buffer", "stop learner", "stop_server rollout-0", f"stop_server rollout-{SERVERS - 1}"],
        "disk": ["fill"],
        "clock": ["turn_clock buffer", "turn_clock"],
    }
    return [fault for kind, plan in plans.items() if kind in faults for fault in plan * times]


def chaos(
    folder: Path,
    variant: Variant,
    kills: int,
    seed: int,
    spare: int = SPARE,
    plan: Sequence[str] = (),
    longest_s: float = LONGEST_S,
) -> tuple[Counter[str], Counts]:
    """One run in `folder` with so many `kills` and the faults of `plan`, and `spare` groups more than they take. Raises
    Finding."""
    groups = GROUPS_PER_KILL * kills + GROUPS_PER_FAULT * len(plan) + spare
    run = Run.make(folder, variant, groups, seed)
    it = Chaos(run, groups // variant.groups, kills, seed, variant.agents, plan, longest_s)
    it.go()
    return it.kills, replace(audit(run), met=it.met, faults=it.faults)


def summary(kills: Counter[str], counts: Counts) -> str:
    """The line that is printed."""
    by = f"buffer {kills['buffer']}, servers {kills['rollout']}, learner {kills['learner']}"
    others = ", ".join(f"{fault} {times}" for fault, times in sorted(counts.faults.items())) or "none"
    return (
        f"{kills.total()} kills ({by}), other faults ({others}), {counts.trained} groups trained in {counts.batches} "
        f"batches, {counts.replayed} repeated alike, {counts.dropped} dropped with a reason, {counts.open} open at the "
        f"end of the versions, {counts.met} agents met in mid-episode, {counts.samples} samples parsed, oldest token "
        f"of age {counts.oldest}, no orphan: audit clean"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run all variants, each with its share of the kills; returns the exit code."""
    parser = argparse.ArgumentParser("python -m tests.system.chaos", description=__doc__)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--faults", help=f"some of {','.join(KINDS)}; all if it is not given, but disk only where it can be"
    )
    parser.add_argument("--longest", type=float, default=LONGEST_S, help="seconds that the longest stop takes")
    wanted = parser.parse_args(argv)
    try:
        faults = chosen(wanted.faults or ",".join(KINDS))
    except ValueError as error:
        parser.error(f"--faults: {error}")
    if "disk" in faults and (why := why_no_disk()):
        if wanted.faults:
            parser.error(f"--faults: disk takes a mounted disk: {why}")
        print(f"no run has a full disk: {why}", flush=True)
        faults = [fault for fault in faults if fault != "disk"]
    all_kills = wanted.kills if "kill" in faults else 0
    plan = plan_of(faults, max(1, wanted.kills // len(VARIANTS) // KILLS_PER_FAULT))
    kills, counts, folder = Counter[str](), Counts(), Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    for number, variant in enumerate(VARIANTS):
        share = (all_kills + number) // len(VARIANTS)
        try:
            its, found = chaos(folder / variant.name, variant, share, wanted.seed, plan=plan, longest_s=wanted.longest)
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
