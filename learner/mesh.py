"""The process group of all ranks and its mesh: [replica, shard], or [shard] for one replica."""

import logging
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from errno import EADDRINUSE
from ipaddress import ip_address
from typing import TypeVar

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _get_default_store

from buffer.keys import KeysError
from configs.load import ConfigError
from configs.schema import Config, LearnerConfig
from configs.variables import gloo_here
from learner import watchdog
from learner.weights.channel import own_address

log = logging.getLogger(__name__)
T = TypeVar("T")
MEET_S = 300.0
AGAIN_S = 0.5
READ_S = 10.0
THERE_IS_A_STORE = "TORCHELASTIC_USE_AGENT_STORE"
"""torch's variable: `True` if a store listens."""
UNSET = "unset RANK and WORLD_SIZE if a pod or shell has left them"


@contextmanager
def process_group(config: Config, device: torch.device, prepare: Callable[[], T]) -> Iterator[tuple[DeviceMesh, T]]:
    """Start the default process group; yield its mesh and this rank's `prepare()`. Raises ConfigError on every rank if
    `prepare` raises that, or KeysError, on any rank, and if the ranks do not find each other. A failed rank does not
    destroy the group: it just exits."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.learner.timeout_s + watchdog.TORCH_LATER_S)
    watchdog.enable_flight_recorder()
    world = int(os.environ["WORLD_SIZE"]) if "RANK" in os.environ else 1
    local = ranks_of_node(config.learner, world, os.environ)
    if local < world:
        choose_interface(os.environ)  # refuses an address at which the other nodes' ranks would wait in vain
    else:
        gloo_here()
    prepared, problems = _attempt(prepare)
    store, rank = meet(os.environ, problems) if "RANK" in os.environ else (HashStore(), 0)
    if problems:
        raise ConfigError(problems)
    store.set_timeout(timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=world)
    yield make_mesh(device.type, config.learner.shard or local), prepared[0]
    dist.destroy_process_group()


def meet(environment: Mapping[str, str], problems: Sequence[str] = (), limit_s: float = MEET_S) -> tuple[Store, int]:
    """Wait for all ranks; returns the store and this rank. Raises ConfigError if one is missing, and on every rank if
    one has `problems`."""
    rank, world = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    host, port, timeout = environment["MASTER_ADDR"], int(environment["MASTER_PORT"]), timedelta(seconds=limit_s)
    hosts = rank == 0 and environment.get(THERE_IS_A_STORE) != "True"
    log.info("waiting for all %d ranks at %s:%d", world, host, port)
    if not hosts and (why := wait_for(host, port, limit_s)):
        problem = f"MASTER_ADDR: no store of rank 0 at {host}:{port} in {limit_s:g} s ({why})"
        raise ConfigError([f"{problem}; start rank 0 there, or {UNSET}"])
    try:
        store: Store = open_store(host, port) if hosts else TCPStore(host, port, None, False, timeout, False)
    except dist.DistError as error:
        why = str(error).splitlines()[0][:200]
        raise ConfigError(
            [f"MASTER_PORT: the listener at {host}:{port} is not a store of ranks ({why}); {UNSET}"]
        ) from None
    store = PrefixStore(f"ranks/{environment.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    come = [f"come/{number}" for number in range(world)]
    store.set(come[rank], "\n".join(problems))
    if problems and not hosts:
        raise ConfigError(problems)
    try:
        store.wait(come, timeout)
    except dist.DistError:
        missing = ", ".join(str(number) for number, key in enumerate(come) if not store.check([key]))
        problem = f"WORLD_SIZE: {world}, but rank {missing} did not come to {host}:{port} in {limit_s:g} s"
        raise ConfigError([*problems, f"{problem}; start every rank, or {UNSET}"]) from None
    every = [lines.decode().splitlines() for lines in store.multi_get(come)]
    if refused := next(filter(None, every), None):
        _part(store, rank, [number for number, own in enumerate(every) if not own], hosts)
        raise ConfigError(refused)
    return store, rank


def _part(store: Store, rank: int, reading: Sequence[int], hosts: bool) -> None:
    """The store ends with the rank that hosts it. That rank waits until the ranks `reading` have read the store."""
    store.set(f"read/{rank}", "")
    if hosts:
        with suppress(dist.DistError):
            store.wait([f"read/{number}" for number in reading], timedelta(seconds=READ_S))


def open_store(host: str, port: int) -> TCPStore:
    """The ranks' store, which listens at `host` only; torch alone would listen at all addresses of the machine. Raises
    ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        name = "MASTER_PORT" if error.errno == EADDRINUSE else "MASTER_ADDR"
        remedy = "choose a free one" if name == "MASTER_PORT" else "name an address of this machine, the first node"
        raise ConfigError([f"{name}: the ranks' store cannot listen on {host}:{port} ({error}); {remedy}"]) from None
    listener.setblocking(False)
    port = int(listener.getsockname()[1])
    descriptor, timeout = listener.detach(), timedelta(seconds=MEET_S)
    return TCPStore(host, port, None, True, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def wait_for(host: str, port: int, limit_s: float) -> str:
    """Wait for a listener; returns "", or why there is none. torch alone would print stack frames."""
    end, why = time.monotonic() + limit_s, "no answer"
    while (left_s := end - time.monotonic()) > 0:
        try:
            socket.create_connection((host, port), left_s).close()
            return ""
        except OSError as error:
            why = error.strerror or why
            time.sleep(min(AGAIN_S, max(0.0, end - time.monotonic())))
    return why


def ranks_of_node(learner: LearnerConfig, world: int, environment: Mapping[str, str]) -> int:
    return int(environment.get("LOCAL_WORLD_SIZE", world // learner.nodes))


def make_mesh(device_type: str, shard: int) -> DeviceMesh:
    """The mesh of all ranks; `shard` ranks share a copy."""
    world = dist.get_world_size()
    if shard == world:  # (1, world): over groups of one rank NCCL's mean may be wrong
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def shards(mesh: DeviceMesh) -> int:
    """Ranks that share one copy of the model."""
    return mesh.size(mesh.ndim - 1)


def default_store(prefix: str) -> Store:
    """The ranks' store over a connection of its own, because a wait blocks its connection."""
    return PrefixStore(prefix, _get_default_store().clone())  # type: ignore[attr-defined]


def replica(mesh: DeviceMesh) -> int:
    """The number of this rank's copy; the first one gathers and publishes."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in it"
    return coordinate[0] if mesh.ndim == 2 else 0


def on_every_rank(decide: Callable[[], T]) -> T:
    """Return this rank's `decide()`. Raises ConfigError on every rank if it raises that, or KeysError, on any rank: the
    others would wait for that rank in their next collective. A collective, and `decide` must contain none."""
    found, problems = _attempt(decide)
    every: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(every, problems)
    if refused := next(filter(None, every), None):  # of the first rank: others differ by a few bytes
        raise ConfigError(refused)
    return found[0]


def _attempt(decide: Callable[[], T]) -> tuple[list[T], list[str]]:
    try:
        return [decide()], []
    except (ConfigError, KeysError) as error:
        return [], str(error).splitlines()


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL use the interface on the route to MASTER_ADDR. Raises ConfigError. gloo alone often takes
    127.0.1.1."""
    master, port = environment.get("MASTER_ADDR", ""), int(environment.get("MASTER_PORT", "0"))
    try:
        own = own_address(master, port)
    except OSError as error:
        raise ConfigError([f"MASTER_ADDR: {master}: no route to it from {socket.gethostname()} ({error})"]) from None
    found = (name for name, cards in psutil.net_if_addrs().items() for card in cards if _plain(card.address) == own)
    interface = next(found, None)
    if interface is None or (ip_address(own).is_loopback and not _is_loopback(master)):
        remedy = "set it to an address of the first node at which the others reach it"
        raise ConfigError([f"MASTER_ADDR: {master} is {own} on {socket.gethostname()}, of no use elsewhere; {remedy}"])
    environment.setdefault("GLOO_SOCKET_IFNAME", interface)
    environment.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")  # with = no longer name matches


def _plain(address: str) -> str:
    return address.partition("%")[0]


def _is_loopback(master: str) -> bool:
    try:
        return master == "localhost" or ip_address(master).is_loopback
    except ValueError:
        return False
