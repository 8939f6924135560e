"""What a person sees of a run in the terminal: one line a version, or on a terminal a panel that stays at the bottom.

Consumes the run's records (`metrics.jsonl`), the buffer's `State` and the keepers' events; starts and stops nothing.
`watch` looks for records and asks the buffer once a second, at the pace of eyes. Built by `actors/supervise/launch.py`.
"""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator, Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from actors.supervise.keeper import Event, Process
from actors.watch.metrics_log import Record, Records
from actors.watch.status import Wait, silent, waits
from buffer.curve import KeysError, client_keys_for
from buffer.wire.client import Connection, RefusedError
from buffer.wire.protocol import State, Status
from configs.schema import Config

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
MOST_WAITS = 6
"""Waits that the panel has room for."""
OURS = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (DEBUG|INFO) ")
THEIRS = re.compile(
    r"^\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING) vllm|^\(\w+ pid=\d+\) (INFO|WARNING) |^\[W\d+ |^Triton is installed"
)
"""Log lines for the file alone: of ours what is well, once versions come; of vLLM's what is no error."""
FRESH_S = 5.0
"""A buffer that has not answered for so long is shown as silent."""


class Display:
    """A context manager around the run. `console` None: the terminal."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.records = Records(config.run.path / "metrics.jsonl")
        self.records.read()  # what an earlier start of the run wrote is no news
        self.alive: dict[str, str] = {}
        self._state: tuple[State | None, float] = (None, 0.0)
        self._left = TimeLeft(config.run.versions)
        self._colours: dict[str, str] = {}
        wanted = config.log.display
        self._live: Live | None = None
        if wanted == "rich" or (wanted == "auto" and self.console.is_terminal):
            self._live = Live(console=self.console, get_renderable=self.panel, auto_refresh=False)

    @contextlib.contextmanager
    def shown(self) -> Iterator["Display"]:
        """Keep the panel at the bottom of the terminal, if there is one to keep."""
        with self._live or contextlib.nullcontext():
            yield self

    def say(self, text: str) -> None:
        """A word of the launcher itself."""
        self.console.print(Text(text, style="bold" if self._live else ""))

    def tell(self, process: Process, event: Event) -> None:
        """A line a process printed, or what became of it."""
        name = process.name
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        if event.kind != "line":
            self.alive[name] = event.kind
        words = event.text if event.kind == "line" else f"{event.kind}: {event.text}"
        for line in words.splitlines() or [""]:
            if event.kind == "line" and self.routine(line):
                continue
            self.console.print(Text.assemble((f"[{name}] ", colour), Text.from_ansi(line)))

    def routine(self, line: str) -> bool:
        """A line that stands in the process's log and need not be seen here: versions tell that all is well."""
        return bool(THEIRS.match(line) or (self.records.by_version and OURS.match(line)))

    async def watch(self) -> None:
        """Show news until cancelled."""
        asking = asyncio.create_task(self._ask())
        try:
            while True:
                self.refresh()
                await asyncio.sleep(1.0)
        finally:
            asking.cancel()

    async def _ask(self) -> None:
        """Keep `state` fresh. A buffer that refuses an observer or has no keys for it is shown as silent."""
        address = self.config.buffer.address
        with contextlib.suppress(RefusedError, KeysError):
            keys = client_keys_for(address, self.config.run.path)
            async with Connection(address, "display", "observer", keys=keys) as client:
                while True:
                    self._state = await client.expect(Status(), State), time.monotonic()
                    await asyncio.sleep(1.0)

    @property
    def state(self) -> State | None:
        """What the buffer said last, if that was lately."""
        state, when = self._state
        return state if time.monotonic() - when < FRESH_S else None

    def refresh(self) -> None:
        """Show the records that came."""
        for record in self.records.read():
            self._left.seen(record, time.monotonic())
            if not self._live:
                self.say("  ".join(f"{name} {value}" for name, value in self.figures(record)))
        if self._live:
            self._live.refresh()

    def figures(self, record: Record) -> list[tuple[str, str]]:
        """Name and value of what `record` and the processes say, for a line or a panel."""
        versions = self.config.run.versions
        reward = self.records.mean("reward/mean")
        wanted = [
            ("version", f"{record['version']}/{versions}"),
            ("reward", number(record, "reward/mean", ".3f") + (f" (last 10: {reward:.3f})" if reward else "")),
            ("length", number(record, "length/mean", ".1f")),
            ("tokens/s", number(record, "tokens_per_s", ",.0f")),
            ("age", f"{number(record, 'age/mean', '.1f')} (max {number(record, 'age/max', '.0f')})"),
            ("waited", f"{number(record, 'time/wait_s', '.1f')} of {number(record, 'time/version_s', '.1f')} s"),
            ("servers", self.servers()),
            ("left", self._left.text(record["version"])),
        ]
        return [(name, value) for name, value in wanted if value and "?" not in value]

    def servers(self) -> str:
        """Servers that the buffer hears, of those wanted; of the keepers' when the buffer is silent."""
        wanted = self.config.rollout.servers
        if self.state is not None:
            heard = len(self.state.servers) - len(silent(self.state, self.config))
        else:
            heard = sum(what == "started" for name, what in self.alive.items() if name.startswith("rollout"))
        return f"{heard}/{wanted} alive"

    def panel(self) -> Panel:
        """The panel of a terminal."""
        table = Table.grid(padding=(0, 2))
        records = self.records.ordered()
        for name, value in self.figures(records[-1]) if records else [("version", f"0/{self.config.run.versions}")]:
            table.add_row(Text(name, style="dim"), value)
        for line in waiting(waits(self.state, self.config) if self.state else None):
            table.add_row(Text("waits", style="dim"), escape(line))
        processes = Text("  ").join(Text(f"{name} {what}", style=_style(what)) for name, what in self.alive.items())
        return Panel(Group(table, processes), title=self.config.run.name, title_align="left", border_style="dim")


class TimeLeft:
    """Time to the last version, at the pace of the last records seen."""

    def __init__(self, versions: int, window: int = 20) -> None:
        self.versions, self.window = versions, window
        self._seen: list[tuple[float, int]] = []

    def seen(self, record: Record, now: float) -> None:
        """`record` came at `now`."""
        self._seen = [*self._seen[-self.window :], (now, record["version"])]

    def text(self, version: int) -> str:
        """`h:mm:ss`, or nothing as long as there is no pace."""
        if len(self._seen) < 2 or self._seen[-1][1] <= self._seen[0][1]:
            return ""
        (since, first), (until, last) = self._seen[0], self._seen[-1]
        seconds = round((until - since) / (last - first) * max(0, self.versions - version))
        return f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}"


def number(record: Record, key: str, form: str) -> str:
    """The value of `key`, or `?` where the record has none."""
    value = record.get(key)
    return format(value, form) if isinstance(value, int | float) else "?"


def waiting(found: Sequence[Wait] | None) -> list[str]:
    """Who waits for whom, a line each; the longest first."""
    if found is None:
        return ["the buffer does not answer"]
    lines = [f"{wait.who} for {wait.whom}, {wait.seconds:.1f} s: {wait.why}" for wait in found[:MOST_WAITS]]
    more = [f"and {len(found) - MOST_WAITS} more: see `python -m actors status`"] if len(found) > MOST_WAITS else []
    return lines + more or ["nobody"]


def _style(what: str) -> str:
    return {"started": "green", "ended": "dim"}.get(what, "red")
