"""One round at a server, from Go until its buckets are free."""

import asyncio
from dataclasses import dataclass, field

from learner.weights.protocol import Checksums, Failed, Go, Probe, Staged
from learner.weights.receiver.comparison import Comparison


@dataclass(eq=False)
class Reception:
    """The round of `go`, which `workers` receive."""

    go: Go
    workers: int
    comparison: Comparison
    reports: list[Staged] = field(default_factory=list)
    checksums: Checksums | None = None
    probe: "asyncio.Future[Probe | None]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    given_up_at: float = 0.0

    @property
    def complete(self) -> bool:
        return len(self.reports) >= self.workers

    def failure(self) -> Failed | None:
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
        if not self.probe.done():
            self.probe.set_result(probe)
