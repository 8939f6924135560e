"""The overview of a run on a terminal: what the page shows, in fewer curves."""

import asyncio
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from actors.live.watcher import Watcher
from actors.watch import figures
from actors.watch.metrics_log import Records, evaluation_lines
from actors.watch.overview import SERVER_COLUMNS, WAIT_COLUMNS, Overview
from configs.plain_text import output, visible_line, visible_lines

STYLES = {"bad": "bold red", "warn": "yellow", "running": "green", "waiting": "yellow", "silent": "red", "ended": "dim"}
SERVER_SHOWN = ("server", "version", "tokens/s", "running", "waiting", "KV use", "last message")
BARS = "▁▂▃▄▅▆▇█"
CURVE = 60


async def show(watcher: Watcher) -> None:
    """Draw until cancelled; once, where the output is no terminal."""
    console = Console(file=output(), highlight=False)
    if not console.is_terminal:
        async with asyncio.TaskGroup() as tasks:  # an error of the looks ends the wait too
            following = tasks.create_task(watcher.follow())
            async with watcher.news:
                await watcher.news.wait()
            following.cancel()
        console.print(screen(watcher.overview, watcher.records))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watcher.follow())
            while True:
                live.update(screen(watcher.overview, watcher.records), refresh=True)
                async with watcher.news:
                    await watcher.news.wait()


def screen(overview: Overview, records: Records) -> Group:
    """The whole screen."""
    shown = [
        Text.assemble((visible_line(value), "bold"), (f"\n{name}", "dim")) for name, value in overview.figures.items()
    ]
    headline = Columns(shown, padding=(0, 3))
    status = Text.assemble((overview.status, STYLES[overview.status]), f"  {visible_lines(overview.summary)}")
    parts: list[RenderableType] = [status, headline, Text(f"\n{visible_line(overview.advice)}", "bold")]
    parts += [Text(f"{alert.level}: {visible_line(alert.text)}", STYLES[alert.level]) for alert in overview.alerts]
    if curve := spark(figures.in_launches(records, "reward/mean")):
        parts.append(Text(f"\nreward  {curve}", "cyan"))
    if records.evaluations:
        version = max(records.evaluations)
        parts += [
            Text(visible_line(f"version {version} on {line}"))
            for line in evaluation_lines(records.evaluations[version])
        ]
    for name, shares in overview.processes:
        said = ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in shares.items() if share >= 0.005)
        parts.append(Text.assemble((visible_line(f"{name}: "), "bold"), said))
    chosen = [SERVER_COLUMNS.index(name) for name in SERVER_SHOWN]
    servers = [tuple(row[index] for index in chosen) for row in overview.servers]
    tables = [(WAIT_COLUMNS, overview.waits), (SERVER_SHOWN, servers)]
    tables.append((("failed or dropped", "count"), [(reason, str(count)) for reason, count in overview.failures]))
    parts += [part for columns, rows in tables if rows for part in (Text(), _table(columns, rows))]
    return Group(Panel(Group(*parts), title=f"version {overview.version} of {overview.versions}", title_align="left"))


def spark(values: Sequence[float | None]) -> str:
    """`values` as CURVE characters at most, a blank where there is none. Example: `"▁▂▄ ▇█"`"""
    if sum(value is not None for value in values) < 2:
        return ""
    width = min(CURVE, len(values))
    cuts = [round(i * len(values) / width) for i in range(width + 1)]
    shares = [[value for value in values[a:b] if value is not None] for a, b in pairwise(cuts)]
    means = [fmean(share) if share else None for share in shares]
    low, high = (extreme(mean for mean in means if mean is not None) for extreme in (min, max))
    steps = (high - low or 1.0) / (len(BARS) - 1)
    return "".join(" " if mean is None else BARS[round((mean - low) / steps)] for mean in means)


def _table(columns: tuple[str, ...], rows: list[tuple[str, ...]]) -> Table:
    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=column != "why")
    for row in rows:
        table.add_row(*(Text(visible_line(cell)) for cell in row))
    return table
