"""The launcher's interface to what places processes: Ray on a cluster, or nothing but this machine."""

from collections.abc import Callable, Sequence
from typing import Protocol

from actors.process import Event, Process


class Placed(Protocol):
    """A keeper of one process, wherever it is."""

    async def events(self, after: int) -> list[Event]:
        """Events later than number `after`; waits half a minute for one."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to what is left after `timeout_s`; returns when nothing is left."""
        ...

    async def kill(self) -> None:
        """Kill the process and all its descendants; returns when nothing is left."""
        ...

    def release(self) -> None:
        """Let others have its GPUs, once its process is gone."""
        ...


class Placement(Protocol):
    """The machines of a run."""

    @property
    def gpus(self) -> Sequence[int]:
        """GPUs of each machine, this one first."""
        ...

    def pack(self) -> None:
        """Take up what other machines need, once the run's folder has config and keys."""
        ...

    async def place(self, process: Process) -> Placed:
        """A keeper of `process`, which waits for GPUs."""
        ...

    def room(self, gpus: int) -> int | None:
        """How many more processes of `gpus` GPUs there is room for; None: any number."""
        ...

    async def watch(self, say: Callable[[str], None]) -> None:
        """Say what becomes of the machines, until cancelled."""
        ...
