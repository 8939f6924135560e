"""The state of a run: from its buffer if that answers, else from the buffer's file.

Reading the file does not disturb a live buffer.
"""

import asyncio
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

from actors.watch.metrics_log import Records
from buffer import problem_list
from buffer.keys import KeysError, load_client_keys
from buffer.store.sqlite import reading
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.protocol import State, Status
from configs.entrypoint import BAD_INPUT
from configs.load import read
from configs.plain_text import print_visible
from configs.schema import Config

VERSIONS = "SELECT COALESCE(MAX(version) FILTER (WHERE trained), -1), COALESCE(MAX(version), -1) FROM batches"
LEASES = "SELECT server, COUNT(*), MAX(version), MIN(leased_at) FROM items WHERE state = 'leased' GROUP BY server"
UNTRAINED_BYTES = "SELECT COALESCE(SUM(bytes), 0) FROM items WHERE state IN ('stored', 'batched')"
CULPRITS = {
    "reward": "reward.function, which fails",
    "task": "rollout.task, which fails",
    "prompt": "prompts that can be used (data.train)",
    "engine": "vLLM, which fails",
}
LIMITS = {
    "limit_sequences": "rollout.sequences",
    "limit_learner": "it takes more once the learner waits",
    "limit_graphs": "max_num_seqs, the captured CUDA graphs",
    "limit_kv": "the KV cache holds no more of this mean length",
    "limit_preempted": "the KV cache was full, {preempted:.0f} preemptions",
}
"""The smallest of these figures bounds a server's places."""
UNHEARD = {"placing": "is being placed", "started": "is not connected to the buffer", "draining": "is being drained"}
MISSED_HEARTBEATS = 5
"""The buffer then ends a server's leases."""


def find_run(argv: Sequence[str], prog: str) -> tuple[Config, Path]:
    """Read the run that `argv` names; ends the process as `configs.load.read` does."""
    if "-h" in argv or "--help" in argv:
        print_visible(f"usage: {prog} RUN [--section.key=value ...]\n\nRUN is a run's folder, or its config files.")
        print_visible("`python -m configs --keys` lists every key of the run file, docs/operations.md every command.")
        sys.exit(0)
    if not argv:
        print_visible(f"usage: {prog} RUN; name a run's folder, or its run file", sys.stderr)
        sys.exit(BAD_INPUT)
    folder = Path(argv[0])
    if not folder.exists() and not argv[0].startswith("-"):
        print_visible(f"{folder}: no such file (from {Path.cwd()}); name a run's folder, or its run file", sys.stderr)
        sys.exit(BAD_INPUT)
    if not folder.is_dir():
        config = read(argv, prog, lenient=True)
        return config, config.run.path
    if not (folder / "config.yaml").exists():
        print_visible(
            f"{folder}: no config.yaml in it, so it is not a run's folder; name one, or its config", sys.stderr
        )
        sys.exit(BAD_INPUT)
    return read([str(folder / "config.yaml"), *argv[1:]], prog, lenient=True), folder


async def ask(config: Config, timeout_s: float = 3.0) -> State | None:
    """None if the buffer does not answer in time, refuses, or needs keys that are not here."""
    address = config.buffer.address
    try:
        keys = load_client_keys(config.run.path / "keys", "observer")
        async with asyncio.timeout(timeout_s), Connection(address, "status", "observer", keys=keys) as connection:
            return await connection.expect(Status(), State)
    except (TimeoutError, RefusedError, KeysError):
        return None


