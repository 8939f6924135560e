"""Ray places one keeper per process, as an actor on a node with the GPUs of the process.

`cluster.address` or RAY_ADDRESS names the cluster; with `local` a small Ray is started here and stopped again. A keeper
that dies takes its process along. Ray then makes a new keeper, on another node if its own is lost.
"""

import asyncio
import os
import re
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import psutil

from actors.doctor.run_file import GPU_KEYS, gpus_missing, unreachable, without_place
from actors.process import Process
from actors.supervise.cluster.arrival import Delivery
from actors.supervise.cluster.gang_member import GangMember
from actors.supervise.cluster.node_keeper import NodeKeeper
from actors.supervise.cluster.remote import STARTED_S, RemoteKeeper, RemoteMember
from actors.supervise.cluster.survey import survey
from actors.supervise.gang import Gang
from actors.supervise.nodes import ClusterNode, NodeWatch, in_a_line
from buffer.curve import split
from configs.checks import cluster_of, named_by
from configs.entrypoint import blocked
from configs.load import ConfigError
from configs.schema import Config
from configs.variables import RAY_BYTES, socket_folder

OBJECT_STORE_BYTES = 80 << 20
"""Ray's minimum is 75 MiB; keepers send only text."""
NEEDED_LAST = ("raylet", "gcs_server")
"""Ray's other processes need these to end."""
LOCAL_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_memory_monitor_refresh_ms": "0",  # it would kill keepers, the smallest processes
    "RAY_enable_metrics_collection": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # Ray listens on loopback only
}
CPU_SHARE = 0.01
"""Lets Ray count and spread processes without GPUs."""
CONNECT_S = 10.0
CONNECTED: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


