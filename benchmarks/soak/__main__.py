"""`make soak`: how much training time is left to a run whose processes are killed, one after the other?

A run of the quickstart's model with two rollout servers, started by the launcher. After an undisturbed stretch, one
process in turn (a server, the learner, a server, the buffer) gets SIGKILL every 300 s: so often that a process would be
dead for 10 % of the time if each recovery took 30 s. Then another undisturbed stretch follows, and a Ctrl-C. It shows
the effective training time against the pace of the undisturbed stretches (`figures.py`), for each role the seconds from
the kill to full speed and where they went, and it fails if the ledger has lost anything or holds anything twice
(`audit.py`). The same on GPUs with a real model, in less than nine minutes with all starts: `python -m benchmarks.soak
--model DIR --gpus 2 --minutes 3 --every-s 60 --calm-s 40 --checkpoint-every 10`. Kills come more often there, so the
figure for one each 300 s is calculated from the training time that each kill cost.
"""

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

from benchmarks.soak import figures
from benchmarks.soak.audit import Lost, audit
from benchmarks.soak.figures import ASSUMED_S, KILL_EVERY_S, WINDOW, Death, Recovery, Span
from benchmarks.soak.observer import PROGRESS, Seen, SoakObserver, Stalled
from benchmarks.soak.soaked_run import LAUNCH, Launched, prepare, write_run
from benchmarks.weights.table import ResultRow, progress, write

DEMANDED = 0.9
START_S, RECOVERY_S = 300.0, 300.0
"""Most time to the first versions, and from a kill to the next."""
WARM_UP = 5
"""Versions before the undisturbed stretch, in which every server has delivered a group."""


def order(servers: int) -> list[str]:
    """The processes in the order in which they are killed: the learner and the buffer between the servers."""
    names = [f"rollout-{number}" for number in range(servers)]
    return [names[0], "learner", *names[1:], "buffer"]


def soak(
    servers: int, observer: SoakObserver, kills: int, every_s: float, calm_s: float
) -> tuple[list[Span], list[Death]]:
    """Calm, kills, calm; returns the undisturbed stretches and the deaths. A kill waits until the process that was
    killed before works again. Raises Stalled if the run does not go on."""
    names = order(servers)
    observer.wait(f"{WARM_UP} versions", lambda seen: len(seen.versions) >= WARM_UP, START_S)
    observer.wait("a group of each server", lambda seen: set(names) - {"learner"} <= workers(seen), START_S)
    calm, deaths = [rest(observer, calm_s)], []
    for name in itertools.islice(itertools.cycle(names), kills):
        at, pid = observer.now(), observer.pid(name)
        os.kill(pid, signal.SIGKILL)
        progress(f"killed {name}, version {observer.seen.versions[-1][1]}")
        observer.wait(f"{name} works again", recovered(Death(name, at, float("inf"))), RECOVERY_S)
        rest(observer, at + every_s - observer.now())
        deaths.append(Death(name, at, observer.now()))
    calm.append(rest(observer, calm_s))
    return calm, deaths


def rest(observer: SoakObserver, seconds: float) -> Span:
    """Let the run be for so long, and for WINDOW versions at least. Raises Stalled if it ends."""
    begin = observer.now()
    trained = len(observer.seen.versions)
    observer.wait(
        f"{WINDOW + 1} versions",
        lambda seen: observer.now() >= begin + seconds and len(seen.versions) > trained + WINDOW,
        max(seconds, 0.0) + RECOVERY_S,
    )
    return Span(begin, observer.now())


def workers(seen: Seen) -> set[str]:
    """Processes that made progress since they were started."""
    return {sight.who for sight in seen.sights if sight.text == PROGRESS}


def recovered(death: Death) -> Callable[[Seen], bool]:
    """Whether the process that died does its work again."""
    return lambda seen: len(figures.marks(seen, death)) == len(figures.MARKS[death.role])


def rows_of(seen: Seen, calm: Sequence[Span], deaths: Sequence[Death]) -> list[ResultRow]:
    """The table without what the audit has counted."""
    pace, slowest_s = figures.pace_of(seen, calm), figures.slowest(seen, calm)
    found = [figures.recovery(seen, death, pace, slowest_s) for death in deaths]
    under_kills = Span(deaths[0].at, deaths[-1].until)
    every_s = (under_kills.end - under_kills.begin) / len(deaths)
    calculated = figures.expected(found, KILL_EVERY_S)
    rows = [
        ResultRow("effective training time under kills", figures.effective(seen, under_kills, pace), "",
                  f"demanded at a kill per {KILL_EVERY_S:g} s", DEMANDED),
        ResultRow(f"  calculated for a kill per {KILL_EVERY_S:g} s", calculated, "", "demanded", DEMANDED),
        ResultRow("  share of time at undisturbed pace", figures.at_pace(seen, under_kills, slowest_s), ""),
        ResultRow("kills", len(deaths), "", "seconds a kill", every_s),
        ResultRow("undisturbed versions a minute", 60 * pace, "1/min", "second undisturbed stretch alone",
                  60 * figures.pace_of(seen, calm[1:])),
        ResultRow("versions repeated after a kill of the learner", len(seen.repeated), ""),
    ]  # fmt: skip
    for role in figures.MARKS:
        rows += role_rows(role, [one for one in found if one.death.role == role])
    return rows


