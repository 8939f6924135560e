"""A run at a glance, for page, screen and report. Pure; whoever shows the texts escapes them."""

from dataclasses import dataclass, field
from datetime import timedelta
from statistics import fmean
from typing import Any

from actors.watch import figures, tuning
from actors.watch.advice import Alert, find_alerts, recommend, situation
from actors.watch.metrics_log import Record, Records
from actors.watch.run_state import all_absent, fullness, silent, waiting_rows, working
from buffer.wire.protocol import State
from configs.plain_text import figure
from configs.schema import Config

MOST_ROWS = 40
GO_ON = "python -m actors launch"
UNKNOWN = "–"
SERVER_COLUMNS = (
    *("server", "version", "leases", "tokens/s", "running", "places", "waiting", "KV use", "preempted", "parked"),
    *("last message", "why not more"),
)
WAIT_COLUMNS = ("who", "for whom", "since", "why")


@dataclass(frozen=True)
class Overview:
    """The most important figures of a run, in a few lines."""

    status: str
    """`running`, `silent` (nobody answers, and not ended), `ended`, or `waiting` (no record yet)."""
    summary: str
    version: int
    versions: int
    figures: dict[str, str]
    advice: str
    alerts: list[Alert] = field(default_factory=list)
    waits: list[tuple[str, ...]] = field(default_factory=list)
    """Rows of WAIT_COLUMNS."""
    servers: list[tuple[str, ...]] = field(default_factory=list)
    """Rows of SERVER_COLUMNS."""
    processes: list[tuple[str, dict[str, float]]] = field(default_factory=list)
    """Shares of phases and places."""
    failures: list[tuple[str, int]] = field(default_factory=list)
    """By reason, the most frequent first."""


def look_over(
    config: Config,
    records: Records,
    state: State | None,
    now: float,
    ended: str = "",
    answers: bool = False,
    launched: float = 0.0,
) -> Overview:
    """The run at `now` (Unix time).

    `answers`: the buffer answers, or a process of this machine fine-tunes the run. `launched`: Unix time of the last
    launch, 0 if unknown.
    """
    waits = waiting_rows(state, config) if state and answers else []
    first = f"{waits[0].who} waits for {waits[0].whom} ({waits[0].why})" if waits else ""
    if state and answers and not waits:
        first = all_absent(state, config)
    since_s = figures.seconds_since(records, now)
    live = answers and not ended
    starting = live and since_s is not None and now - launched < since_s
    status = "ended" if ended else "silent" if not answers else "running" if records.by_version else "waiting"
    advice = recommend(situation(config, records, state, first, bool(ended), starting))
    stalled_s = figures.seconds_stalled(records, now, launched, config.log.servers_every_s)
    alerts = find_alerts(config, records, state, stalled_s, live)
    if status == "silent" and records.by_version:  # the records are out of date
        again = f"{GO_ON} {config.run.path / 'config.yaml'}"
        advice = f"No process of the run answers. If the launcher is gone too, go on with: {again}."
        alerts = [Alert("bad", f"{_summary(status, since_s)}; see logs/buffer.log"), *alerts]
    summary = _summary(status, since_s)
    if starting:
        summary = f"launched {timedelta(seconds=round(now - launched))} ago; {summary}"
    if tuning.is_tuned(config):
        advice = tuning.go_on(config) if status == "silent" else tuning.advice(records)
        alerts = [alert for alert in alerts if status != "silent" or "buffer" not in alert.text]
        summary = tuning.go_on(config).partition(".")[0] if status == "silent" else summary
    return Overview(
        status=status,
        summary=ended or summary,
        version=max(records.by_version, default=0),
        versions=config.run.versions,
        figures=_headline(config, records, state if answers else None, answers),
        advice=advice,
        alerts=alerts,
        waits=[(row.who, row.whom, f"{row.seconds:.1f} s", row.why) for row in waits[:MOST_ROWS]],
        servers=_server_rows(config, state)[:MOST_ROWS] if state else [],
        processes=_processes(records, state if answers else None),
        failures=_failures(state),
    )


def _summary(status: str, since_s: float | None) -> str:
    ago = "no version yet" if since_s is None else f"last version {timedelta(seconds=round(since_s))} ago"
    return f"the buffer does not answer; {ago}" if status == "silent" else ago