def stored(file: Path) -> State:
    """The State in a buffer's file: its servers are those with leases, and nobody waits. Raises StoreError."""
    with closing(reading(file)) as db:
        trained, formed = db.execute(VERSIONS).fetchone()
        counts = dict(db.execute("SELECT state, COUNT(*) FROM items GROUP BY state"))
        leases = db.execute(LEASES).fetchall()
        (untrained_bytes,) = db.execute(UNTRAINED_BYTES).fetchone()
        totals = {(what, which): sums for what, which, *sums in db.execute("SELECT * FROM totals ORDER BY what, which")}
        ended = db.execute("SELECT value FROM meta WHERE name = 'ended'").fetchone()
        problems, left_out = problem_list.counts(db)

    servers = {}
    for server, count, newest, at in leases:
        stats = {"oldest_lease_s": time.time() - at}
        servers[server.partition("#")[0]] = {"version": newest, "leases": count, "stats": stats}

    def groups_by(what: str) -> dict[str, int]:
        return {which: sums[0] for (kind, which), sums in totals.items() if kind == what and sums[0]}

    return State(
        version=formed + 1,
        trained=trained,
        counts=counts,
        dropped=groups_by("dropped"),
        failed=groups_by("failed"),
        retried=sum(groups_by("retried").values()),
        problems=problems,
        left_out=left_out,
        ended=ended[0] if ended else "",
        lengths={
            f"{what}: {which}" if which else what: sums
            for (what, which), sums in totals.items()
            if what in ("generated", "trained", "dropped", "discarded", "quarantined")
        },
        ages=dict(sorted((int(age), groups) for age, groups in groups_by("age").items())),
        bytes_stored=untrained_bytes,
        servers=servers,
        waiters=[],
        errors=0,
    )


def ending(config: Config, run: Path, held: State | None, say_ago: bool = True, records: Records | None = None) -> str:
    """How a run without a buffer has ended by itself; empty for an interrupted or dead one."""
    records = records or Records(run / "metrics.jsonl", looks=False)
    if records.by_version and max(records.by_version) >= config.run.versions:
        return f"finished at {when(records.path.stat().st_mtime, say_ago)}"
    if held and held.ended and held.trained + 1 == held.version < config.run.versions:
        return f"ended at {when(last_life(config, run), say_ago)}: {held.ended}"
    return ""


def last_life(config: Config, run: Path) -> float:
    """Unix time at which the run last wrote something; 0: never."""
    files = [run / "metrics.jsonl", *(run / "logs").glob("*.log")]
    if config.buffer.path:
        ledger = run / config.buffer.path
        files += [ledger, ledger.with_name(f"{ledger.name}-wal")]
    return max((file.stat().st_mtime for file in files if file.exists()), default=0.0)


def when(seconds: float, say_ago: bool = True) -> str:
    """`2026-11-22 06:18:03 (0:00:40 ago)`."""
    ago = f" ({timedelta(seconds=round(time.time() - seconds))} ago)" if say_ago else ""
    return f"{datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}{ago}"


class Wait(NamedTuple):
    who: str
    whom: str
    seconds: float
    why: str


def waiting_rows(state: State, config: Config) -> list[Wait]:
    """Who waits for whom, the longest wait first.

    A learner waits for servers with leases, or for what fails, if more attempts have failed since the last batch than
    groups are stored; for a missing server only where none is there. Others wait for the learner, whose next batch
    reopens admission and frees bytes. An ended server waits for nobody, though the buffer still has its requests.
    """
    absent = absences(state, config)
    present = {name: server for name, server in state.servers.items() if name not in absent}
    working = ", ".join(name + _stages(server) for name, server in present.items() if server.get("leases"))
    missing = "; ".join(f"{name}, which {why}" for name, why in absent.items())
    blamed = (_culprit(state) or working) if present else missing
    whom = {"Take": blamed or "any rollout server", "Results": "the last evaluation"}
    learner = "the learner"
    if state.learner_gone_s is not None:
        learner = f"the learner, which ended {state.learner_gone_s:.0f} s ago"
    return [
        Wait(waiter.who, whom.get(waiter.kind, learner), waiter.seconds, waiter.why)
        for waiter in sorted(state.waiters, key=lambda waiter: -waiter.seconds)
        if "gone_s" not in state.servers.get(waiter.who, {})
    ]


def waits(state: State, config: Config) -> list[str]:
    """`waiting_rows` as lines."""
    return [f"{who} for {whom}, {seconds:.1f} s: {why}" for who, whom, seconds, why in waiting_rows(state, config)]


