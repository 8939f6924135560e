"""Ray, which places one keeper per process, as an actor on a node with the GPUs of the process.

Used by `launch.py`; no other file imports ray. `RAY_ADDRESS` names a cluster to use; without it a small Ray is started
on this machine and stopped again. Calls of a `RemoteKeeper` wait for its keeper. A keeper that dies takes its process
along; Ray makes a new keeper, which starts the process again.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from actors.process import Event, Process
from actors.supervise.keeper import Keeper

EVENTS_S = 30.0
"""A keeper without news answers a call for events after this long."""
OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum is 75 MiB; keepers send lines of text only."""
MAX_FOLDER = 40
"""Characters: Ray's sockets lie below the temporary folder, and the path of a socket may have 107 characters."""
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill keepers, the smallest processes of all
    "RAY_enable_metrics_collection": "0",
}


class RemoteKeeper:
    """A `Keeper` that is a Ray actor. Raises ray.exceptions.RayError when Ray itself is gone."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def events(self, after: int) -> list[Event]:
        """Events later than number `after`; none if there was none for `EVENTS_S`."""
        found: list[Event] = await self._actor.events.remote(after, EVENTS_S)
        return found

    async def drain(self, timeout_s: float) -> None:
        """As `Keeper.drain`."""
        await self._actor.drain.remote(timeout_s)

    async def kill(self) -> None:
        """As `Keeper.kill`."""
        await self._actor.kill.remote()

    def release(self) -> None:
        """End the keeper itself, wherever it is or waits to be: what Ray gave it is free."""
        import ray

        ray.kill(self._actor)


async def place(process: Process) -> RemoteKeeper:
    """A keeper of `process`, on a node with its GPUs (one actor is on one node, so learner ranks are together).

    Buffer, learner and reward servers listen on addresses of this machine, so their keepers stay on it. Called inside
    `ray_cluster`.
    """
    import ray

    options: dict[str, Any] = {"num_cpus": 0, "num_gpus": process.gpus, "max_concurrency": 8}
    options |= {"max_restarts": -1, "max_task_retries": -1}
    if process.role != "rollout":
        here = ray.get_runtime_context().get_node_id()
        strategies = ray.util.scheduling_strategies
        options["scheduling_strategy"] = strategies.NodeAffinitySchedulingStrategy(here, soft=False)
    keeper = RemoteKeeper(ray.remote(Keeper).options(**options).remote(process))
    try:
        await keeper.events(0)
    except asyncio.CancelledError:  # it is not wanted any more, placed or not
        keeper.release()
        raise
    return keeper


def room(gpus: int) -> int | None:
    """How many more processes of `gpus` GPUs Ray has room for, each of them on one node; None: any number."""
    from ray._private import state  # the public function sums over the nodes

    free = state.available_resources_per_node() if gpus else {}
    return sum(int(node.get("GPU", 0)) // gpus for node in free.values()) if gpus else None


@contextmanager
def ray_cluster() -> Iterator[int]:
    """Connect to Ray inside a `with`, to the cluster of `RAY_ADDRESS` or to a Ray started here; the GPUs it has."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}
    with ExitStack() as stack:
        if "RAY_ADDRESS" not in os.environ:
            for key, value in {**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
                os.environ.setdefault(key, value)
            parent = None if len(tempfile.gettempdir()) < MAX_FOLDER else "/tmp"
            temporary = tempfile.TemporaryDirectory(prefix="headrace-", dir=parent, ignore_cleanup_errors=True)
            options |= {"address": "local", "num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
            options |= {"include_dashboard": False, "_temp_dir": stack.enter_context(temporary)}
        import ray  # reads the environment on import

        stack.callback(ray.shutdown)
        ray.init(**options)
        yield int(ray.cluster_resources().get("GPU", 0))
