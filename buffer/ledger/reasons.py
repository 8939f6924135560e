"""Why the ledger waits, in one line for people."""

import heapq
from collections import Counter

from buffer.ledger.counts import GIVEN_UP_FLAT, GIVEN_UP_QUARANTINED, GIVEN_UP_ROWS
from buffer.ledger.rules import ZERO_VARIANCE, Ledger
from buffer.ledger.types import ItemState, server_name

SHOWN = 3
FLAT_REMEDY = (
    "every sample of a group had the same reward: take easier problems if all fail, harder ones if all are solved, "
    "raise batch.samples or sampling.temperature, look at the reward, or set batch.skip_zero_variance: false"
)
QUARANTINE_REMEDY = (
    "`python -m buffer quarantine RUN` lists them; compare the models and the software of servers and learner, then "
    "start the run again"
)
MOST_LEFT_OUT = 50
MOST_COUNTS = 5


def for_batch(ledger: Ledger) -> str:
    """Why batch v' is not ready."""
    if why := ended(ledger):
        return why.splitlines()[0]
    if ledger.view.ready():
        return f"batch {ledger.state.version} is ready for the learner"
    return _missing(ledger) + _failures(ledger) + _flat(ledger)


def for_work(ledger: Ledger, server: str) -> str:
    """Why nothing can be dispatched to `server`."""
    if why := ended(ledger):
        return why.splitlines()[0]
    known = ledger.state.servers.get(server)
    return _closed(ledger, min(known.version if known else 0, ledger.state.ceiling), server) + _failures(ledger)


def evaluation(ledger: Ledger) -> str:
    """Who evaluates what; "" while nobody does."""
    running = ledger.evaluations.running()
    if running is None:
        return ""
    instead = f" for the evaluation due at {running.due}" if running.due != running.version else ""
    return f"{server_name(running.server)} evaluates version {running.version}{instead}"


def for_results(ledger: Ledger) -> str:
    """Why the learner gets no result after the last version."""
    return (
        evaluation(ledger)
        or f"no rollout server has loaded version {ledger.state.version} yet, which is to be evaluated"
    )


def ended(ledger: Ledger) -> str:
    """Why no further batch will be formed, or ""; further lines have the causes."""
    outcome = ledger.view.outcome()
    if outcome is None:
        return ""
    if outcome == "versions":
        return f"finished: all {ledger.terms.versions} batches are formed (run.versions)"
    trend, versions = ledger.state.trend, ledger.terms.versions
    after = f"after version {ledger.state.version}" + (f" of {versions}" if versions is not None else "")
    if trend.given_up == GIVEN_UP_FLAT:
        row = f"{trend.flat_in_row} groups in a row had no variance"
        first = f"the run was given up {after}: {row} (batch.skip_zero_variance leaves such groups out)"
        return f"{first}\n  {FLAT_REMEDY}; those need another run.name"
    if trend.given_up == GIVEN_UP_QUARANTINED:
        row = f"{trend.quarantined_in_row} groups were put into quarantine and none was trained meanwhile"
        last = f"the last one: {trend.last_quarantined}; " if trend.last_quarantined else ""
        return f"the run was given up {after}: {row}\n  {last}{QUARANTINE_REMEDY}"
    if trend.given_up == GIVEN_UP_ROWS:
        row = f"all {ledger.terms.problems} rows of data.train are left out, because every attempt at them failed"
        first = f"the run was given up {after}: {row}"
    elif trend.given_up:
        row = f"{trend.failures_in_row} attempts failed and no group was made meanwhile"
        first = f"the run was given up {after}: {row} (rollout.max_failed_share {ledger.terms.max_failed_share:g})"
    else:
        epochs = "1 epoch" if ledger.terms.epochs == 1 else f"{ledger.terms.epochs} epochs"
        counts = f"{ledger.state.num_formed} trained, {sum(ledger.view.dropped().values())} dropped{_dropped(ledger)}"
        counts += f", {ledger.view.num_quarantined} in quarantine" if ledger.view.num_quarantined else ""
        counts += f", {left_out} rows left out" if (left_out := len(ledger.view.left_out())) else ""
        first = f"the data ended {after}: {epochs} of {ledger.terms.problems} problems, {counts}"
    if outcome == "data":
        return first
    failed = sorted(ledger.view.failed().items(), key=lambda pair: -pair[1])
    lines = [f"  {count} attempts failed: {reason}" for reason, count in failed[:MOST_COUNTS]]
    if more := failed[MOST_COUNTS:]:
        lines.append(f"  {sum(count for _, count in more)} attempts failed for {len(more)} other reasons")
    lines += [f"  for example {ledger.place(row)}: {reason}" for row, reason in trend.examples.items()]
    again = "start the run again" if trend.given_up else "choose another run.name, or remove the run's folder"
    return "\n".join([first, *lines, f"  mend what failed, then {again}"])


