"""Timings and counts of the weights wire for `metrics.jsonl`; docs/weights.md explains each key. Waits for nothing.

Written by the serving thread (`distributor.py`), read by the learner's.
"""

import logging
import time

from learner.weights.protocol import Loaded
from learner.weights.sender.double_buffer import PublishedPolicy
from learner.weights.sender.members import Member

log = logging.getLogger(__name__)
SERVER_TIMINGS = ("stop_s", "settle_s", "load_s", "resume_s", "pause_s", "verify_s")


class Timeline:
    """`stats` describes the last round that reached servers, and counts from the start. A version has `total_bytes`."""

    def __init__(self, total_bytes: int) -> None:
        self.stats: dict[str, float] = {"weights/members": 0.0, "weights/servers": 0.0, "weights/failed": 0.0}
        self._bytes = total_bytes

    def set_members(self, number: int) -> None:
        """So many servers are members now."""
        self.stats["weights/members"] = float(number)

    def add_failed(self, servers: int) -> None:
        """A version did not reach so many servers."""
        self.stats["weights/failed"] += servers

    def record(
        self, policy: PublishedPolicy, loaded: list[Member], broadcast_s: float, span_s: float, round_s: float
    ) -> None:
        """A round is over. Plain keys hold the slowest server's seconds, keys with a name those of that server."""
        answers = {member.name: member.answer for member in loaded if isinstance(member.answer, Loaded)}
        if not answers:
            return
        verify_s = max(answer.verify_s for answer in answers.values())
        stats = {
            "weights/version": float(policy.version),
            "weights/servers": float(len(answers)),
            "weights/broadcast_s": broadcast_s,
            "weights/round_s": round_s,
            "weights/lag_s": time.perf_counter() - policy.published_at - verify_s,
        }
        if span_s > 0:
            stats |= {"weights/span_s": span_s, "weights/gb_per_s": self._bytes / span_s / 1e9}
        for key in SERVER_TIMINGS:
            seconds = {name: float(getattr(answer, key)) for name, answer in answers.items()}
            stats[f"weights/{key}"] = max(seconds.values())
            stats |= {f"weights/{name}/{key}": value for name, value in seconds.items()}
        if probes := [answer.probe for answer in answers.values() if answer.probe is not None]:
            stats |= {"weights/probe": max(probes), "weights/probe_version": float(policy.version)}
        self.stats |= stats  # in one step: the learner's thread logs one whole round, not parts of two
        log.info("weights: version %d on %d server(s) after %.3f s", policy.version, len(answers), round_s)
