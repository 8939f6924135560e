"""One recommendation about a run in words, and alerts with remedies. Pure.

The recommendation is the first rule that applies. Rules on a pointless run come before rules on a slow one.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any, NamedTuple

from actors.watch import figures
from actors.watch.metrics_log import Records
from actors.watch.run_state import failures, servers_lines, silent, working
from buffer.wire.protocol import State
from configs.flow.alerts import TAUGHT
from configs.flow.alerts import alerts as metric_alerts
from configs.schema import Config

WORDS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
FEW_VERSIONS = 5
"""With fewer versions nothing is said about learning or waiting."""
WAITS, CLOSED, IDLE = 0.15, 0.05, 0.30
"""Shares: of waiting that matters; of parked places below which servers are scarce, and above which there are too many.
"""
SPARE = 1.15
"""Servers to keep, as a multiple of those with work."""
FEW_FAIL, MOST_FAIL = 0.05, 0.5
"""Shares of failed attempts: above the first there is an alert, above the second no other advice."""
TRACEBACKS = "logs/rollout-*.log have the first traceback of each kind"
SKIPPED = "gradient/skipped"
"""This alert means that something is broken."""
MOST_FLAT = 0.8
"""Share of filtered groups above which there is no other advice."""
STALLED = 10.0
"""A run stalls after so many times the usual length of a version, at least STALLED_S."""
STALLED_S = 120.0
START_S = 180.0
"""vLLM takes a minute or two to start, and is silent meanwhile."""


class Alert(NamedTuple):
    """Example: `Alert("warn", "length/truncated is 0.4: answers are truncated; raise sampling.max_tokens, ...")`."""

    level: str
    """`bad`: something is broken; `warn`: something could be better."""
    text: str


@dataclass(frozen=True)
class Situation:
    """Inputs of the recommendation; None where unknown."""

    versions: int
    waits: float = 0.0
    """Share of time in which the learner waited."""
    checkpoints: float = 0.0
    parked: float | None = None
    """Share of slots without work because admission is closed."""
    servers: int = 1
    wanted: int | None = None
    none_solved: float = 0.0
    all_solved: float = 0.0
    """Shares of groups; 0 where a teacher teaches these too."""
    gradient: float | None = None
    """Largest recent norm."""
    gain: float | None = None
    """Rise of the reward."""
    flat: float = 0.0
    """Share of groups without variance since the last batch."""
    failed: float = 0.0
    why_failed: str = ""
    waiting: str = ""
    max_staleness: int = 1
    over: bool = False
    """The run has ended by itself."""
    starting: bool = False
    """It was launched again, and no version has come since."""


def situation(
    config: Config,
    records: Records,
    state: State | None,
    waiting: str = "",
    over: bool = False,
    starting: bool = False,
) -> Situation:
    """Return the situation of the run, the last one if it is over."""
    recent = figures.recent(records)

    def mean(key: str) -> float | None:
        values = [float(one[key]) for one in recent if key in one]
        return fmean(values) if values else None

    shares = figures.phase_shares(recent)
    looks = [figures.stats_of(look) for _, look in sorted(records.servers.items())[-figures.LAST :]]
    stats = [one for look in looks for one in look.values()]
    now, before = figures.rewards(records)
    taught = bool(mean(TAUGHT))
    gradients = [float(one["gradient/norm"]) for one in recent if "gradient/norm" in one]
    return Situation(
        versions=len(records.by_version),
        waits=shares.get("wait", 0.0),
        checkpoints=shares.get("checkpoint", 0.0),
        parked=figures.parked_share([*stats, *(_present(state) if state else [])]),
        servers=_heard(config, records, state),
        wanted=getattr(state, "wanted_servers", None),
        none_solved=0.0 if taught else mean("groups/solved_none") or 0.0,
        all_solved=0.0 if taught else mean("groups/solved_all") or 0.0,
        gradient=max(gradients) if gradients else None,
        gain=None if now is None or before is None else now - before,
        flat=_flat_share(state, config.batch.groups),
        failed=_failed_share(state),
        why_failed=failures(state) if state else "",
        waiting=waiting,
        max_staleness=config.batch.max_staleness,
        over=over,
        starting=starting,
    )


def recommend(now: Situation) -> str:
    """One sentence: what to change first; of a run that is over, for the next one."""
    if now.failed > MOST_FAIL:
        return f"Most attempts fail: {now.why_failed}. Mend that first: {TRACEBACKS}."
    if now.flat > MOST_FLAT:
        return (
            f"{_percent(now.flat)} of the groups since the last batch had no variance, and batch.skip_zero_variance "
            "leaves them out: take easier problems if all fail, harder ones if all are solved, raise batch.samples, or "
            "look at the reward."
        )
    waiting = f": {now.waiting}" if now.waiting else ""
    if now.starting:
        return f"No version is trained since the last launch{waiting}."
    if not now.versions:
        return "No version was trained." if now.over else f"No version is trained yet{waiting}."
    if now.versions < FEW_VERSIONS:
        few = "The run had too few versions" if now.over else "There are too few versions yet"
        return f"{few} to recommend anything."
    return _learns_nothing(now) or _waits(now) or _idles(now) or _fine(now)


def _learns_nothing(now: Situation) -> str:
    flat = now.gain is None or abs(now.gain) < 0.01
    if (now.gradient is not None and now.gradient < 1e-9) or (now.none_solved > 0.95 and flat):
        why = "the gradient is zero: all samples of a group have the same reward"
        if now.none_solved > 0.5:
            why = f"{_percent(now.none_solved)} of the groups have no right answer"
        elif now.all_solved > 0.5:
            return (
                f"Nothing is learned any more: {_percent(now.all_solved)} of the groups have only right answers. "
                f"Take harder problems{'' if now.over else ', or end the run'}."
            )
        remedy = "Take easier problems, raise batch.samples, or look at the samples and at the reward"
        return f"Nothing is learned: {why}. {remedy}."
    if now.all_solved > 0.9:
        return (
            f"Little is left to learn: {_percent(now.all_solved)} of the groups have only right answers. "
            "Take harder problems, or set batch.skip_zero_variance."
        )
    return ""


def _waits(now: Situation) -> str:
    if now.waits <= WAITS:
        return ""
    said, parked = f"The learner {_wait(now)} {_percent(now.waits)} of the time", now.parked or 0.0
    if now.max_staleness == 0:
        return f"{said} because the run is synchronous: batch.max_staleness 1 or more lets both sides work at once."
    if parked > IDLE:
        return (
            f"{said} and {_percent(parked)} of the servers' places {_get(now)} no work, because of the bound on age. "
            f"Raise batch.max_staleness (now {now.max_staleness}) or batch.groups; more servers would not help."
        )
    if now.wanted is not None and now.wanted > now.servers:
        there = f"{now.servers} {'is' if now.servers == 1 else 'are'} there"
        return f"{said}: the run has asked for {now.wanted} servers and {there}. Wait for the others."
    used = now.servers * (1 - parked if parked > CLOSED else 1.0)
    more = math.ceil(used * (1 - now.waits / 2) / max(1 - now.waits, 0.02) - 1e-9) - now.servers
    if more <= 0:
        return f"{said} for a few long answers: batch.max_staleness {now.max_staleness + 2} lets it train others first."
    return f"{said}: {_count(more)} more server{'s' * (more > 1)} would halve that."


def _idles(now: Situation) -> str:
    parked = now.parked or 0.0
    if now.checkpoints > WAITS:
        return f"Checkpoints take {_percent(now.checkpoints)} of the time: raise learner.checkpoint_every."
    spare = now.servers - max(1, math.ceil(SPARE * now.servers * (1 - parked)))
    if parked <= IDLE or spare <= 0:
        return ""
    learner = f"the learner {_wait(now)} {_percent(now.waits)}"
    said = f"{_percent(parked)} of the servers' places {_get(now)} no work and {learner}"
    return f"{said}: {_count(spare)} server{'s' * (spare > 1)} fewer would do."


def _fine(now: Situation) -> str:
    return f"The learner {_wait(now)} {_percent(now.waits)} of the time: nothing has to change."


def _wait(now: Situation) -> str:
    return "waited" if now.over else "waits"


def _get(now: Situation) -> str:
    return "got" if now.over else "get"


def find_alerts(
    config: Config, records: Records, state: State | None, since_s: float | None, live: bool
) -> list[Alert]:
    """`since_s`: seconds without a new version, except between launches. `live`: silence and stalls mean something."""
    found = _lost_and_full(config, records, state) if live and state is not None else []
    pace_s = figures.pace_s(records)
    if live and since_s is not None and pace_s is not None and since_s > max(STALLED * pace_s, STALLED_S):
        remedy = "who waits for whom is below; else see logs/learner.log"
        found.append(Alert("bad", f"no version for {since_s:.0f} s, one usually takes {pace_s:.1f} s: {remedy}"))
    if state is not None and (number := state.counts.get("quarantined")):
        what = "1 group is" if number == 1 else f"{number} groups are"
        remedy = "`python -m buffer quarantine RUN` says why"
        found.append(Alert("bad", f"{what} in quarantine, because the learner cannot train on them: {remedy}"))
    if state is not None and FEW_FAIL < _failed_share(state) <= MOST_FAIL:  # above it, the recommendation says so
        found.append(Alert("bad", f"{failures(state)}: {TRACEBACKS}"))
    ordered = records.ordered()
    if ordered:
        history = [one for one in ordered[:-1] if "version" in one]
        lines = metric_alerts(ordered[-1], history)
        found += [Alert("bad" if line.startswith(SKIPPED) else "warn", line) for line in lines]
        for key in figures.WITHOUT_EFFECT:
            if (row := figures.in_row(records, key)) > 1:
                what = figures.WITHOUT_EFFECT[key]
                found.append(Alert("bad", f"the last {row} steps {what}: logs/learner.log has the cause and a remedy"))
    found += _preemptions(records)
    return sorted(found, key=lambda alert: alert.level)


def _lost_and_full(config: Config, records: Records, state: State) -> list[Alert]:
    """Alerts of a live run: who is silent or gone, and what is full."""
    silences = (_silence(name, state.servers[name]) for name in silent(state, config))
    found = [alert for alert in silences if alert]
    trained = max(records.by_version, default=0)
    if state.learner_gone_s is not None and not state.ended and trained < config.run.versions:
        again = "its launcher starts it again, unless the run is being stopped; see logs/learner.log"
        found.append(
            Alert("bad", f"the learner ended {state.learner_gone_s:.0f} s ago, and nothing is trained: {again}")
        )
    if state.launcher_gone_s is not None:
        found.append(Alert("bad", next(iter(servers_lines(state, config)))))
    if config.buffer.max_gib * 2**30 * 0.95 < state.bytes_stored:
        remedy = "the learner has to train some, or raise buffer.max_gib"
        found.append(Alert("warn", f"the buffer is full ({state.bytes_stored / 2**30:.3g} GiB): {remedy}"))
    if state.errors:
        found.append(Alert("warn", f"the buffer refused {state.errors} messages: see logs/buffer.log"))
    return found


def _silence(name: str, server: Mapping[str, Any]) -> Alert | None:
    silent_s, ended_s = float(server.get("silent_s") or 0.0), server.get("gone_s")
    if server.get("version") is None and ended_s is None:
        started = f"{name} started vLLM {silent_s:.0f} s ago and has not asked for work yet: see logs/{name}.log"
        return Alert("warn", started) if silent_s > START_S else None
    what = "its leases have ended and its problems are dispatched again"
    how = f"silent for {silent_s:.0f} s" if ended_s is None else f"it ended {ended_s:.0f} s ago"
    return Alert("bad", f"{name} is lost: {how}; {what}. See logs/{name}.log")


def _preemptions(records: Records) -> list[Alert]:
    looks = [look for _, look in sorted(records.servers.items())[-figures.LAST :]]
    counts = [float(look["servers/preempted"]) for look in looks if "servers/preempted" in look]
    rises = sum(after > before for before, after in pairwise(counts))
    if len(counts) < FEW_VERSIONS or rises <= len(counts) / 2:
        return []
    remedy = "raise rollout.engine.gpu_memory_utilization, add a server, or set a smaller rollout.sequences"
    return [Alert("warn", f"vLLM preempts sequences all the time, {counts[-1]:.0f} so far: {remedy}")]


def _heard(config: Config, records: Records, state: State | None) -> int:
    if state is not None and state.servers:
        return max(1, len(working(state, config)))
    last = records.servers[max(records.servers)] if records.servers else {}
    ordered = records.ordered()
    return max(1, int(last.get("servers/heard") or (ordered[-1].get("weights/servers", 1) if ordered else 1)))


def _present(state: State) -> list[dict[str, Any]]:
    return [server.get("stats", {}) for server in state.servers.values()]


def _failed_share(state: State | None) -> float:
    if state is None:
        return 0.0
    failed = sum(state.failed.values())
    return failed / max(1, failed + state.lengths.get("generated", [0])[0])


def _flat_share(state: State | None, least: int) -> float:
    recent = state.recent_groups if state else {}
    flat = sum(recent.values()) - recent.get("varied", 0)
    return flat / sum(recent.values()) if flat >= least else 0.0


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _count(number: int) -> str:
    return WORDS[number] if number < len(WORDS) else str(number)
