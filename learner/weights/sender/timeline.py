"""The figures of the weights wire, as `metrics.jsonl` has them: what docs/weights.md lists under Time.

Written by `rounds.Rounds` in its thread, read by the learner's; waits for nothing.
"""

import logging
import time

from learner.weights.protocol import Loaded
from learner.weights.sender.members import Member
from learner.weights.sender.shelf import PublishedPolicy

log = logging.getLogger(__name__)
OF_SERVERS = ("stop_s", "settle_s", "load_s", "resume_s", "pause_s", "verify_s")


class Timeline:
    """`stats` is of the last round that reached servers, and counts from the start. A version has `total_bytes`."""

    def __init__(self, total_bytes: int) -> None:
        self.stats: dict[str, float] = {"weights/members": 0.0, "weights/servers": 0.0, "weights/failed": 0.0}
        self._bytes = total_bytes

    def members(self, number: int) -> None:
        """So many servers are on the wire."""
        self.stats["weights/members"] = float(number)

    def failed(self, servers: int) -> None:
        """A version did not reach so many servers."""
        self.stats["weights/failed"] += servers

    def record(
        self, edition: PublishedPolicy, loaded: list[Member], broadcast_s: float, span_s: float, round_s: float
    ) -> None:
        """A round is over: of the slowest server under plain names, of each under its own."""
        answers = {member.name: member.answer for member in loaded if isinstance(member.answer, Loaded)}
        for member in loaded:
            member.failures = 0
        if not answers:
            return
        probes = [answer.probe for answer in answers.values() if answer.probe is not None]
        verify_s = max(answer.verify_s for answer in answers.values())
        told = {
            "weights/version": float(edition.version),
            "weights/servers": float(len(answers)),
            "weights/broadcast_s": broadcast_s,
            "weights/round_s": round_s,
            "weights/lag_s": time.perf_counter() - edition.published_at - verify_s,
        }
        if span_s > 0:
            told |= {"weights/span_s": span_s, "weights/gb_per_s": self._bytes / span_s / 1e9}
        for what in OF_SERVERS:
            each = {name: float(getattr(answer, what)) for name, answer in answers.items()}
            told[f"weights/{what}"] = max(each.values())
            told |= {f"weights/{name}/{what}": seconds for name, seconds in each.items()}
        if probes:
            told |= {"weights/probe": max(probes), "weights/probe_version": float(edition.version)}
        self.stats |= told  # at once: the loop reads it from another thread, and logs one round, not parts of two
        log.info("weights: version %d on %d server(s) after %.3f s", edition.version, len(answers), round_s)
