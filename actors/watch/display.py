"""The terminal of a launched run: one line per version, or a panel at the bottom."""

import asyncio
import contextlib
import re
import time
from collections.abc import Iterator

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from actors.process import Event, Process
from actors.watch.figures import time_left
from actors.watch.metrics_log import EVALUATED, Record, Records, evaluation_lines
from actors.watch.run_state import failures, fullness, silent, waits
from actors.watch.state_poll import StatePoll
from buffer.wire.protocol import State
from configs.plain_text import colourless, figure, output, visible, visible_line, visible_lines
from configs.schema import Config

COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
KIND_STYLES = {"started": "green", "ended": "dim"}
MOST_SHOWN = 1000
MOST_WAITS, MOST_SERVERS = 6, 4
OUR_ROUTINE = re.compile(r"^\d{4}-\d\d-\d\d [\d:,]+ (DEBUG|INFO) ")
VLLM_ROUTINE = re.compile(
    r"^\d{4}-\d\d-\d\d [\d:,]+ (INFO|WARNING) vllm|^\(\w+ pid=\d+\) (INFO|WARNING) |^\[W\d+ |^Triton is installed"
)
"""Lines for the log file only: our INFO once versions come, and vLLM's lines that are no errors."""


class Display:
    """What a person sees during the run."""

    def __init__(self, config: Config, console: Console | None = None) -> None:
        self.config = config
        self.console = console or Console(file=output(reported=False), highlight=False, soft_wrap=True)
        self.records = Records(config.run.path / "metrics.jsonl", looks=False, bounded=True)
        """Records of an earlier start are not news."""
        self.processes: dict[str, str] = {}
        self.state: State | None = None
        """None: the buffer is silent."""
        self._settled: set[str] = set()
        """Processes that have seen a version since their start."""
        self._reported_failures = 0
        self._began: float | None = None
        """When the first process started, until the first version has come."""
        self._colours: dict[str, str] = {}
        wants_panel = config.log.display == "rich" or (config.log.display == "auto" and self.console.is_terminal)
        panel = Live(console=self.console, get_renderable=self.panel, auto_refresh=False)
        self._live = panel if wants_panel else None

    @contextlib.contextmanager
    def shown(self) -> Iterator["Display"]:
        with self._live or contextlib.nullcontext():
            yield self

    def say(self, text: str) -> None:
        self._print(Text(visible_lines(text), style="bold" if self._live else ""))

    def show_event(self, process: Process, event: Event) -> None:
        name = process.name
        colour = self._colours.setdefault(name, COLOURS[len(self._colours) % len(COLOURS)])
        text = event.text
        if event.kind != "line":
            self._began = self._began if self.processes else time.monotonic()
            self.processes[name] = event.kind
            self._settled.discard(name)
            text = f"{event.kind}: {text}"
        elif self._is_routine(name, text):
            return
        for line in visible(colourless(text)).splitlines() or [""]:
            self._print(Text.assemble((f"[{name}] ", colour), line))

    def _print(self, text: Text) -> None:
        with contextlib.suppress(SystemExit):  # rich exits once the reader has left; the run goes on
            self.console.print(text)

    def _is_routine(self, name: str, line: str) -> bool:
        """Once versions come, they show that the run is well."""
        return bool(VLLM_ROUTINE.match(line) or (name in self._settled and OUR_ROUTINE.match(line)))

    async def watch(self, poll: StatePoll) -> None:
        while True:
            self.state = poll.state
            self.refresh()
            await asyncio.sleep(1.0)

    def refresh(self) -> None:
        """Failures are shown when their number has doubled."""
        fresh = self.records.read()
        if fresh:
            self._settled.update(self.processes)
        for record in fresh:
            if EVALUATED in record:
                for line in evaluation_lines(record):
                    self.say(f"version {record[EVALUATED]} evaluated on {line}")
            else:
                self._show_version(record)
        if self._live:
            self._live.refresh()
            return
        count = sum(self.state.failed.values()) + sum(self.state.dropped.values()) if self.state else 0
        if self.state and count and count >= 2 * self._reported_failures:
            self._reported_failures = count
            self.say(failures(self.state))

    def _show_version(self, record: Record) -> None:
        """The panel shows its figures."""
        if self._began is not None:
            seconds = time.monotonic() - self._began
            self.say(f"the first version of this launch came after {seconds:.0f} s")
            self._began = None
        if not self._live:
            self.say("  ".join(f"{name} {value}" for name, value in self.figures(record)))

    def figures(self, record: Record) -> list[tuple[str, str]]:
        versions = self.config.run.versions
        reward = self.records.mean("reward/mean")
        wanted = [
            ("version", f"{record['version']}/{versions}"),
            (
                "reward",
                number(record, "reward/mean", ".3f") + (f" (last 10: {figure(reward, '.3f')})" if reward else ""),
            ),
            ("length", number(record, "length/mean", ".1f")),
            ("tokens/s", number(record, "tokens_per_s", ",.0f")),
            ("age", f"{number(record, 'age/mean', '.1f')} (max {number(record, 'age/max', '.0f')})"),
            ("waited", f"{number(record, 'time/wait_s', '.1f')} of {number(record, 'time/version_s', '.1f')} s"),
            ("failed", number(record, "buffer/failed", ".0f") if record.get("buffer/failed") else ""),
            ("dropped", number(record, "buffer/dropped", ".0f") if record.get("buffer/dropped") else ""),
            ("servers", self.servers()),
            ("left", time_left(self.records, versions)),
        ]
        return [(name, value) for name, value in wanted if value and "?" not in value]

    def servers(self) -> str:
        """While the buffer is silent, a running process counts as alive."""
        running = ""
        if self.state is not None:
            heard = self.heard()
            alive, all_stats = len(heard), [self.state.servers[name].get("stats", {}) for name in heard]
            known = [stats for stats in all_stats if "places" in stats]
            totals = [sum(stats[key] for stats in known) for key in ("running", "places")]
            running = f", running {totals[0]:.0f} of {totals[1]:.0f}" if known else ""
        else:
            alive = sum(kind == "started" for name, kind in self.processes.items() if name.startswith("rollout"))
        kept = self.state.kept if self.state else None
        draining = [name for name, life in kept.servers.items() if life == "draining"] if kept else []
        alive -= sum(name in draining for name in self.heard())
        wanted = (self.state and self.state.wanted_servers) or self.config.rollout.least_servers
        return f"{alive}/{wanted} alive{f', {len(draining)} draining' * bool(draining)}{running}"

    def heard(self) -> list[str]:
        """Figures of other servers are out of date."""
        gone = silent(self.state, self.config) if self.state else []
        return [name for name in (self.state.servers if self.state else ()) if name not in gone]

    def panel(self) -> Panel:
        table = Table.grid(padding=(0, 2))
        records = self.records.ordered()
        rows = self.figures(records[-1]) if records else [("version", f"0/{self.config.run.versions}")]
        if self.state and (line := failures(self.state)):
            rows.append(("failures", line))
        if self.records.evaluations:
            version = max(self.records.evaluations)
            rows += [(f"eval {version}", line) for line in evaluation_lines(self.records.evaluations[version])]
        if self.state and self.state.evaluation:
            rows.append(("evaluation", self.state.evaluation))
        if self.state:
            full = [(name, fullness(self.state, name)) for name in self.heard()]
            rows += [row for row in full if row[1]][:MOST_SERVERS]
        rows += [("waits", line) for line in waiting(waits(self.state, self.config) if self.state else None)]
        for name, value in rows:
            table.add_row(Text(visible_line(name), style="dim"), Text(visible_line(value, MOST_SHOWN)))
        processes = Text("  ").join(
            Text(f"{name} {kind}", style=KIND_STYLES.get(kind, "red")) for name, kind in self.processes.items()
        )
        return Panel(Group(table, processes), title=self.config.run.name, title_align="left", border_style="dim")


def number(record: Record, key: str, form: str) -> str:
    """The value of `key`, or `?` where the record has none."""
    value = record.get(key)
    return figure(value, form) if isinstance(value, int | float) else "?"


def waiting(lines: list[str] | None) -> list[str]:
    """`lines` None: the buffer does not answer."""
    if lines is None:
        return ["the buffer does not answer"]
    more = [f"and {len(lines) - MOST_WAITS} more: see `python -m actors status`"] if len(lines) > MOST_WAITS else []
    return lines[:MOST_WAITS] + more or ["nobody"]
