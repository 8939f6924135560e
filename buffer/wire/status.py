"""The answer to Status."""

from typing import Any

from buffer.ledger import reasons
from buffer.ledger.rules import Ledger
from buffer.wire.handlers import Handlers
from buffer.wire.peers import Peer
from buffer.wire.protocol import State, Waiter


def state(handlers: Handlers, waiters: list[Waiter], errors: int, now: float) -> State:
    ledger, peers = handlers.ledger, handlers.peers
    broke = [rank.broke for rank in peers.of_role("learner")]
    return State.model_construct(
        version=ledger.state.version,
        trained=ledger.state.last_trained,
        counts=ledger.view.counts(),
        dropped=ledger.view.dropped(),
        failed=ledger.view.failed(),
        recent_failed=dict(ledger.state.trend.recent_failures),
        recent_groups=dict(ledger.state.trend.recent_groups),
        retried=ledger.state.totals.groups("retried"),
        problems=ledger.view.problems_by_state(),
        left_out=reasons.left_out(ledger),
        ended=reasons.ended(ledger),
        lengths={name: list(lengths) for name, lengths in ledger.view.lengths().items()},
        ages=ledger.view.ages(),
        bytes_stored=handlers.groups.bytes_stored,
        servers={peer.hello.name: _server(ledger, peer, now) for peer in peers.of_role("rollout")},
        learner_gone_s=max((now - moment for moment in broke if moment is not None), default=None),
        waiters=waiters,
        errors=errors,
        evaluation=reasons.evaluation(ledger),
        wanted_servers=handlers.wanted_servers,
        wanted_by_person=bool(ledger.wanted.wanted_by_person),
        kept=handlers.kept,
        launcher_gone_s=peers.launcher_gone_s(now),
    )


def _server(ledger: Ledger, peer: Peer, now: float) -> dict[str, Any]:
    known = ledger.state.servers.get(peer.key)
    leases, version = (len(known.leases), known.version) if known else (0, None)
    silent_s, gone_s = now - peer.heard, None if peer.broke is None else round(now - peer.broke, 1)
    found = {"version": version, "leases": leases, "silent_s": round(silent_s, 1), "stats": peer.stats}
    return found if gone_s is None else found | {"gone_s": gone_s}
