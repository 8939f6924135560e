"""Ray, which places one keeper per process, as an actor on a node with the GPUs of the process.

Used by `launch.py`; no other file imports ray but those that run as actors. `cluster.address` or RAY_ADDRESS names a
cluster to use; without it a small Ray is started on this machine and stopped again. Calls of a `RemoteKeeper` wait for
its keeper. A keeper that dies takes its process along; Ray makes a new keeper, which starts the process again, on
another node if its own is lost.
"""

import asyncio
import os
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from actors.doctor.run_file import cluster_of, gpus_missing, unreachable, without_place
from actors.process import FINAL, Event, Process
from actors.supervise.gang import Gang, LostMember
from actors.supervise.node.arrival import Delivery
from actors.supervise.node.gang_member import GangMember
from actors.supervise.node.node_keeper import NodeKeeper, Place
from actors.supervise.node.survey import Survey, survey
from actors.supervise.nodes import ClusterNode, NodeWatch
from configs.entrypoint import DONE
from configs.load import ConfigError
from configs.schema import Config

EVENTS_S = 30.0
"""A keeper without news answers a call for events after this long."""
STARTED_S = 20.0
"""Time for a keeper to start, so that processes start in order; one that waits for a node must not hold up the rest."""
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
CPU_SHARE = 0.01
"""Of a CPU, for a member of a gang without GPUs: a bundle must take something."""
ANSWER_S = 40.0
"""Time beyond its own limit that a keeper gets to answer that it has ended its process."""
CONNECTED: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "configure_logging": False}


class RemoteKeeper:
    """A `NodeKeeper` that is a Ray actor, made by `make`. Raises ray.exceptions.RayError when Ray itself is gone."""

    def __init__(self, process: Process, make: Callable[[], Any], is_alive: Callable[[str], bool]) -> None:
        self.process, self._make, self._is_alive = process, make, is_alive
        self._actor = make()
        self._place: Place | None = None
        self._seen = 0  # number of the last event of the keeper at `_place`
        self._moving = self._ended = False

    @property
    def nodes(self) -> list[str]:
        """The id of its node; empty before it has one."""
        return [self._place.node] if self._place else []

    async def started(self) -> None:
        """Wait until there is a keeper, STARTED_S at most."""
        with suppress(TimeoutError):
            self._place = await asyncio.wait_for(_answer(self._actor.place.remote()), STARTED_S)

    async def events(self, after: int) -> list[Event]:
        """Events later than number `after`; none if there was none for `EVENTS_S`."""
        import ray

        life = self._place.life if self._place else ""
        try:
            place, found = await _answer(self._actor.events.remote(life, self._seen, EVENTS_S))
        except (ray.exceptions.RayActorError, ray.exceptions.RayTaskError) as error:
            if self._ended:
                return [Event(after + 1, "ended", "it was waiting for a node", DONE)]
            why = str(error).strip().splitlines()[-1]
            return [Event(after + 1, "gave_up", f"Ray could not make its keeper: {why}")]
        if place.life != life:
            self._moving &= self._place is None
            self._place, self._seen = place, 0
        events = []
        for event in (event for event in found if event.number > self._seen):
            self._seen = event.number
            if event.kind in FINAL and self._moving:
                event = Event(0, "failed", "drained, for its node leaves; it starts on another one", event.code)
                self._replace()
            if event.kind == "started" and self._place is not None and self._place.node:
                event = replace(event, text=f"{event.text} on {place.address}")
            self._ended |= event.kind in FINAL
            events.append(replace(event, number=after + 1 + len(events)))  # machines number by clocks of their own
        if not place.shared:
            log_lines(self.process, events)
        return events

    async def leave(self, node: str, within_s: float) -> None:
        """Drain the process within `within_s`; `events` then has it started on another node."""
        if not self._ended:
            self._moving = True
            await self._end(within_s, self._actor.drain.options(max_task_retries=0), within_s)

    def _replace(self) -> None:
        import ray

        ray.kill(self._actor)
        self._actor, self._place, self._seen, self._moving = self._make(), None, 0, False

    async def drain(self, timeout_s: float) -> None:
        """As `Keeper.drain`; a keeper that waits for a node is given up."""
        await self._end(timeout_s, self._actor.drain, timeout_s)

    async def kill(self) -> None:
        """As `Keeper.kill`."""
        await self._end(0.0, self._actor.kill)

    async def _end(self, limit_s: float, method: Any, *arguments: float) -> None:
        import ray

        if self._place is None or not self._is_alive(self._place.node):
            self._ended = True
            ray.kill(self._actor)
            return
        with suppress(TimeoutError, ray.exceptions.RayActorError):
            await asyncio.wait_for(_answer(method.remote(*arguments)), limit_s + ANSWER_S)


