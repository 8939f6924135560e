"""Figures derived from a run's records: shares of time, speed, time left, GPU hours. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise, takewhile
from statistics import fmean, median
from typing import Any

from actors.watch.metrics_log import FULL_LOOKS, Looks, Record, Records

BEGINNING_S = 5.0
"""After so much more time than a version took, the learner began in between."""
LAST = FULL_LOOKS
OUTAGE = 10.0
"""Times the usual length from which on a version counts as an outage."""
MISSED_LOOKS = 4
"""A live learner does not miss so many in a row."""
PHASES = ("wait", "train", "publish", "checkpoint")
"""The rest of a version's time is `rest`."""

WITHOUT_EFFECT = {
    "gradient/skipped": "were skipped, because the gradient was not finite",
    "gradient/zero": "had a gradient of zero",
}


def recent(records: Records, number: int = LAST) -> list[Record]:
    """The last versions, without those whose time includes a start or an outage, if there are others."""
    ordered = records.ordered()
    steady = [now for before, now in pairwise(ordered) if not began_between(before, now)][-number:]
    times = [float(one["time/version_s"]) for one in steady if "time/version_s" in one]
    longest_s = max(BEGINNING_S, OUTAGE * median(times)) if times else math.inf
    return [one for one in steady if float(one.get("time/version_s", 0.0)) <= longest_s] or ordered[-1:]


def began_between(before: Record, now: Record) -> bool:
    """Whether the learner was started between two versions. False without times."""
    if "time" not in before or "time" not in now or "time/version_s" not in now:
        return False
    took_s = float(now["time/version_s"]) * int(now["version"] - before["version"])
    return float(now["time"]) - float(before["time"]) > 1.2 * took_s + BEGINNING_S


def in_launches(records: Records, key: str) -> list[float | None]:
    """None where a version has no value, and before each start of the learner."""
    ordered, found = records.ordered(), list[float | None]()
    for before, now in zip([None, *ordered], ordered, strict=False):
        found += [None] if before is not None and began_between(before, now) else []
        value = now.get(key)
        found.append(float(value) if isinstance(value, int | float) and math.isfinite(value) else None)
    return found


def pace_s(records: Records) -> float | None:
    """Seconds that one of the last versions took in the mean; None without a record of it."""
    values = [float(one["time/version_s"]) for one in recent(records) if "time/version_s" in one]
    return fmean(values) if values else None


def phase_shares(versions: Sequence[Record]) -> dict[str, float]:
    """Shares of time of PHASES and `rest`."""
    total_s = sum(float(record.get("time/version_s", 0.0)) for record in versions)
    if total_s <= 0:
        return {}
    spent = {name: sum(float(one.get(f"time/{name}_s", 0.0)) for one in versions) / total_s for name in PHASES}
    return spent | {"rest": max(0.0, 1.0 - sum(spent.values()))}


def place_shares(looks: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Mean use of a server's places. `free`: no work was admitted. Example: `{"generating": 0.8, "free": 0.2}`"""
    sums: dict[str, float] = {}
    places = 0.0
    for stats in looks:
        if not stats.get("places"):
            continue
        places += stats["places"]
        taken = min(stats.get("places_taken", stats.get("running", 0.0)), stats["places"])
        parts = {"generating": stats.get("running", 0.0), "queued": stats.get("waiting", 0.0)}
        parts |= {"in task": stats.get("task", 0.0)}
        busy = sum(parts.values())  # means over a heartbeat, while `taken` is of one moment
        parts |= {"moving": max(0.0, taken - busy), "free": max(0.0, stats["places"] - max(taken, busy))}
        for name, count in parts.items():
            sums[name] = sums.get(name, 0.0) + count
    return {name: min(1.0, count / places) for name, count in sums.items()} if places else {}


def parked_share(looks: Iterable[Mapping[str, Any]]) -> float | None:
    """Share of slots without work because admission is closed."""
    slots = parked = 0.0
    for stats in looks:
        if "slots" in stats:
            slots, parked = slots + stats["slots"], parked + stats.get("parked", 0.0)
        elif stats.get("places"):  # a server that has just started has free places, and none is parked
            slots += stats["places"]
            parked += stats.get("parked", max(0.0, stats["places"] - stats.get("places_taken", 0.0)))
    return parked / slots if slots else None


def without_effect(records: Records) -> list[str]:
    """Describe the steps that changed nothing, one line for each cause."""
    lines, ordered = [], records.ordered()
    for key, what in WITHOUT_EFFECT.items():
        versions = [int(one["version"]) for one in ordered if one.get(key)]
        if not versions:
            continue
        row = in_row(records, key)
        lately = f"the last {row} in a row" if row > 1 else f"the last one to version {versions[-1]}"
        lines.append(f"{len(versions)} of {len(ordered)} steps {what}, {lately}; logs/learner.log has the cause")
    return lines


def in_row(records: Records, key: str) -> int:
    """Number of the last consecutive versions with `key`."""
    return sum(1 for _ in takewhile(lambda one: bool(one.get(key)), reversed(records.ordered())))


def rewards(records: Records, number: int = LAST) -> tuple[float | None, float | None]:
    """Mean reward of the last versions, and of as many before them."""
    values = records.column("reward/mean")[1]
    now, before = values[-number:], values[-2 * number : -number]
    return (fmean(now) if now else None), (fmean(before) if before else None)


def tokens_per_s(versions: Sequence[Record]) -> float | None:
    """Tokens trained per second of all time."""
    timed = [one for one in versions if "tokens" in one and one.get("time/version_s")]
    seconds = sum(one["time/version_s"] for one in timed)
    return sum(one["tokens"] for one in timed) / seconds if seconds else None


def seconds_since(records: Records, now: float) -> float | None:
    """Records of an earlier release have no time."""
    if not records.by_version:
        return None
    written = records.by_version[max(records.by_version)].get("time")
    return max(0.0, now - (written if written is not None else records.path.stat().st_mtime))


def seconds_stalled(records: Records, now: float, launched: float, every_s: float) -> float | None:
    """Seconds since the last version, or since the learner was started again.

    The learner looks at the servers each `every_s` from its start on, so a longer pause means a new start.
    """
    since_s = seconds_since(records, now)
    if since_s is None:
        return None
    times = sorted(records.servers)[-FULL_LOOKS:]
    starts = [later for earlier, later in pairwise(times) if later - earlier > MISSED_LOOKS * every_s]
    return max(0.0, min(since_s, now - max([launched, *starts])))


def seconds_left(records: Records, versions: int) -> float | None:
    """To the last version, at the pace of the last ones; None without a record of it."""
    each_s = pace_s(records)
    return None if each_s is None else each_s * max(0, versions - max(records.by_version))


def time_left(records: Records, versions: int) -> str:
    """`seconds_left` as `h:mm:ss`; nothing without a record of it."""
    seconds = seconds_left(records, versions)
    return "" if seconds is None else str(timedelta(seconds=round(seconds)))


def gpu_hours(looks: Looks) -> float | None:
    """GPU hours that the run has taken; None without GPUs."""
    return looks.gpu_s / 3600 if any(look.get("gpus") for look in looks.values()) else None


def stats_of(look: Record) -> dict[str, dict[str, float]]:
    """Example: `{"rollout-0": {"running": 12.0, "places": 64.0}}`"""
    found: dict[str, dict[str, float]] = {}
    for key, value in look.items():
        first, server, figure = [*key.split("/", 2), "", ""][:3]
        if first == "server" and figure:
            found.setdefault(server, {})[figure] = value
    return found
