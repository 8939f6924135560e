"""`python -m actors status RUN|CONFIG.yaml`: who waits for whom and for how long, on one screen.

Consumes the buffer's `State`, asked for over the samples wire, and the run's folder. Waits `ANSWER_S` for the buffer;
when that is dead it says so and tells what the files know. Run by hand at any time, on any machine that reaches both.
`ask` and `waits` are the display's too.
"""

import asyncio
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from actors.watch.metrics_log import Records
from buffer.curve import KeysError, client_keys_for
from buffer.wire.client import Connection, RefusedError
from buffer.wire.protocol import State, Status, Waiter
from configs.load import ConfigError, load
from configs.schema import Config

ANSWER_S = 3.0
MISSED = 5
"""Heartbeats after whose absence the buffer ends a server's leases."""


@dataclass(frozen=True)
class Wait:
    """Example: `Wait("learner", "rollout-0", "batch 7 has 20 of 32 groups", 3.2)`: the learner waits for rollout-0."""

    who: str
    whom: str
    why: str
    seconds: float


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 for a run whose buffer answers, 1 for one whose does not, 2 for bad input."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m actors status RUN|CONFIG.yaml [--section.key=value ...]", file=sys.stderr)
        return 0 if argv else 2
    try:
        config, run = find(argv)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    state = asyncio.run(ask(config, ANSWER_S))
    console = Console(highlight=False)
    show(console, config, run, state)
    return 0 if state is not None else 1


def find(argv: Sequence[str]) -> tuple[Config, Path]:
    """Config and folder of the run that `argv` names by its folder or by its config. Raises ConfigError."""
    folder = Path(argv[0])
    if not folder.is_dir():
        config = load(argv)
        return config, config.run.path
    if not (folder / "config.yaml").exists():
        raise ConfigError(
            [f"{folder}: no config.yaml in it, so it is not the folder of a run; name one, or its config"]
        )
    return load([str(folder / "config.yaml"), *argv[1:]]), folder


async def ask(config: Config, wait_s: float) -> State | None:
    """The buffer's State; None if it does not answer in time."""
    address = config.buffer.address
    try:
        keys = client_keys_for(address, config.run.path)
        async with asyncio.timeout(wait_s):
            async with Connection(address, "status", "observer", keys=keys) as client:
                answer = await client.request(Status())
    except (TimeoutError, RefusedError, KeysError):
        return None
    return answer if isinstance(answer, State) else None


def waits(state: State, config: Config) -> list[Wait]:
    """Who waits for whom; the longest first. The buffer knows what was asked of it, the rest follows from the rules.

    A learner that asks for a batch waits for the servers that hold leases. A server that asks for work waits for the
    learner: admission opens with the next batch. So does one with a group that exceeds the byte budget.
    """
    gone = silent(state, config)
    holding = [name for name, facts in state.servers.items() if facts.get("leases") and name not in gone]
    return sorted((_wait(waiter, holding) for waiter in state.waiters), key=lambda wait: -wait.seconds)


def silent(state: State, config: Config) -> list[str]:
    """Servers not heard of for so long that their leases have ended."""
    limit = MISSED * config.rollout.heartbeat_s
    return [name for name, facts in state.servers.items() if float(facts.get("silent_s", 0.0)) > limit]


def _wait(waiter: Waiter, holding: Sequence[str]) -> Wait:
    whom = (", ".join(holding) or "any rollout server") if waiter.kind == "Take" else "the learner"
    return Wait(waiter.who, whom, waiter.why, waiter.seconds)


def show(console: Console, config: Config, run: Path, state: State | None) -> None:
    """Print one screen."""
    for line in header(config, run):
        console.print(escape(line), soft_wrap=True)
    if state is None:
        console.print(
            f"[red]the buffer at {config.buffer.address} does not answer[/]; what its files know:", soft_wrap=True
        )
        for line in last_words(run):
            console.print(escape(line), soft_wrap=True)
        return
    console.print(f"buffer {config.buffer.address}: batch {state.version} is next, {state.trained + 1} trained")
    console.print("items  " + ("  ".join(f"{name} {count}" for name, count in state.counts.items()) or "none"))
    for reason, count in state.dropped.items():
        console.print(escape(f"dropped {count}: {reason}"), soft_wrap=True)
    console.print("", _waits_table(waits(state, config)), "", _servers_table(state, config), sep="\n")
    if state.errors:
        console.print(
            f"{state.errors} messages refused since the buffer started: see {run / 'logs' / 'buffer.log'}",
            soft_wrap=True,
        )


def header(config: Config, run: Path) -> Iterator[str]:
    """What the files know: versions, the last record and its age, checkpoints."""
    records = Records(run / "metrics.jsonl")
    records.read()
    found = records.ordered()
    done = found[-1]["version"] if found else 0
    yield f"run {config.run.name} in {run}: version {done} of {config.run.versions}"
    if found:
        seconds = time.time() - records.path.stat().st_mtime
        figures = [
            f"{key} {value:.4g}" for key, value in found[-1].items() if isinstance(value, float) and key in SHOWN
        ]
        yield f"last record {seconds:.0f} s ago: {', '.join(figures)}"
    checkpoints = sorted(path.name for path in (run / "checkpoints").glob("v*"))
    yield f"checkpoints: {', '.join(checkpoints) or 'none'}"


def last_words(run: Path) -> Iterator[str]:
    """The last line of each log, with its age."""
    for log in sorted((run / "logs").glob("*.log")):
        lines = log.read_bytes()[-4096:].decode(errors="replace").splitlines()
        yield f"{log.name}, {time.time() - log.stat().st_mtime:.0f} s ago: {lines[-1] if lines else 'empty'}"


def _waits_table(found: Sequence[Wait]) -> Table:
    table = Table("who waits", "for whom", "for", "why", box=None, header_style="bold")
    for wait in found:
        table.add_row(wait.who, wait.whom, f"{wait.seconds:.1f} s", escape(wait.why))
    if not found:
        table.add_row("nobody", "", "", "all are at work")
    return table


def _servers_table(state: State, config: Config) -> Table:
    table = Table("server", "version", "leases", "last word", "figures", box=None, header_style="bold")
    gone = silent(state, config)
    for name, facts in state.servers.items():
        stats = "  ".join(f"{key} {value:.4g}" for key, value in facts.get("stats", {}).items())
        heard = f"{float(facts.get('silent_s', 0.0)):.1f} s ago" + (" (leases ended)" if name in gone else "")
        table.add_row(name, str(facts.get("version", "?")), str(facts.get("leases", "?")), heard, stats)
    return table


SHOWN = ("reward/mean", "length/mean", "tokens_per_s", "age/mean", "age/max", "time/wait_s", "time/version_s")
