"""Where a rank of the learner stands: the process group of all ranks, and the mesh of copies of the model.

The model is sharded over `learner.shard` ranks, by default those of one node. Each such set of ranks is a replica, a
row of the mesh: [replica, shard]. What is gathered stays within a replica, only gradients are reduced between them. One
replica alone is a mesh of one dimension. Built by `__main__.py`; forming the group waits for all ranks.
"""

import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from configs.load import ConfigError
from configs.schema import Config, LearnerConfig
from learner import watchdog
from learner.weights.channel import own_address


@contextmanager
def process_group(config: Config, device: torch.device) -> Iterator[DeviceMesh]:
    """The default process group, with gloo for CPU tensors, and its mesh. Not destroyed after an error: a failed rank
    just exits. Raises ConfigError if MASTER_ADDR cannot work."""
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=config.learner.timeout_s + watchdog.TORCH_LATER_S)
    watchdog.enable_flight_recorder()
    alone: dict[str, Any] = {} if "RANK" in os.environ else {"store": HashStore(), "rank": 0, "world_size": 1}
    world = 1 if alone else int(os.environ["WORLD_SIZE"])
    local = ranks_of_node(config.learner, world, os.environ)
    if local < world:
        choose_interface(os.environ)
    dist.init_process_group(backend, timeout=timeout, **alone)
    yield make_mesh(device.type, config.learner.shard or local)
    dist.destroy_process_group()


def ranks_of_node(learner: LearnerConfig, world: int, environment: Mapping[str, str]) -> int:
    """Ranks on each node, of `world` ranks on all: what started them has said so, or the run file says so."""
    return int(environment.get("LOCAL_WORLD_SIZE", world // learner.nodes))


def make_mesh(device_type: str, shard: int) -> DeviceMesh:
    """The mesh of all ranks, `shard` of which share one copy of the model."""
    world = dist.get_world_size()
    if shard == world:  # (1, world) would reduce over groups of one rank, where NCCL's mean may be wrong
        return init_device_mesh(device_type, (world,), mesh_dim_names=("shard",))
    return init_device_mesh(device_type, (world // shard, shard), mesh_dim_names=("replicate", "shard"))


def shards(mesh: DeviceMesh) -> int:
    """Ranks that share one copy of the model."""
    return mesh.size(mesh.ndim - 1)


def replica(mesh: DeviceMesh) -> int:
    """The number of this rank's copy of the model. The first one gathers, publishes and, if need be, saves for all."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "every rank is in it"
    return coordinate[0] if mesh.ndim == 2 else 0


def choose_interface(environment: MutableMapping[str, str]) -> None:
    """Have gloo and NCCL use the interface on the route to MASTER_ADDR, where `environment` does not name another.

    Left alone, gloo listens where the name of the machine leads, often 127.0.1.1, and other machines never reach it.
    Raises ConfigError if there is no such interface.
    """
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
    """Whether a person wrote so, for ranks that are all on one machine."""
    try:
        return master == "localhost" or ip_address(master).is_loopback
    except ValueError:
        return False