class Cluster:
    """A run's keepers on the connected Ray."""

    def __init__(self, config: Config, named: str) -> None:
        import ray

        self.config, self.named = config, named
        self.home: str = ray.get_runtime_context().get_node_id()
        self.address: str = ray.util.get_node_ip_address()
        self.known = _look()
        self.shipped = False
        self.delivery: Delivery | None = None
        """None on a Ray of this machine."""
        self._keepers: WeakSet[RemoteKeeper | Gang] = WeakSet()  # Ray ends an actor that nobody holds
        self._watch: NodeWatch | None = None

    @property
    def gpus(self) -> list[int]:
        nodes = [node for id, node in self.known.items() if id != self.home and node.alive and node.leaves_at is None]
        return [self.known[self.home].gpus, *(node.gpus for node in nodes)]

    def check(self) -> None:
        """Raises ConfigError."""
        remedy = f"lower {GPU_KEYS}, or set their device to cpu"
        found = []
        ray = f"Ray ({named_by(self.config)}: {self.named})" if self.named else "Ray"
        if missing := gpus_missing(self.config, sum(self.gpus), f"{ray} sees"):
            found.append(f"{missing}: {remedy}")
        elif missing := without_place(self.config, self.gpus):
            found.append(f"{missing}; {remedy}" if self.named else f"{missing}; set cluster.address, or RAY_ADDRESS")
        if len(self.gpus) > 1:
            elsewhere = f"the cluster has {len(self.gpus)} nodes; name {self.address}"
            found += [f"{line}, but {elsewhere}" for line in unreachable(self.config).values()]
        if self.named:
            found += self._survey()
        if found:
            raise ConfigError(found)

    def _survey(self) -> list[str]:
        """Has Ray ship the working directory if nodes lack it."""
        nodes = {id: node.address for id, node in self.known.items() if node.alive and id != self.home}
        ship = self.config.cluster.ship
        if ship != "always":
            found = survey(nodes, self.config)
            if ship == "never" or not found.without_folder:
                return list(found.faults)
        self.shipped = True
        connect(self.config, self.named, ship=True)
        return list(survey(nodes, self.config).faults)

    def pack(self) -> None:
        if self.named and (self.config.run.path / "config.yaml").exists():
            self.delivery = Delivery.pack(self.config, self.address, self.shipped)

    async def watch(self, say: Callable[[str], None]) -> None:
        self._watch = NodeWatch(lambda: asyncio.to_thread(_look), lambda: list(self._keepers), say)
        await self._watch.watch()

    async def place(self, process: Process) -> "RemoteKeeper | Gang":
        """Buffer, reward and teacher servers listen on addresses of this machine, so they stay here; so does the
        learner unless it needs several nodes or more GPUs."""
        elsewhere = process.gpus > self.gpus[0]
        if process.role == "learner" and (process.nodes > 1 or elsewhere):
            self._keepers.add(gang := await self._gang(process))
            return gang
        keeper = RemoteKeeper(process, partial(self._make, process), self._is_alive)
        self._keepers.add(keeper)
        try:
            await keeper.started()
        except asyncio.CancelledError:  # it is not wanted any more
            keeper.release()
            raise
        return keeper

    def _is_alive(self, node: str) -> bool:
        known = self._watch.known if self._watch else self.known
        return node not in known or known[node].alive

    def _make(self, process: Process) -> Any:
        import ray

        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": process.gpus, "max_concurrency": 8}
        options |= {"max_restarts": -1, "max_task_retries": -1}
        if process.role != "rollout":
            at_home = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(self.home, soft=False)
            options["scheduling_strategy"] = at_home
        elif not process.gpus:
            options |= {"num_cpus": CPU_SHARE if self.named else 0, "scheduling_strategy": "SPREAD"}
        return ray.remote(NodeKeeper).options(**options).remote(process, self.delivery and self.delivery.to(process))

    async def _gang(self, process: Process) -> Gang:
        """Waits up to STARTED_S until Ray has reserved the nodes, so that no server takes them first."""
        import ray

        share = process.gpus // process.nodes
        bundles = [{"GPU": float(share)} if share else {"CPU": CPU_SHARE} for _ in range(process.nodes)]
        if share <= self.gpus[0]:
            bundles[0][f"node:{self.address}"] = CPU_SHARE
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        try:
            await asyncio.to_thread(group.wait, STARTED_S)
        except asyncio.CancelledError:
            ray.util.remove_placement_group(group)
            raise
        strategies, members = ray.util.scheduling_strategies, []
        for number in range(process.nodes):
            log = process.log if number == 0 else process.log.with_name(f"{process.name}-node{number}.log")
            part, place = replace(process, log=log), strategies.PlacementGroupSchedulingStrategy(group, number)
            options = {"num_cpus": 0, "num_gpus": share, "max_concurrency": 8, "scheduling_strategy": place}
            actor = ray.remote(GangMember).options(max_restarts=-1, **options)  # its calls fail when it is lost
            delivery = self.delivery and self.delivery.to(process)
            members.append(RemoteMember(part, actor.remote(part, delivery)))
        return Gang(process, members, self._gone, self._flags)

    async def _gone(self, node: str, limit_s: float) -> None:
        assert self._watch is not None, "a node leaves, and nobody has said so"
        await self._watch.gone(node, limit_s)

    def _flags(self, address: str) -> list[str]:
        """Rank 0 serves policies at its own node's address, unless the run file names another."""
        moves = address != self.address and self.config.weights.host == self.address
        return [f"--weights.host={address}"] if moves else []

    def room(self, gpus: int) -> int | None:
        from ray._private import state  # the public function sums over the nodes

        if not gpus:
            return None
        known = self._watch.known if self._watch else self.known
        leaving = {id for id, node in known.items() if node.leaves_at is not None}
        free = state.available_resources_per_node()
        return sum(int(node.get("GPU", 0)) // gpus for id, node in free.items() if id not in leaving)


def _look() -> Mapping[str, ClusterNode]:
    import ray

    leaving = ray._private.state.state.get_draining_nodes()  # what Ray Train asks; there is no public call
    return {
        node["NodeID"]: ClusterNode(
            node["NodeManagerAddress"],
            int(node["Resources"].get("GPU", 0)),
            node["Alive"],
            leaving[node["NodeID"]] / 1000 if node["NodeID"] in leaving else None,
        )
        for node in ray.nodes()
    }


def connect(config: Config, named: str, ship: bool = False) -> None:
    """Raises ConfigError."""
    import ray

    options = dict(CONNECTED)
    if ship:
        ray.shutdown()
        folder, runs = Path.cwd(), config.run.folder
        excludes = [f"/{runs.relative_to(folder)}"] if runs.is_relative_to(folder) and runs != folder else []
        options["runtime_env"] = {"working_dir": str(folder), "excludes": excludes}
    try:
        if re.fullmatch(r".+:\d+", named):  # Ray itself would try for minutes
            socket.create_connection(split(named), CONNECT_S).close()
        ray.init(address=named, **options)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = "ship the working directory" if ship else "connect"
        problem = f"cannot {what}: {str(error).strip().splitlines()[0]}"
        raise ConfigError([f"{named_by(config)}: {named}: {problem}; see `ray status`"]) from None


def start(folder: str) -> None:
    """Start Ray here. Raises ConfigError if it does not start within its own 30 s.

    Ray and keepers inherit a mask that blocks SIGTERM: a SIGTERM to all processes of a job ends only the launcher,
    which drains the run.
    """
    import ray

    options: dict[str, Any] = {"address": "local", "num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
    try:
        with blocked(signal.SIGTERM):
            ray.init(**options, **CONNECTED, include_dashboard=False, _temp_dir=folder)
    except Exception as error:
        if type(error) is not Exception:  # Ray raises this very class
            raise
        remedy = "where others keep its CPUs or its disk busy, launch again later"
        raise ConfigError([f"Ray: cannot start on this machine: {in_a_line(error)}; {remedy}"]) from None


def stop() -> None:
    """Ray would wait a second for each process that blocks SIGTERM, so these are killed."""
    import ray

    for process in psutil.Process().children():
        with suppress(psutil.NoSuchProcess):
            if "ray" in " ".join(process.cmdline()) and process.name() not in NEEDED_LAST:
                process.kill()
    ray.shutdown()


@contextmanager
def ray_cluster(config: Config) -> Iterator[Cluster]:
    """Connect to the named Ray, or start one. Raises ConfigError."""
    named = cluster_of(config)
    with ExitStack() as stack:
        os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # `nodes.py` reports lost nodes
        if not named:
            for key, value in {**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
                os.environ.setdefault(key, value)
            parent = socket_folder(RAY_BYTES)  # `configs.variables.problems` refuses a machine without one
            temporary = tempfile.TemporaryDirectory(prefix="headrace-", dir=parent, ignore_cleanup_errors=True)
            folder = Path(stack.enter_context(temporary), "r")  # Ray opens its own folder to all users
        import ray  # reads the environment on import

        stack.callback(ray.shutdown if named else stop)
        connect(config, named) if named else start(str(folder))
        cluster = Cluster(config, named)
        cluster.check()
        yield cluster
