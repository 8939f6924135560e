"""Figures of a run in Prometheus's text format (version 0.0.4). Pure.

`reward/mean` becomes `headrace_reward_mean`; servers, evaluation sets, teachers and reward metrics are labels.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from actors.watch.metrics_log import Records
from actors.watch.overview import Overview
from buffer.wire.protocol import State
from configs.plain_text import visible

MOST_LABEL = 300
LABELLED = {"weights": "server", "server": "server", "eval": "set", "teacher": "data_source"}


class Figure(NamedTuple):
    """One line of the answer."""

    name: str
    labels: dict[str, str]
    value: float
    kind: str = "gauge"


def exposition(records: Records, state: State | None, overview: Overview) -> str:
    """The whole answer; ends with a newline."""
    families: dict[str, list[Figure]] = {}
    for figure in figures(records, state, overview):
        family = families.setdefault(figure.name, [])
        if math.isfinite(figure.value) and all(figure.labels != other.labels for other in family):
            family.append(figure)
    lines = []
    for name, family in families.items():
        if family:
            lines.append(f"# TYPE {name} {family[0].kind}")
            lines += [f"{name}{_labels(figure.labels)} {float(figure.value)!r}" for figure in family]
    return "\n".join(lines) + "\n"


def figures(records: Records, state: State | None, overview: Overview) -> Iterator[Figure]:
    """All of them."""
    yield Figure("headrace_version", {}, overview.version)
    yield Figure("headrace_versions", {}, overview.versions)
    yield Figure("headrace_buffer_up", {}, state is not None)
    yield from (Figure("headrace_alerts", {"level": level}, _count(overview, level)) for level in ("bad", "warn"))
    for version in sorted(records.evaluations)[-1:]:
        yield from _of_record(records.evaluations[version])
    for version in sorted(records.by_version)[-1:]:
        yield from _of_record(records.by_version[version])
    if state is None:
        for time in sorted(records.servers)[-1:]:
            yield from _of_record(records.servers[time])
        return
    yield from _of_state(state)


def _of_record(record: Mapping[str, Any]) -> Iterator[Figure]:
    for key, value in record.items():
        if key in ("version", "time", "eval/version", "eval/due") or not isinstance(value, int | float):
            continue
        first, name, figure = [*key.split("/", 2), "", ""][:3]
        if figure and first == "teacher":  # a data_source may have slashes
            name, _, figure = key.partition("/")[2].rpartition("/")
        if figure and first in LABELLED:
            yield Figure(_name(first, figure), {LABELLED[first]: name}, value)
        elif first == "sample":
            yield Figure("headrace_sample", {"metric": name}, value)
        else:
            yield Figure(_name(key), {}, value)


def _of_state(state: State) -> Iterator[Figure]:
    for name, server in state.servers.items():
        own = {key: server.get(key) for key in ("version", "leases", "silent_s")} | server.get("stats", {})
        for key, value in own.items():
            if isinstance(value, int | float):
                yield Figure(_name("server", key), {"server": name}, value)
    yield from (Figure("headrace_buffer_items", {"state": name}, count) for name, count in state.counts.items())
    yield Figure("headrace_buffer_bytes", {}, state.bytes_stored)
    yield Figure("headrace_buffer_refused_total", {}, state.errors, "counter")
    for waiter in state.waiters:
        yield Figure("headrace_wait_seconds", {"who": waiter.who, "kind": waiter.kind}, waiter.seconds)
    for what, counts in (("failed", state.failed), ("dropped", state.dropped)):
        for reason, count in counts.items():
            yield Figure(f"headrace_{what}_total", {"reason": reason}, count, "counter")
    if (wanted := getattr(state, "wanted_servers", None)) is not None:
        yield Figure("headrace_servers_wanted", {}, wanted)


def _count(overview: Overview, level: str) -> int:
    return sum(alert.level == level for alert in overview.alerts)


def _name(*parts: str) -> str:
    return "headrace_" + re.sub("[^a-zA-Z0-9]+", "_", "_".join(parts)).strip("_")


def _labels(labels: Mapping[str, str]) -> str:
    if not labels:
        return ""
    escaped = (f'{key}="{_escape(value)}"' for key, value in labels.items())
    return "{" + ",".join(escaped) + "}"


def _escape(value: str) -> str:
    return visible(value, MOST_LABEL).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