def left_out(ledger: Ledger) -> list[str]:
    """The first rows that are left out, and why."""
    rows = sorted(ledger.view.left_out().items())
    return [f"{ledger.place(row)}: {reason}" for row, reason in rows[:MOST_LEFT_OUT]]


def newly_left_out(ledger: Ledger) -> str:
    """One line about rows newly left out; "" if there are none."""
    news = ledger.state.rows.news
    if not news:
        return ""
    first, number = news[0], len(ledger.view.left_out())
    more = f", and {len(news) - 1} more" if len(news) > 1 else ""
    reason = ledger.view.left_out().get(first, "")
    news.clear()
    every = f"every attempt at it failed: {reason}"
    total = f"{number} of {ledger.terms.problems} rows are left out"
    return f"left out from now on, {ledger.place(first)}: {every}{more}; {total}"


def _dropped(ledger: Ledger) -> str:
    """The reason of most dropped items; a filter is a reason without kind."""
    dropped = ledger.view.dropped()
    if not dropped:
        return ""
    most = max(dropped, key=lambda reason: dropped[reason])
    with_kind = (failure for failure in ledger.view.failed() if most.startswith(failure.partition(": ")[2]))
    return f" (most often {next(with_kind, most)})" if len(dropped) > 1 else f" ({next(with_kind, most)})"


def _missing(ledger: Ledger) -> str:
    pool, version, groups = ledger.state.pool, ledger.state.version, ledger.terms.groups
    if len(pool.stored) >= groups:
        late = ", ".join(
            f"item {item.number} (version {item.version}) at {server_name(item.server)}" for item in _stragglers(ledger)
        )
        return f"batch {version} has its {groups} groups, but without waiting for {late} those would get too old"
    have = f"batch {version} has {len(pool.stored)} of {groups} groups"
    if pool.num_open > len(pool.stored):
        return f"{have}; {pool.num_open - len(pool.stored)} are open at {_holders(ledger)}"
    if not ledger.state.servers:
        return f"{have}; no rollout server asks for work"
    newest = max(server.version for server in ledger.state.servers.values())
    return f"{have}; nothing is open: {_closed(ledger, min(newest, ledger.state.ceiling))}"


def _closed(ledger: Ledger, version: int, server: str = "") -> str:
    terms, state, pool = ledger.terms, ledger.state, ledger.state.pool
    if pool.num_held:
        some = "1 item waits because its" if pool.num_held == 1 else f"{pool.num_held} items wait because their"
        return f"{some} images cannot be read now; the log names one"
    if ledger.view.room(version):
        if elsewhere := pool.num_elsewhere(server):
            return f"{elsewhere} items failed here and go to another server, if one asks within {terms.lease_s:g} s"
        if state.next_item and ledger.view.all_dispatched() and not pool.num_waiting:
            return "all problems are dispatched (data.epochs)"
        return f"a server at version {version} may have {ledger.view.room(version)} groups"
    if terms.versions is not None and pool.num_open >= (terms.versions - state.version) * terms.groups:
        return f"the {pool.num_open} open groups are enough for the last batches (run.versions {terms.versions})"
    bound = f"within {terms.target_staleness} versions"
    if version < state.version and ledger.view.room(state.version):
        running = ledger.evaluations.running()
        first = f"it evaluates version {running.version} first" if running and running.server == server else ""
        return f"a group of version {version} cannot be trained {bound}: " + (
            first or "the server must get a newer policy first"
        )
    return f"{pool.num_open} groups are open, more cannot be trained {bound}: batch {state.version} must be taken"


def _failures(ledger: Ledger) -> str:
    recent = ledger.state.trend.recent_failures
    if not recent:
        return ""
    since = "since the last batch" if ledger.state.num_formed else "since the start"
    (most, _), *_ = recent.most_common(1)
    return f"; {recent.total()} attempts failed {since}, most often {most}"


def _flat(ledger: Ledger) -> str:
    recent = ledger.state.trend.recent_groups
    flat, made = recent[ZERO_VARIANCE], recent.total()
    if 2 * flat <= made:
        return ""
    since = "since the last batch" if ledger.state.num_formed else "since the start"
    end = f"{ledger.state.trend.flat_in_row} in a row; {ledger.view.most_flat} end the run"
    return f"; {flat} of {made} groups {since} had no variance and were left out ({end}): {FLAT_REMEDY}"


def _stragglers(ledger: Ledger) -> list[ItemState]:
    return heapq.nsmallest(SHOWN, ledger.view.leased(), key=lambda item: (item.version, item.number))


def _holders(ledger: Ledger) -> str:
    servers = ledger.state.servers.items()
    held = Counter({server_name(name): len(server.leases) for name, server in servers if server.leases})
    shown = ", ".join(f"{name} ({number})" for name, number in held.most_common(SHOWN))
    return shown + (f" and {len(held) - SHOWN} more" if len(held) > SHOWN else "")