def fullness(state: State, name: str) -> str:
    """Example: `"running 384 of 448: the KV cache was full, 3 preemptions"`"""
    stats = state.servers[name].get("stats", {})
    limits = {limit: stats[limit] for limit in LIMITS if limit in stats}
    if not limits or "running" not in stats:
        return ""
    least = min(limits, key=lambda limit: limits[limit])
    why = LIMITS[least].format(preempted=stats.get("preempted", 0))
    in_task, waiting = stats.get("task", 0), stats.get("waiting", 0)
    moving = stats.get("places_taken", 0) - stats["running"] - waiting - in_task
    asks = any((waiter.who, waiter.kind) == (name, "Ask") for waiter in state.waiters)
    if asks or stats.get("parked", 0) > stats["places"] / 8:
        why = "no more work is admitted"
    elif in_task > stats["places"] / 8:
        why = f"{in_task:.0f} samples are in their task"
    elif waiting > stats["places"] / 8 and least == "limit_sequences":
        why = f"{waiting:.0f} wait inside vLLM, for its max_num_seqs or the KV cache"
    elif moving > stats["places"] / 8:
        why = f"{moving:.0f} are on their way to or from vLLM"
    elif stats.get("places_taken", stats["places"]) < stats["places"] * 7 / 8:
        why = "it asks for more work"
    return f"running {stats['running']:.0f} of {stats['places']:.0f}: {why}"


def silent(state: State, config: Config) -> list[str]:
    """Servers that have ended, or whose leases have."""
    limit_s = MISSED_HEARTBEATS * config.rollout.heartbeat_s
    servers = state.servers.items()
    return [name for name, server in servers if "gone_s" in server or float(server.get("silent_s", 0.0)) > limit_s]


def absences(state: State, config: Config) -> dict[str, str]:
    """Servers that cannot work now, and why, also those of a live launcher that the buffer does not know."""
    kept = state.kept.servers if state.kept and state.launcher_gone_s is None else {}
    unheard = {name: life for name, life in kept.items() if name not in state.servers}
    found = {name: UNHEARD.get(life, life.replace("_", " ")) for name, life in unheard.items()}
    gone = silent(state, config)
    for name, server in state.servers.items():
        if "gone_s" in server:
            found[name] = f"ended {server['gone_s']:.0f} s ago"
        elif server.get("version") is None:
            found[name] = f"is starting, silent for {server['silent_s']:.0f} s" if name in gone else "is starting"
        elif name in gone:
            found[name] = f"has been silent for {server['silent_s']:.0f} s"
    return found


def working(state: State, config: Config) -> list[str]:
    """Servers that can work now."""
    absent = absences(state, config)
    return [name for name in state.servers if name not in absent]


def all_absent(state: State, config: Config) -> str:
    """Why nobody works though nobody waits, as at a start; empty if a server can work."""
    if working(state, config):
        return ""
    reasons = [f"{name} {why}" for name, why in absences(state, config).items()]
    return f"{'; '.join(reasons) or 'no rollout server is there'}, and the learner asks for no batch"


def servers_lines(state: State, config: Config) -> Iterator[str]:
    """A server runs once it has asked for work, not as soon as its keeper has started it."""
    if state.launcher_gone_s is not None:
        yield f"servers: the launcher ended {state.launcher_gone_s:.0f} s ago: nobody starts, drains or restarts them"
        return
    if (kept := state.kept) is None:
        return
    by, absent = " by hand" * state.wanted_by_person, absences(state, config)
    by_reason: dict[str, list[str]] = defaultdict(list)
    for name, life in kept.servers.items():
        why = absent.get(name, "") if life == "started" else life.replace("_", " ")
        reason, _, since = why.removeprefix("is ").partition(", ")
        by_reason[reason].append(f"{name} ({since})" if since else name)
    runs = f"{len(by_reason.pop('', []))} run"
    others = [f"{reason}: {', '.join(names)}" for reason, names in by_reason.items()]
    yield "; ".join([f"servers: {state.wanted_servers} wanted{by}, {runs}", *others])
    if kept.advice:
        yield f"servers: {kept.advice}"


