"""Where keepers live: Ray, which places one actor a process on a node with its GPUs. The only module of ours that
imports Ray.

Used by `actors/supervise/launch.py`. `RAY_ADDRESS` names a cluster to use; without it a small Ray of this machine is started and
stopped again. Calls of a `Kept` wait for its keeper. A keeper that dies takes its process with it; Ray makes a new one,
which starts the process again.
"""

import os
import secrets
import shutil
import tempfile
from types import TracebackType
from typing import Any, Protocol

from actors.supervise.keeper import Event, Keeper, Process

EVENTS_S = 30.0
"""A keeper answers a call for events after so long even if there are none."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's least is 75 MiB; keepers move lines of text."""
SOCKET_PATH = 40
"""Ray's sockets lie below the temporary folder, and a socket's path may have 107 characters."""


class Kept(Protocol):
    """A keeper, seen from the launcher."""

    async def events(self, after: int) -> list[Event]: ...

    async def drain(self, bound_s: float) -> None: ...

    async def kill(self) -> None: ...


class RayKept:
    """A keeper that is a Ray actor. Raises ray.exceptions.RayError when Ray itself is gone."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def events(self, after: int) -> list[Event]:
        found: list[Event] = await self._actor.events.remote(after, EVENTS_S)
        return found

    async def drain(self, bound_s: float) -> None:
        await self._actor.drain.remote(bound_s)

    async def kill(self) -> None:
        await self._actor.kill.remote()


class Ray:
    """Ray for the length of a `with`."""

    def __enter__(self) -> "Ray":
        self._folder: str | None = None
        quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
        if "RAY_ADDRESS" not in os.environ:
            for key, value in EMBEDDED.items():
                os.environ.setdefault(key, value)
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            parent = tempfile.gettempdir()
            self._folder = tempfile.mkdtemp(prefix="headrace-", dir=parent if len(parent) < SOCKET_PATH else "/tmp")
            quiet |= {"address": "local", "num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
            quiet |= {"include_dashboard": False, "_temp_dir": self._folder}
        import ray  # after the environment is set: Ray reads it on import

        self._ray = ray
        ray.init(**quiet)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def gpus(self) -> int:
        """GPUs of all nodes."""
        return int(self._ray.cluster_resources().get("GPU", 0))

    async def place(self, process: Process) -> Kept:
        """A keeper of `process`, on a node with its GPUs (one actor is on one node, so learner ranks are together).

        Buffer and learner serve addresses of this machine, so their keepers stay on it.
        """
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": process.gpus,
            "max_concurrency": 8,
            "max_restarts": -1,
            "max_task_retries": -1,
        }
        if process.role != "rollout":
            here = self._ray.get_runtime_context().get_node_id()
            strategies = self._ray.util.scheduling_strategies
            options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(here, soft=False)
        kept = RayKept(self._ray.remote(Keeper).options(**options).remote(process))
        await kept.events(0)
        return kept


EMBEDDED = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill keepers, the smallest processes of all
    "RAY_enable_metrics_collection": "0",
}
