"""One round at a server, from Go until its buckets are free: what its workers report, and with what it is verified.

Kept up to date by `follow.Receiver` and `rounds.Rounds`; nothing in it waits. `StagedPolicy` and `StreamedPolicy` wait
for its `probe`.
"""

import asyncio
from dataclasses import dataclass, field

from buffer.data.images import ImageFormat
from learner.weights.protocol import Checksums, Failed, Go, Probe, Staged


@dataclass(eq=False)
class Reception:
    """`workers` of them receive the round of `go`. Make it in an event loop."""

    go: Go
    workers: int
    form: ImageFormat | None = None
    """How this server's model sees images."""
    reports: list[Staged] = field(default_factory=list)
    checksums: Checksums | None = None
    """The learner's, once they have arrived."""
    probe: "asyncio.Future[Probe | None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The learner's probe, or None once it is known not to come. Only if `go` says that one follows."""
    given_up_at: float = 0.0
    """When the round was given up, if it was, by the receiver's clock."""

    @property
    def complete(self) -> bool:
        """Whether all workers have reported."""
        return len(self.reports) >= self.workers

    def failure(self) -> Failed | None:
        """Why the version cannot be loaded, as far as is known once all workers have reported."""
        bad = max((report for report in self.reports if report.reason), key=lambda report: report.fatal, default=None)
        if bad:
            return Failed(round=self.go.round, reason=bad.reason, fatal=bad.fatal)
        for report in self.reports if self.checksums else ():
            assert self.checksums
            for bucket, (ours, theirs) in enumerate(zip(report.checksums, self.checksums.checksums, strict=True)):
                if ours != theirs:
                    reason = f"bucket {bucket}: checksum {ours} here, {theirs} at the learner"
                    return Failed(round=self.go.round, reason=f"version {self.go.version}, {reason}", fatal=True)
        return None

    def take_probe(self, probe: Probe | None) -> None:
        """`probe` has come; None: none will, because the learner is gone or went on to another round."""
        if not self.probe.done():
            self.probe.set_result(probe)