class RemoteMember:
    """A `GangMember` that is a Ray actor: see `gang.Member`. `log` is its process's, on this machine."""

    def __init__(self, process: Process, actor: Any) -> None:
        self.process, self._actor = process, actor
        self._place: Place | None = None

    async def place(self) -> tuple[Place, str]:
        """Where it is, and why it is unfit; waits until Ray has made it."""
        self._place, unfit = await _answer(self._actor.place.options(max_task_retries=-1).remote())
        return self._place, unfit

    async def host(self) -> int:
        """As `GangMember.host`."""
        return int(await self._call(self._actor.host))

    async def start(self, env: dict[str, str], flags: Sequence[str]) -> None:
        """As `GangMember.start`."""
        await self._call(self._actor.start, env, flags)

    async def events(self, after: int) -> tuple[list[Event], list[str], bool]:
        """As `GangMember.events`."""
        if (answer := await self._call(self._actor.events, after, EVENTS_S)) is None:
            raise LostMember("its keeper was killed")
        events: list[Event] = answer[0]
        if self._place and not self._place.shared:
            log_lines(self.process, events)
        return events, answer[1], answer[2]

    async def drain(self, timeout_s: float) -> None:
        """As `GangMember.drain`."""
        await self._call(self._actor.drain, timeout_s)

    async def kill(self) -> None:
        """As `GangMember.kill`."""
        await self._call(self._actor.kill)

    async def _call(self, method: Any, *arguments: object) -> Any:
        import ray

        if self._place is None:
            raise LostMember("it has no node")
        try:
            return await _answer(method.remote(*arguments))
        except ray.exceptions.RayActorError as error:
            self._place = None
            raise LostMember(type(error).__name__) from None


class Cluster:
    """The Ray that this process is connected to, and the keepers of a run on it."""

    def __init__(self, config: Config, named: str) -> None:
        import ray

        self.config, self.named = config, named
        self.home: str = ray.get_runtime_context().get_node_id()
        self.address: str = ray.util.get_node_ip_address()
        self.known = _look()
        self.shipped = False
        self.delivery: Delivery | None = None
        """What goes along with each process; None on a Ray of this machine."""
        self._keepers: list[RemoteKeeper | Gang] = []
        self._watch: NodeWatch | None = None

    @property
    def gpus(self) -> list[int]:
        """GPUs of each node that stays, this machine first."""
        nodes = [node for id, node in self.known.items() if id != self.home and node.alive and node.leaves_at is None]
        return [self.known[self.home].gpus, *(node.gpus for node in nodes)]

    def check(self) -> None:
        """Raise ConfigError with all that keeps the run from this cluster."""
        keys = "learner.ranks, rollout.servers, rollout.tensor_parallel or reward.servers"
        remedy = f"lower {keys}, or set their device to cpu"
        found = []
        if missing := gpus_missing(self.config, sum(self.gpus), "Ray sees"):
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
        """What makes nodes unfit. Has Ray ship the working directory if that is what they lack."""
        nodes = {id: node.address for id, node in self.known.items() if node.alive and id != self.home}
        ship, first = self.config.cluster.ship, Survey()
        if ship != "always":
            first = survey(nodes, self.config)
            if not first.without_folder:
                return list(first.faults)
            if ship == "never":
                where = ", ".join(first.without_folder)
                return [
                    f"cluster.ship: never, but {os.getcwd()} is not on {where}; share it, or set cluster.ship: auto"
                ]
        self.shipped = True
        connect(self.config, self.named, ship=True)
        return list(survey(nodes, self.config).faults)

    def pack(self) -> None:
        """Take up what the nodes need: once the run's folder has config and keys."""
        if self.named and (self.config.run.path / "config.yaml").exists():
            self.delivery = Delivery.pack(self.config, self.address, self.shipped)

    async def watch(self, say: Callable[[str], None]) -> None:
        """Tell `say` what becomes of the nodes, until cancelled."""
        self._watch = NodeWatch(lambda: asyncio.to_thread(_look), lambda: self._keepers, say)
        await self._watch.watch()

    async def place(self, process: Process) -> "RemoteKeeper | Gang":
        """A keeper of `process`, on a node with its GPUs.

        Buffer and reward servers listen on addresses of this machine, so their keepers stay on it, and so does the
        learner unless it takes several nodes, or GPUs that this one lacks.
        """
        elsewhere = process.gpus > self.gpus[0]
        if process.role == "learner" and (process.nodes > 1 or elsewhere):
            self._keepers.append(gang := self._gang(process))
            return gang
        keeper = RemoteKeeper(process, partial(self._make, process), self._is_alive)
        self._keepers.append(keeper)
        await keeper.started()
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
            options["scheduling_strategy"] = "SPREAD"  # nothing else keeps them apart
        return ray.remote(NodeKeeper).options(**options).remote(process, self.delivery)

    def _gang(self, process: Process) -> Gang:
        """The learner's members, a node each: the first here if this machine has the GPUs."""
        import ray

        share = process.gpus // process.nodes
        bundles = [{"GPU": float(share)} if share else {"CPU": CPU_SHARE} for _ in range(process.nodes)]
        if share <= self.gpus[0]:
            bundles[0][f"node:{self.address}"] = CPU_SHARE
        group = ray.util.placement_group(bundles, strategy="STRICT_SPREAD")
        strategies, members = ray.util.scheduling_strategies, []
        for number in range(process.nodes):
            log = process.log if number == 0 else process.log.with_name(f"{process.name}-node{number}.log")
            part, place = replace(process, log=log), strategies.PlacementGroupSchedulingStrategy(group, number)
            options = {"num_cpus": 0, "num_gpus": share, "max_concurrency": 8, "scheduling_strategy": place}
            actor = ray.remote(GangMember).options(max_restarts=-1, **options)  # its calls fail when it is lost
            members.append(RemoteMember(part, actor.remote(part, self.delivery)))
        return Gang(process, members, self._gone, self._flags)

    async def _gone(self, node: str, limit_s: float) -> None:
        assert self._watch is not None, "a node leaves, and nobody has said so"
        await self._watch.gone(node, limit_s)

    def _flags(self, address: str) -> list[str]:
        """Rank 0 serves policies at its own node's address, unless the run file names another one than this node's."""
        moves = address != self.address and self.config.weights.host == self.address
        return [f"--weights.host={address}"] if moves else []


