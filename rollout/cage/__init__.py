"""Worker processes for users' code: a reward function or a task can end its worker process, but never the server.

    server                      warden (one per worker)            worker
    Cage / CagedTask  <------------ calls, results ------------->  the user's function
                      <- ends ->  time, memory, output, kill  -->

`Cage` (`cage.py`) runs calls one at a time per worker, `CagedTask` (`caged_task.py`) runs many episodes at a time per
worker. Both keep their workers alive through a `WorkerSet`. Each worker is the child of a warden (`warden.py`), a
small process that enforces the limits, captures the output and leaves no process behind. Everything that users' code
returns travels as MessagePack of plain values; the server unpickles nothing.

The cage is against accidents. It is no security boundary: a worker has the server's user, files and network.
"""

from typing import Literal

Kind = Literal["raised", "exited", "died", "timed_out", "out_of_memory", "unloadable", "unanswerable"]
"""What happened: an exception; `sys.exit`; the end of the process; a limit of time or memory; a function that cannot
be loaded; a result that cannot travel."""


class CagedError(Exception):
    """A call of a user's function has no result; `reason` says why, in one line.

    `detail`: traceback and last output, several lines, at most about 100 KiB. `bystander`: an episode that ended only
    because another one ended their common worker; it may be tried again at no cost. `permanent`: no other attempt can
    do better. Example: `CagedError("exited", "score.py:score called sys.exit(0)", "File ...")`.
    """

    def __init__(
        self, kind: Kind, reason: str, detail: str = "", bystander: bool = False, permanent: bool = False
    ) -> None:
        super().__init__(kind, reason, detail, bystander, permanent)
        self.kind, self.reason, self.detail = kind, reason, detail
        self.bystander, self.permanent = bystander, permanent

    def __str__(self) -> str:
        return self.reason

    def copy(self) -> "CagedError":
        """The same failure for another caller, without this one's traceback."""
        return CagedError(self.kind, self.reason, self.detail, self.bystander, self.permanent)
