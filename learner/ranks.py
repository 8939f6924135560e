"""Starts this node's ranks, a `python -m learner` each, passes signals on, and ends all if one fails. torch elastic
restarts none: the keeper does, from the last checkpoint. Nodes exchange signals and failures through the first node's
store, so the ranks of all nodes end together."""

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import suppress
from datetime import timedelta
from errno import EADDRINUSE

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from configs.entrypoint import ABOVE, DONE, ENDINGS, FAILED, FORCING, PROGRESS, STOPPING, StopSignals
from configs.load import ConfigError
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.schema import LearnerConfig
from configs.variables import RANK, TORCHRUN
from learner.mesh import MEET_S, THERE_IS_A_STORE, UNSET, open_store, wait_for

log = logging.getLogger(__name__)
HOST = "127.0.0.1"
LAST_S = 30.0
"""Time for ranks to end by themselves once the other nodes' have ended."""
REACHED_S = 10.0
MEETING = ("MASTER_ADDR", "MASTER_PORT")
ELASTIC_HANDLES = "TORCHELASTIC_SIGNALS_TO_HANDLE"


def from_slurm(learner: LearnerConfig, environment: Mapping[str, str]) -> dict[str, str]:
    """torchrun's variables from srun's, if srun has started this process. Raises ConfigError."""
    decided = {"RANK", "NODE_RANK", PROGRESS}  # a keeper sets PROGRESS, and may run in a task of srun itself
    if "SLURM_STEP_NUM_TASKS" not in environment or environment.keys() & decided:
        return {}
    remedy = "unset SLURM_STEP_NUM_TASKS if srun has not started this process"
    tasks = number("SLURM_STEP_NUM_TASKS", environment, 1, None, remedy)
    if tasks == 1:
        return {}
    if tasks not in (learner.ranks, learner.nodes):
        problem = f"learner.ranks: {learner.ranks} on learner.nodes {learner.nodes}, but srun has started {tasks} tasks"
        raise ConfigError([f"{problem}; start {learner.ranks} (one per rank) or {learner.nodes} (one per node)"])
    process = str(number("SLURM_PROCID", environment, 0, tasks - 1, remedy))
    if tasks == learner.ranks:
        nodes = number("SLURM_STEP_NUM_NODES", {"SLURM_STEP_NUM_NODES": "1", **environment}, 1, tasks, remedy)
        local = str(number("SLURM_LOCALID", environment, 0, tasks // nodes - 1, remedy))
        rank = {"RANK": process, "LOCAL_RANK": local}
        return rank | {"WORLD_SIZE": str(tasks), "LOCAL_WORLD_SIZE": str(tasks // nodes)}
    return {"NODE_RANK": process}


def check_environment(learner: LearnerConfig, environment: MutableMapping[str, str]) -> None:
    """Remove left-over variables. Raises ConfigError if others are incomplete or contradict the run file."""
    if "RANK" in environment:
        _check_rank(learner, environment)
    else:
        for name in [*RANK, *(() if learner.nodes > 1 else MEETING)]:
            environment.pop(name, None)
        _check_node(learner.nodes, environment)


def _check_rank(learner: LearnerConfig, environment: MutableMapping[str, str]) -> None:
    ranks, unset = learner.ranks, UNSET
    world = number("WORLD_SIZE", environment, 1, None, f"set it to learner.ranks ({ranks}), or {unset}")
    if world != ranks and (ranks > 1 or TORCHRUN not in environment):  # torchrun knows
        problem = f"learner.ranks: {ranks}, but WORLD_SIZE is {world}"
        raise ConfigError([f"{problem}; set learner.ranks to {world}, or {unset}: the learner starts its own ranks"])
    rank = number("RANK", environment, 0, world - 1, f"give each rank its own of WORLD_SIZE ({world}), or {unset}")
    if world == 1:
        for name in (*RANK, *MEETING, "NODE_RANK"):
            environment.pop(name, None)
        return
    local = world // learner.nodes
    if "LOCAL_WORLD_SIZE" in environment:
        local = number("LOCAL_WORLD_SIZE", environment, 1, world, "set it to the ranks of each node")
    environment.setdefault("LOCAL_RANK", str(rank % local))
    number("LOCAL_RANK", environment, 0, local - 1, f"set it to this rank's number on its node, or {unset}")
    _check_meeting(environment)
    hosts = rank == 0 and environment.get(THERE_IS_A_STORE) != "True"
    if hosts and (problem := unreachable(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))):
        raise ConfigError([f"{problem}, or {unset}"])


def _check_node(nodes: int, environment: Mapping[str, str]) -> None:
    node = environment.get("NODE_RANK", None if nodes > 1 else "0")
    if node is None:
        remedy = f"start one on each node with NODE_RANK 0 to {nodes - 1}, MASTER_ADDR and MASTER_PORT, or use torchrun"
        raise ConfigError([f"learner.nodes: {nodes}, and nothing says which of them this is; {remedy}"])
    if not (node.isdecimal() and int(node) < nodes):
        raise ConfigError([f"NODE_RANK: {node} is not one of 0 to {nodes - 1}; correct it or learner.nodes ({nodes})"])
    if nodes > 1:
        _check_meeting(environment)


def _check_meeting(environment: Mapping[str, str]) -> None:
    for name in MEETING:
        if not environment.get(name):
            remedy = "set it to the first node's address" if name == "MASTER_ADDR" else "set a free port of that node"
            raise ConfigError([f"{name}: not set, so the ranks cannot find each other; {remedy}"])
    port, master = environment["MASTER_PORT"], environment["MASTER_ADDR"]
    if not (port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError([f"MASTER_PORT: {port} is no port; set a free one of the first node, 1 to 65535"])
    try:
        socket.getaddrinfo(master, int(port), type=socket.SOCK_STREAM)
    except OSError as error:
        remedy = "set it to the first node's address"
        raise ConfigError([f"MASTER_ADDR: {master} is not a known machine ({error.strerror}); {remedy}"]) from None


def number(name: str, environment: Mapping[str, str], least: int, most: int | None, remedy: str) -> int:
    """Read a variable. Raises ConfigError."""
    value = environment.get(name)
    if value is not None and value.strip().isdecimal():
        found = int(value)
        if found >= least and (most is None or found <= most):
            return found
    bounds = f"{least} or more" if most is None else f"{least} to {most}"
    raise ConfigError([f"{name}: {'not set' if value is None else f'{value!r} is not one of {bounds}'}; {remedy}"])


def unreachable(host: str, port: int, limit_s: float = REACHED_S) -> str:
    """Why other ranks would not reach rank 0; else empty."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, port), family=family) as listener:
            listener.settimeout(limit_s)
            with socket.create_connection((host, port), limit_s) as caller:
                while True:  # another rank may be trying already
                    arrived, where = listener.accept()
                    arrived.close()
                    if where[1] == caller.getsockname()[1]:
                        break
        return ""
    except OSError as error:
        if error.errno == EADDRINUSE:
            return f"MASTER_PORT: {port} is taken on this machine, where rank 0 listens; choose a free one"
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror
        remedy = "set it to an address of this machine at which the other ranks reach it"
        return f"MASTER_ADDR: rank 0 cannot be reached at {host}, port {port} ({why} within {limit_s:g} s); {remedy}"


def start(argv: Sequence[str], learner: LearnerConfig, environment: Mapping[str, str] = os.environ) -> int:
    """Run this node's ranks; returns the exit code of the first failure on any node, else 0."""
    node = Node(learner, environment)
    first, local = node.number * node.local, range(node.local)
    shared = node.variables | {"WORLD_SIZE": str(learner.ranks), "LOCAL_WORLD_SIZE": str(node.local)}
    shared[ABOVE] = str(os.getpid())
    processes: list[subprocess.Popen[bytes]] = []
    early: list[int] = []

    def pass_on(number: int) -> None:
        if not processes:
            early.append(number)
        for process in processes:
            process.send_signal(number)

    def on_signal(number: int) -> None:
        node.stop(number, signals.count, pass_on)
        node.tell("signal", number, signals.count)

    # elastic's own handlers give ranks only 30 s, and an exception while ranks are being started would lose them
    os.environ[ELASTIC_HANDLES] = "SIGHUP"
    with (signals := StopSignals(drain=on_signal, force=on_signal)):
        ours = {number: signal.getsignal(number) for number in (*STOPPING, FORCING)}
        context = start_processes(
            "learner",
            sys.executable,
            args={rank: command("learner", *argv)[1:] for rank in local},
            envs={rank: shared | {"RANK": str(first + rank), "LOCAL_RANK": str(rank)} for rank in local},
            logs_specs=DefaultLogsSpecs(),
        )
        for number, handler in ours.items():  # an older torch sets its own whatever the variable says
            signal.signal(number, handler)
        assert isinstance(context, SubprocessContext)
        processes += [handler.proc for handler in context.subprocess_handlers.values()]
        for came in early:
            pass_on(came)
        node.follow(pass_on)
        result = context.wait(period=0.2)
    assert result is not None, "waited without timeout"
    return node.leave(_exit_code(node, first, result.failures))


def _exit_code(node: "Node", first: int, failures: Mapping[int, ProcessFailure]) -> int:
    """The exit code of the first of `failures`, which it reports; 0 without any. `first`: this node's first rank."""
    if not failures:
        return DONE
    failure = min(failures.values(), key=lambda failure: failure.timestamp)
    code = failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode
    if code == 128 + FORCING:  # report the signal received, not the one forwarded
        code = 128 + node.forced_by
    rank, how = first + failure.local_rank, f"exit code {failure.exitcode}"
    ended = f"rank {rank} failed first{node.of_several} ({how}); all ranks have ended"
    if node.killed:
        print_visible(f"learner: {node.why}; so those of this one were ended too", sys.stderr)
    elif code not in ENDINGS.values():
        print_visible(f"learner: {ended}{node.why and f'; {node.why}'}", sys.stderr)
        node.tell("failed", code, rank)
    return code


class Node:
    """This node, which learns of the others' signals and failures."""

    def __init__(self, learner: LearnerConfig, environment: Mapping[str, str]) -> None:
        self.number, self.nodes = int(environment.get("NODE_RANK", 0)), learner.nodes
        self.local, self.of_several = learner.ranks // learner.nodes, " on this node" if learner.nodes > 1 else ""
        host, port = (HOST, 0) if self.nodes == 1 else (environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
        self._hosts = self.nodes == 1 or (self.number == 0 and environment.get(THERE_IS_A_STORE) != "True")
        store = open_store(host, port) if self._hosts else find_store(host, port)
        self.variables = {"MASTER_ADDR": host, "MASTER_PORT": str(store.port), THERE_IS_A_STORE: "True"}
        """All ranks meet in this store, so nobody can take the port before they bind."""
        self._store = PrefixStore(f"nodes/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        self._level, self._failed, self.patience_s = 0, DONE, LAST_S
        self.forced_by: int = FORCING
        self.why, self.killed = "", False
        self._stopping = threading.RLock()  # a signal's handler may interrupt itself
        self._telling: list[threading.Thread] = []
        if self._store.add(f"here/{self.number}", 1) > 1:
            problem = f"NODE_RANK: {self.number} has been at the store {host}:{port} before"
            raise ConfigError([f"{problem}; end the learner on every node and start all of them, each with its own"])

    def stop(self, number: int, level: int, pass_on: Callable[[int], object]) -> None:
        """Pass signal `number` on, once if every node gets it."""
        with self._stopping:
            before, self._level = self._level, max(level, self._level)
            if before < 2 <= level:
                self.forced_by = number
            for count in range(before, level):  # ranks ignore a repeated SIGTERM, which may be a duplicate
                pass_on(FORCING if count else number)

    def tell(self, *words: object) -> None:
        """Send an event in a thread: signal handlers call this, and the store may be gone."""
        if self.nodes > 1:
            event = " ".join(map(str, (self.number, *words)))
            self._telling.append(threading.Thread(target=self._tell, args=(event,), daemon=True))
            self._telling[-1].start()

    def _tell(self, event: str) -> None:
        with suppress(dist.DistError):
            store = self._store.clone()  # type: ignore[attr-defined]
            store.set(f"event/{store.add('events', 1)}", event)

    def follow(self, pass_on: Callable[[int], object]) -> None:
        if self.nodes > 1:
            threading.Thread(target=self._follow, args=(pass_on,), daemon=True).start()

    def _follow(self, pass_on: Callable[[int], object]) -> None:
        store, number = self._store.clone(), 1  # type: ignore[attr-defined]
        store.set_timeout(timedelta(days=1))
        while not self._failed:
            try:
                node, word, *figures = store.get(f"event/{number}").decode().split()
            except dist.DistNetworkError:
                self.why, self._failed = "the first node's store is gone, and its learner with it", FAILED
            except dist.DistStoreError:  # no event yet
                continue
            else:
                number += 1
                if word == "signal":
                    self.stop(int(figures[0]), int(figures[1]), pass_on)
                elif int(node) != self.number:
                    how = f"rank {figures[1]} failed first (exit code {figures[0]})"
                    self.why, self._failed = f"the ranks of node {node} have failed, where {how}", int(figures[0])
        log.warning("%s: the ranks of this one end within %g s", self.why, self.patience_s)
        threading.Event().wait(self.patience_s)  # ranks that notice by themselves report more
        self.killed = True
        pass_on(signal.SIGKILL)  # a rank in a collective notices nothing else

    def leave(self, code: int) -> int:
        """Leave the other nodes; returns the exit code of all."""
        for telling in self._telling:
            telling.join(LAST_S)
        with suppress(dist.DistError):
            self._store.set(f"left/{self.number}", "")
            if self._hosts and code in ENDINGS.values():  # the other nodes' ranks still need the store
                self._store.wait([f"left/{node}" for node in range(self.nodes)], timedelta(seconds=LAST_S))
        return self._failed if code and self._failed else code


def find_store(host: str, port: int) -> TCPStore:
    """The store of the first node. Raises ConfigError."""
    log.info("waiting for the first node at %s:%d", host, port)
    if why := wait_for(host, port, MEET_S):
        problem = f"MASTER_ADDR: no store of the first node at {host}:{port} in {MEET_S:g} s"
        remedy = "start its learner, and see that this machine reaches it there"
        raise ConfigError([f"{problem} ({why}); {remedy}"])
    return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=MEET_S))