def _look() -> Mapping[str, ClusterNode]:
    """Ray's nodes by id."""
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


def _answer(reference: Any) -> Any:
    """A future of a call's answer; to cancel it leaves the call alone."""
    return asyncio.wrap_future(reference.future())


def log_lines(process: Process, events: Sequence[Event]) -> None:
    """Write what a process printed on a node without the run's folder to its log here."""
    if events:
        process.log.parent.mkdir(parents=True, exist_ok=True)
        with open(process.log, "a", encoding="utf-8") as file:
            for event in events:
                head = "" if event.kind == "line" else f"--- {process.name} {event.kind}: "
                file.write(f"{head}{event.text}\n")


def connect(config: Config, named: str, ship: bool = False) -> None:
    """Connect to the cluster `named`. Raises ConfigError if it does not answer or the folder cannot be shipped."""
    import ray

    options = dict(CONNECTED)
    if ship:
        ray.shutdown()
        folder, runs = Path.cwd(), config.run.folder
        excludes = [f"/{runs.relative_to(folder)}"] if runs.is_relative_to(folder) and runs != folder else []
        options["runtime_env"] = {"working_dir": str(folder), "excludes": excludes}
    try:
        ray.init(address=named, **options)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = "ship the working directory" if ship else "connect"
        raise ConfigError([f"cluster.address: {named}: cannot {what}: {str(error).strip().splitlines()[0]}"]) from None


@contextmanager
def ray_cluster(config: Config) -> Iterator[Cluster]:
    """Connect to Ray inside a `with`, to the cluster that is named or to a Ray started here. Raises ConfigError if the
    run cannot be placed on it."""
    named = cluster_of(config)
    with ExitStack() as stack:
        if named:
            os.environ.setdefault("RAY_BACKEND_LOG_LEVEL", "fatal")  # a lost node is told in words
        else:
            for key, value in {**LOCAL_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(32)}.items():
                os.environ.setdefault(key, value)
            parent = None if len(tempfile.gettempdir()) < MAX_FOLDER else "/tmp"
            temporary = tempfile.TemporaryDirectory(prefix="headrace-", dir=parent, ignore_cleanup_errors=True)
            options = {"address": "local", "num_cpus": 1, "object_store_memory": OBJECT_STORE_BYTES}
            options |= {"include_dashboard": False, "_temp_dir": stack.enter_context(temporary)}
        import ray  # reads the environment on import

        stack.callback(ray.shutdown)
        connect(config, named) if named else ray.init(**options, **CONNECTED)
        cluster = Cluster(config, named)
        cluster.check()
        yield cluster
