"""Worker processes for users' code, which can end its worker, but never the server.

    server            warden (one per worker)            worker
    Cage  <------------- calls, results ------------->  the user's function
          <--- ends ---  time, memory, output, kill -->

The server unpickles nothing. The cage is no security boundary: a worker has the server's user, files and network.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.plain_text import concealed
from rollout.errors import EpisodeError

GRACE_S = 4.0


@dataclass(frozen=True)
class CagedFunction:
    """A user's function, how a worker gets it, and its limits. None: no limit.

    The worker calls `loader` (`module:function`) with `arguments`. `memory_gib` and `max_processes` are of the worker
    with all that it started. `prefix` and a field's name are the run file's key. Worker 0 prints to `{log}-0.log`. A
    worker runs one call at a time; if the function's attribute `about` says `async`, up to `concurrency`; with
    `episodes`, any number of `await function(problem, generate)`. A worker or a cancelled call has `grace_s` to end by
    itself.
    """

    name: str
    loader: str
    arguments: Sequence[Any]
    timeout_s: float
    memory_gib: float | None = None
    max_calls: int | None = None
    load_timeout_s: float = 120.0
    prefix: str = "reward."
    episodes: bool = False
    concurrency: int = 1
    log: str | None = None
    max_processes: int = 256
    grace_s: float = GRACE_S
    cancel_again_s: float = 1.0
    concealed: Mapping[str, str] = field(default_factory=concealed, repr=False)
    """Credentials of the run, and what replaces them in the log."""


class CagedError(EpisodeError):
    """A call of a user's function has no result; the text says why, in one line.

    `origin`: an exception's type, or `died`, `timed_out`, `out_of_memory`, `unloadable`, or `unanswerable` (the result
    cannot travel).
    """

    def __init__(
        self, reason: str, origin: str, detail: str = "", permanent: bool = False, returned: bool = False
    ) -> None:
        super().__init__(reason, permanent, origin)
        self.returned, self.detail = returned, detail
        if detail:
            self.add_note(detail)


class Unloadable(CagedError, ValueError):
    """The function cannot be loaded at the start: bad input."""
