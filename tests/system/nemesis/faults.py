"""The kinds of faults: what each does to a run, for how long, and which processes it may end.

`KINDS` has them all. A fault strikes and heals within its function; what the run makes of it is judged by `nemesis.py`.
"""

import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import psutil

from tests.harness.toy import ROOT
from tests.system.chaos_faults import JUMP_S, jump
from tests.system.nemesis import bits
from tests.system.nemesis.run import SERVERS
from tests.system.nemesis.session import Session

SHORT_S = (3.0, 9.0)
"""How long a pause, a partition, a full disk and a limit last: longer than a lease of 2 s, and than a round's timeout
of 6 s in some."""
LONG_S = (45.0, 60.0)
"""The kernel finds dead connections within this time."""
DELAYS_S = (0.02, 0.3)
PEER_S = 4.0
SPARE_MIB = 4


class RunLost(Exception):
    """The damage was found, and the run cannot go on: the text is what it said."""


@dataclass(frozen=True)
class Kind:
    """A kind of fault. `strike` gets the run and a source of chance, and returns what was said of it, if anything.
    `ends`: roles whose processes may fail by it."""

    name: str
    strike: Callable[[Session, random.Random], str | None]
    ends: Sequence[str] = ()
    bounded: bool = False
    """Memory of the processes and size of the logs are bounded meanwhile."""
    last: bool = False
    """The run is ended after it and its ledger compared: damage may lie in what nobody reads any more."""

    @property
    def family(self) -> str:
        """All kinds of `kill`, say."""
        return "long-pause" if self.name.startswith("long-pause") else self.name.partition("-")[0]


def some(draw: random.Random, name: str) -> str:
    """`server` stands for any of them."""
    return draw.choice(SERVERS) if name == "server" else name


def kill(name: str, session: Session, draw: random.Random) -> None:
    session.process(some(draw, name)).kill()


def kill_guard(name: str, session: Session, draw: random.Random) -> None:
    """The guard of a process, with which it ends."""
    session.process(f"guard {name}").kill()


def kill_launcher(session: Session, draw: random.Random) -> None:
    """The launcher under its guard; a person launches again."""
    session.process("launcher").kill()
    assert session.launcher is not None
    session.launcher.wait(60.0)
    session.gone()
    session.launch()


def drain_launcher(session: Session, draw: random.Random) -> None:
    """SIGTERM to the launcher; a person launches again."""
    code = session.stop()
    assert code == 128 + signal.SIGTERM, f"exit code {code} after SIGTERM: {session.last_lines()}"
    session.launch()


def pause(name: str, session: Session, draw: random.Random, seconds: tuple[float, float] = SHORT_S) -> None:
    process = session.process(some(draw, name))
    process.suspend()
    time.sleep(draw.uniform(*seconds))
    with suppress(psutil.NoSuchProcess):
        process.resume()


def way(ends: str, draw: random.Random) -> str:
    """The proxy between two processes."""
    one, other = ends.split()
    return f"{some(draw, one)} {other}"


def partition(ends: str, session: Session, draw: random.Random) -> None:
    proxy = way(ends, draw)
    session.network.part(proxy)
    time.sleep(draw.uniform(*SHORT_S))
    session.network.heal(proxy)


def delay(ends: str, session: Session, draw: random.Random) -> None:
    proxy = way(ends, draw)
    session.network.delay(proxy, draw.uniform(*DELAYS_S))
    time.sleep(draw.uniform(*SHORT_S))
    session.network.heal(proxy)


def fill_disk(session: Session, draw: random.Random) -> None:
    """What is deleted meanwhile makes no room."""
    end = time.monotonic() + draw.uniform(*SHORT_S)
    while time.monotonic() < end:
        session.disk.fill()
        time.sleep(0.2)
    session.disk.free()


def turn_clock(name: str, session: Session, draw: random.Random) -> None:
    jump(session.run.clock(some(draw, name)), draw.choice((-JUMP_S, JUMP_S)))


PARTNER = {"buffer": "server", "learner": "server", "server": "learner"}
"""A process whose new start makes the other one open sockets."""


def limit_files(name: str, session: Session, draw: random.Random) -> None:
    """As many open files as there are, and one more, while a process comes back that connects."""
    process = session.process(some(draw, name))
    session.process(some(draw, PARTNER[name])).kill()
    limited(process, resource.RLIMIT_NOFILE, process.num_fds() + 1, draw)


def limit_memory(name: str, session: Session, draw: random.Random) -> None:
    """As much address space as there is, and a little more."""
    process = session.process(some(draw, name))
    limited(process, resource.RLIMIT_AS, process.memory_info().vms + (SPARE_MIB << 20), draw)


def limited(process: psutil.Process, which: int, most: int, draw: random.Random) -> None:
    """While it lasts; a process that is started again has no limit."""
    before = process.rlimit(which)
    process.rlimit(which, (most, before[1]))
    time.sleep(draw.uniform(*SHORT_S))
    with suppress(psutil.NoSuchProcess):
        process.rlimit(which, before)


def meet(who: str, wire: str, session: Session, draw: random.Random) -> str:
    """A peer that does not belong to the run, at the buffer or at the weights wire. Returns what it was answered."""
    weights = session.run.weights_wire.read_text() if wire == "weights" else ""
    address = weights or session.run.config().buffer.address
    words = [who, address, str(PEER_S), str(session.run.outer)]
    command = [sys.executable, "-m", "tests.system.nemesis.peers", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PEER_S + 60)
    assert done.returncode == 0, done.stderr
    return ", ".join(f"{times} {answer}" for answer, times in Counter(done.stdout.splitlines()).items())


