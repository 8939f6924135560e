"""Why the ledger waits, in one line for people: for a batch, for work, or not at all any more.

Read-only views of the ledger; shown by `python -m buffer stats`, the display and the reason of every refused group.
"""

import heapq
from collections import Counter
from typing import TYPE_CHECKING

from buffer.ledger.types import ItemState

if TYPE_CHECKING:
    from buffer.ledger.rules import Ledger

SHOWN = 3


def for_batch(ledger: "Ledger") -> str:
    """Why batch v' is not ready, and who holds what it waits for."""
    pool, version = ledger.book.pool, ledger.version
    if ledger.finished():
        return _finished(ledger)
    if ledger.ready():
        return f"batch {version} is ready for the learner"
    if pool.num_stored >= ledger.groups:
        late = ", ".join(f"item {e.item} (version {e.version}) at {_name(e.server)}" for e in _stragglers(ledger))
        return f"batch {version} has its {ledger.groups} groups, but without waiting for {late} those would get too old"
    have = f"batch {version} has {pool.num_stored} of {ledger.groups} groups"
    if pool.num_open > pool.num_stored:
        return f"{have}; {pool.num_open - pool.num_stored} are open at {_holders(ledger)}"
    if not ledger.book.servers:
        return f"{have}; no rollout server has asked for work yet"
    newest = max(server.version for server in ledger.book.servers.values())
    return f"{have}; nothing is open: {_for_version(ledger, min(newest, ledger.book.ceiling))}"


def for_work(ledger: "Ledger", server: str) -> str:
    """Why nothing can be dispatched to `server`."""
    if ledger.finished():
        return _finished(ledger)
    known = ledger.book.servers.get(server)
    return _for_version(ledger, min(known.version if known else 0, ledger.book.ceiling))


def moved_on(entry: ItemState, lease: int) -> str:
    """Why the group of an ended lease is refused."""
    now = {
        "waiting": "the item waits to be dispatched again",
        "leased": f"the item is with {_name(entry.server)} under lease {entry.lease}",
        "stored": f"the item was delivered by {_name(entry.server)} under lease {entry.lease}",
        "batched": f"the item is in batch {entry.batch}",
        "dropped": f"the item was dropped: {entry.reason}",
    }[entry.state]
    reason = f" ({entry.reason})" if entry.reason and entry.state in ("waiting", "leased") else ""
    return f"lease {lease} of item {entry.item} is over{reason}; {now}"


def _finished(ledger: "Ledger") -> str:
    if ledger.versions is not None and ledger.version >= ledger.versions:
        return f"finished: all {ledger.versions} batches are formed (run.versions)"
    return f"finished: all {ledger.problems} problems of {ledger.epochs} epochs are used up (data.epochs)"


def _for_version(ledger: "Ledger", version: int) -> str:
    pool = ledger.book.pool
    if ledger.room(version):
        if ledger.book.next_item and ledger.used_up():
            return "all problems are dispatched (data.epochs)"
        return f"a server at version {version} may have {ledger.room(version)} groups"
    if ledger.versions is not None and pool.num_open >= (ledger.versions - ledger.version) * ledger.groups:
        return f"the {pool.num_open} open groups are enough for the last batches (run.versions {ledger.versions})"
    bound = f"within {ledger.target_staleness} versions"
    if version < ledger.version and ledger.room(ledger.version):
        return f"a group of version {version} cannot be trained {bound}: the server must get a newer policy first"
    return f"{pool.num_open} groups are open, more cannot be trained {bound}: batch {ledger.version} must be taken"


def _stragglers(ledger: "Ledger") -> list[ItemState]:
    return heapq.nsmallest(SHOWN, ledger.leased(), key=lambda entry: (entry.version, entry.item))


def _holders(ledger: "Ledger") -> str:
    held = Counter({name: len(server.leases) for name, server in ledger.book.servers.items() if server.leases})
    shown = ", ".join(f"{_name(name)} ({number})" for name, number in held.most_common(SHOWN))
    return shown + (f" and {len(held) - SHOWN} more" if len(held) > SHOWN else "")


def _name(server: str) -> str:
    """Servers may be known as NAME#TOKEN, to tell one start from the next; people know the name."""
    return server.partition("#")[0]