def role_rows(role: str, found: Sequence[Recovery]) -> list[ResultRow]:
    """Seconds of the recoveries of one role: medians, and the worst one to full speed."""
    if not found:
        return []
    full = [one.full_speed if one.full_speed is not None else float("inf") for one in found]
    rows = [
        ResultRow("kill to full speed", median(full), "s", "assumed by the schedule", ASSUMED_S, role),
        ResultRow("  worst", max(full), "s", "kills", len(found), role),
        ResultRow("  longest time without a new version", median(one.pause for one in found), "s", case=role),
        ResultRow("  training time lost", median(one.lost for one in found), "s", case=role),
    ]
    for phase, _, _ in figures.MARKS[role]:
        if seconds := [one.phases[phase] for one in found if phase in one.phases]:
            rows.append(ResultRow(f"    {phase}", median(seconds), "s", case=role))
    return rows


def measure(args: argparse.Namespace, file: Path) -> list[ResultRow]:
    """Run, kill, end, judge, audit. A run that fails has a row that says why, whatever else is known of it."""
    rows: list[ResultRow] = []
    kills = max(1, round(60 * args.minutes / args.every_s))
    with Launched(file, args.launch) as launched, SoakObserver(launched.config.run.path, launched.alive) as observer:
        progress(f"{kills} kills; the run is in {launched.config.run.path}, its terminal in {launched.terminal}")
        try:
            calm, deaths = soak(launched.config.rollout.least_servers, observer, kills, args.every_s, args.calm_s)
            spans = {"calm": [asdict(one) for one in calm], "deaths": [asdict(one) for one in deaths]}
            file.with_suffix(".seen.json").write_text(json.dumps(asdict(observer.seen) | spans))
            rows += rows_of(observer.seen, calm, deaths)
            if (code := launched.end()) != 128 + signal.SIGINT:
                raise Stalled(f"the launcher ended with {code}")
            for name, number in audit(launched.config).items():
                what = "groups left open at the end" if name == "open" else f"{name} trained, each once"
                rows.append(ResultRow(what, number, "", case="audit"))
            rows.append(ResultRow("lost or done twice", 0.0, "", case="audit"))
        except (Stalled, Lost, ValueError, subprocess.TimeoutExpired) as error:
            progress(launched.last_lines())
            rows.append(ResultRow("FAILED", 0.0, "", f"{type(error).__name__}: {error}"))
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="under kills")
    parser.add_argument("--every-s", type=float, default=KILL_EVERY_S, help="seconds between two kills")
    parser.add_argument("--calm-s", type=float, default=120.0, help="of each of the two undisturbed stretches")
    parser.add_argument("--model", type=Path, help="folder of a model, such as SmolLM2-135M-Instruct; else the toy")
    parser.add_argument("--gpus", type=int, default=0, help="one for the learner, one for each server; 0: CPU")
    parser.add_argument("--servers", type=int, default=2, help="on CPU")
    parser.add_argument("--checkpoint-every", type=int, default=5, help="versions between two checkpoints")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-soak"))
    parser.add_argument("--run-file", type=Path, help="soak this run instead of the benchmark's own")
    parser.add_argument(
        "--launch", nargs=argparse.REMAINDER, default=LAUNCH, help="the rest of the line: what keeps the run"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "soak.json")
    args = parser.parse_args()
    if args.gpus == 1 or (args.gpus and args.model is None):
        parser.error("--gpus: two at least, one of them for the learner; and name a --model for them")
    work, file = args.work.resolve(), args.run_file
    work.mkdir(parents=True, exist_ok=True)
    if file is None:
        data, model = prepare(work, args.model)
        servers = args.gpus - 1 if args.gpus else args.servers
        file = write_run(work, data, model, args.model is None, servers, args.checkpoint_every)
    rows = measure(args, file)
    write(args.out, "soak", [row.line() for row in rows])
    return 1 if any(row.what == "FAILED" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