def flip_stopped(file: str, session: Session, draw: random.Random) -> str:
    """While everything is killed; then a person launches again."""
    until_there_is(session, file)
    session.kill()
    flip = bits.Flip.of(bits.FILES[file](session.run), draw)
    session.launch()
    return watch(session, flip)


def flip_running(file: str, session: Session, draw: random.Random) -> str:
    """While it runs; then the processes that read the file are killed."""
    until_there_is(session, file)
    if file == "ledger":
        bits.copy_log(session.run)
    flip = bits.Flip.of(bits.FILES[file](session.run), draw)
    time.sleep(1.0)
    for name in READERS[file]:
        with suppress(psutil.NoSuchProcess):
            session.process(name).kill()
    return watch(session, flip)


READERS = {
    "ledger": ("buffer",),
    "wal": ("buffer",),
    "sums": ("buffer",),
    "commits": ("buffer",),
    "segment": ("buffer", "learner"),
    "rows": ("buffer",),
    "checkpoint": ("learner",),
    "manifest": ("learner",),
    "config": ("buffer", "learner"),
    "key": ("buffer",),
}
"""Processes that read a file of a run when they start."""
WATCH_S, MANY = 120.0, 3  # on a busy machine a refused buffer is started eight times, 5 s each, before the run ends


def until_there_is(session: Session, file: str) -> None:
    """Wait for two checkpoints where the newest is to be damaged: the run falls back to the other one."""
    if file in ("checkpoint", "manifest"):
        folder = session.run.checkpoints
        found = session.until(lambda: sum(path.suffix == "" for path in folder.glob("v*")) > 1, 120.0)
        assert found, "no two checkpoints"


def watch(session: Session, flip: bits.Flip) -> str:
    """Until some versions were trained; or until the run was refused, whereupon a person gives the bit back and
    launches again. Returns what was said. Raises RunLost if the run is refused still."""
    began, before = time.monotonic(), len(session.said())
    session.until(lambda: len(session.trained(began)) > MANY, WATCH_S)
    if session.ended is None:
        flip.undo()
        return str(flip)
    name = flip.path.name.removesuffix("-wal")
    naming = [line for line in session.said(before).splitlines() if name in line]
    assert naming, f"{flip} ended the run, which does not name the file: {session.last_lines()}"
    flip.undo()
    session.gone()
    session.launch()
    began = time.monotonic()
    if not session.until(lambda: session.trained(began), 2 * WATCH_S):
        raise RunLost(f"{flip}: {naming[0]}; the bit was given back: {session.last_lines(3)}")
    return f"{flip}: {naming[0]}"


ROLE = {"buffer": "buffer", "learner": "learner", "server": "rollout"}


def for_each(make: Callable[..., Any], family: str, names: Sequence[str], **more: Any) -> list[Kind]:
    """A kind for each of the victims."""
    return [Kind(f"{family}-{name.replace(' ', '-')}", partial(make, name), **more) for name in names]


def ending(make: Callable[..., Any], family: str) -> list[Kind]:
    """The same for faults by which their victim may end."""
    return [Kind(f"{family}-{name}", partial(make, name), (role,)) for name, role in ROLE.items()]


WAYS = ("server buffer", "learner buffer", "server weights")
PEERS = {
    "buffer": ("foreign", "half", "flood", "observer", "learner"),
    "weights": ("foreign", "half", "flood", "member"),
}
EVERY = [
    Kind("nothing", lambda session, draw: time.sleep(draw.uniform(*SHORT_S))),
    *ending(kill, "kill"),
    Kind("kill-launcher", kill_launcher, tuple(ROLE.values())),
    Kind("drain-launcher", drain_launcher),
    Kind("kill-guard", partial(kill_guard, "buffer"), ("buffer",)),
    *for_each(pause, "pause", [*ROLE, "launcher"]),
    *for_each(partial(pause, seconds=LONG_S), "long-pause", ROLE),
    *for_each(partition, "partition", WAYS),
    *for_each(delay, "delay", WAYS),
    Kind("disk", fill_disk),
    *for_each(turn_clock, "clock", [*ROLE, "launcher"]),
    *(Kind(f"files-{name}", partial(limit_files, name), (ROLE[name], ROLE[PARTNER[name]])) for name in ROLE),
    *ending(limit_memory, "memory"),
    *(
        Kind(f"peer-{who}-{wire}", partial(meet, who, wire), bounded=True)
        for wire, peers in PEERS.items()
        for who in peers
    ),
    *(
        Kind(f"flip-{file}-{when}", partial(strike, file), tuple(ROLE.values()), last=True)
        for when, strike in (("stopped", flip_stopped), ("running", flip_running))
        for file in bits.FILES
    ),
]
KINDS = {kind.name: kind for kind in EVERY}


def chosen(names: str) -> list[Kind]:
    """Kinds of a comma-separated list of names or families. Raises ValueError for a name of neither."""
    found = list[Kind]()
    for name in names.split(","):
        kinds = [kind for kind in EVERY if name in (kind.name, kind.family)]
        if not kinds:
            families = ",".join(dict.fromkeys(kind.family for kind in EVERY))
            raise ValueError(f"{name!r} is no kind of fault; choose from {families}, or from {','.join(KINDS)}")
        found += [kind for kind in kinds if kind not in found]
    return found