def failures(state: State) -> str:
    """Failed attempts and dropped items of the run in one line, nothing if there are none."""
    made = state.lengths.get("generated", [0])[0]
    attempts = made + sum(state.failed.values())
    by_kind: dict[str, dict[str, int]] = defaultdict(dict)
    for failure, count in state.failed.items():
        kind, _, reason = failure.partition(": ")
        by_kind[kind][reason] = count
    ranked = sorted(by_kind.items(), key=lambda pair: -sum(pair[1].values()))
    lines = [
        f"{kind} failed {_percent(sum(counts.values()) / attempts)} of {attempts} attempts, most often "
        + _most_frequent(counts)
        for kind, counts in ranked
    ]
    if state.retried:
        lines.append(f"{state.retried} of {made} groups retried")
    if state.dropped:
        lines.append(f"{sum(state.dropped.values())} items dropped, most often {_most_frequent(state.dropped)}")
    if number := state.counts.get("quarantined"):
        lines.append(f"{number} group{'s' * (number > 1)} in quarantine")
    if number := state.problems.get("left_out", 0):
        rows = sum(state.problems.values()) - state.problems.get("retired", 0)
        lines.append(f"{number} of {rows} rows left out, because every attempt at them failed")
    return "; ".join(lines)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.2g} %"


def _stages(server: Mapping[str, Any]) -> str:
    stats = server.get("stats", {})
    counts = {stage: stats[stage] for stage in ("generating", "scoring", "teacher", "task") if stats.get(stage)}
    lines = []
    for stage in sorted(counts, key=lambda stage: -counts[stage]):
        longest_s = f" for {stats[f'{stage}_s']:.0f} s" if f"{stage}_s" in stats else ""
        lines.append(f"{stage} {counts[stage]:.0f}{longest_s}")
    return f" ({', '.join(lines)})" if lines else ""


def _culprit(state: State) -> str:
    by_kind: Counter[str] = Counter()
    for failure, count in state.recent_failed.items():
        by_kind[failure.partition(":")[0]] += count
    kind, count = by_kind.most_common(1)[0] if by_kind else ("", 0)
    return CULPRITS.get(kind, "") if count > state.counts.get("stored", 0) else ""


def _most_frequent(counts: dict[str, int]) -> str:
    reason = max(counts, key=lambda reason: counts[reason])
    return f"{reason} ({counts[reason]})"


def ledger_lines(state: State) -> Iterator[str]:
    """What became of the run's problems so far: failures, batches, items, ages, lengths."""
    if line := failures(state):
        yield line
    yield (
        f"batch {state.version} is next, {state.trained + 1} trained; "
        f"{state.bytes_stored:,} bytes of samples wait for training"
    )
    by_state = {name.replace("_", " "): number for name, number in state.problems.items()}
    for name, counts in (("items", state.counts), ("problems", by_state), ("ages of trained groups", state.ages)):
        yield f"{name}: " + (", ".join(f"{key} {count}" for key, count in counts.items()) or "none")
    for what, reasons in (("failed attempts", state.failed), ("dropped", state.dropped)):
        yield from (f"{what} {count}: {reason}" for reason, count in reasons.items())
    yield from (f"left out: {line}" for line in state.left_out)
    if (more := state.problems.get("left_out", 0) - len(state.left_out)) > 0:
        yield f"left out: {more} more rows; `python -m buffer problems RUN --state left_out` lists all"
    for what, (groups, samples, tokens, sampled, truncated) in state.lengths.items():
        if samples:
            yield (
                f"{what}: {groups} groups, {samples} samples, mean {tokens / samples:.1f} tokens, "
                f"{sampled / samples:.1f} sampled, {100 * truncated / samples:.1f} % cut at the limit"
            )
    if state.errors:
        yield f"{state.errors} messages refused since the buffer started: see logs/buffer.log"
