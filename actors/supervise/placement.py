"""What the launcher needs of whatever places its processes: Ray on a cluster (`ray_cluster.py`), or nothing but this
machine (`one_machine.py`).

Protocols only. `launch.py` chooses one `Placement`, and the supervisor calls the `Placed` keepers that it makes.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from actors.process import Event, Process


class Placed(Protocol):
    """A keeper of one process, wherever it is."""

    async def events(self, after: int) -> list[Event]:
        """Events later than number `after`; waits for one, or for half a minute."""
        ...

    async def drain(self, timeout_s: float) -> None:
        """Send SIGTERM, and SIGKILL to what is left after `timeout_s`; returns when nothing is left."""
        ...

    async def kill(self) -> None:
        """Send SIGKILL to the process and all its descendants; returns when nothing is left."""
        ...

    def release(self) -> None:
        """Let others have its GPUs, once its process is gone."""
        ...


class Placement(Protocol):
    """The machines of a run, which have room for it."""

    @property
    def gpus(self) -> Sequence[int]:
        """GPUs of each machine, this one first."""
        ...

    def pack(self) -> None:
        """Take up what other machines need: once the run's folder has config and keys."""
        ...

    async def place(self, process: Process) -> Placed:
        """A keeper of `process`, on a machine with its GPUs. Where none is free yet, the keeper waits for them."""
        ...

    def room(self, gpus: int) -> int | None:
        """How many more processes of `gpus` GPUs there is room for; None: any number."""
        ...

    async def watch(self, say: Callable[[str], None]) -> None:
        """Say what becomes of the machines, until there is nothing to say any more or until cancelled."""
        ...