def _headline(config: Config, records: Records, state: State | None, live: bool) -> dict[str, str]:
    recent, versions = figures.recent(records), config.run.versions
    last = records.by_version[max(records.by_version)] if records.by_version else {}
    ages = [float(one["age/mean"]) for one in recent if "age/mean" in one]
    looks = [look for _, look in sorted(records.servers.items())]
    now, before = figures.rewards(records)
    rewards = len(records.column("reward/mean")[1])
    shares, speed = figures.phase_shares(recent), figures.tokens_per_s(recent)
    shown = {
        "version": f"{max(records.by_version, default=0)} / {versions}",
        f"reward, last {min(rewards, figures.LAST)}": _number(now, ".3f"),
        f"{min(rewards - figures.LAST, figures.LAST)} before": _number(before, ".3f"),
        "loss": _number(last.get("loss"), ".3f") if tuning.is_tuned(config) else UNKNOWN,
        "epoch": _number(last.get("epoch"), ".2f"),
        "learner waits": f"{100 * shares['wait']:.0f} %" if shares and not tuning.is_tuned(config) else UNKNOWN,
        "tokens/s": _number(speed, ",.0f"),
        "age, mean": _number(fmean(ages) if ages else None, ".1f"),
        "servers": _servers(config, state) if state is not None and not tuning.is_tuned(config) else UNKNOWN,
        "time left": figures.time_left(records, versions) or UNKNOWN,
    }
    if state is None and not (live and tuning.is_tuned(config)):
        del shown["time left"]
    return {name: value for name, value in (shown | _cost(config, records, looks)).items() if value != UNKNOWN}


def _servers(config: Config, state: State) -> str:
    able = len(working(state, config))
    wanted = config.rollout.servers if state.wanted_servers is None else state.wanted_servers
    return f"{able} / {wanted}" if isinstance(wanted, int) else str(able)


def _cost(config: Config, records: Records, looks: list[Record]) -> dict[str, str]:
    hours = figures.gpu_hours(records.servers)
    if hours is None:
        return {}
    shown, price = {"GPU hours": f"{hours:,.1f}"}, config.log.price_per_gpu_hour
    if price is not None:
        left_s = figures.seconds_left(records, config.run.versions)
        in_all = hours + (left_s or 0.0) / 3600 * looks[-1].get("gpus", 0)
        shown["cost"] = f"{price * hours:,.2f}"
        shown["cost at the end"] = f"{price * in_all:,.2f}"
    return shown


def _server_rows(config: Config, state: State) -> list[tuple[str, ...]]:
    gone, rows = silent(state, config), []
    for name, server in state.servers.items():
        stats, silent_s = server.get("stats", {}), server.get("silent_s")
        stats = {} if name in gone else stats  # its last figures are out of date
        lost = " (lost)" if name in gone and (server.get("version") is not None or "gone_s" in server) else ""
        shown = [
            _number(stats.get("tokens_per_s"), ",.0f"),
            _number(stats.get("running"), ".0f"),
            _number(stats.get("places"), ".0f"),
            _number(stats.get("waiting"), ".0f"),
            _number(100 * stats["kv_usage"] if "kv_usage" in stats else None, ".0f", " %"),
            _number(stats.get("preempted"), ".0f"),
            _number(stats.get("parked"), ".0f"),
        ]
        heard = UNKNOWN if silent_s is None else f"{silent_s:.1f} s ago{lost}"
        why = "" if name in gone else fullness(state, name).partition(": ")[2]
        version, leases = server.get("version"), server.get("leases")
        rows.append((name, UNKNOWN if version is None else str(version), _number(leases, ".0f"), *shown, heard, why))
    return rows


def _processes(records: Records, state: State | None) -> list[tuple[str, dict[str, float]]]:
    found = []
    if shares := figures.phase_shares(figures.recent(records)):
        found.append(("learner", shares))
    looks = [figures.stats_of(look) for _, look in sorted(records.servers.items())[-figures.LAST :]]
    if state is not None:
        looks.append({name: server.get("stats", {}) for name, server in state.servers.items()})
    names = sorted({name for look in looks[-1:] for name in look})
    for name in names[:MOST_ROWS]:
        if places := figures.place_shares([look[name] for look in looks if name in look]):
            found.append((name, places))
    return found


def _failures(state: State | None) -> list[tuple[str, int]]:
    if state is None:
        return []
    counts = [*state.failed.items(), *((f"dropped: {reason}", count) for reason, count in state.dropped.items())]
    counts += [(f"row left out: {line}", 1) for line in state.left_out]
    return sorted(counts, key=lambda pair: -pair[1])[:MOST_ROWS]


def _number(value: Any, form: str, unit: str = "") -> str:
    return f"{figure(value, form)}{unit}" if isinstance(value, int | float) else UNKNOWN
