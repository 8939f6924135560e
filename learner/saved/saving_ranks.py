"""The ranks that write checkpoints: all, or the first replica (`checkpoint_on: first_node`). Each method is a
collective."""

import logging
import time
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from configs.checkpoint_files import damage, folder_of, listed, newest
from configs.load import ConfigError
from configs.variables import run_folder
from learner.saved.manifest import recover, set_aside
from learner.train.collectives import all_reduce_max, broadcast_from_rank0

log = logging.getLogger(__name__)
MARKER = ".shared-"
SEEN_S = 5.0
"""Network file systems cache what is not there."""


class SavingRanks:
    """The ranks of checkpoints in `folder`. `shards`: ranks that share one copy of the model."""

    def __init__(self, folder: Path, shards: int, first_node: bool) -> None:
        self.folder, self.shards = folder, shards
        self.by_first = first_node and shards < dist.get_world_size()
        self.writes = dist.get_rank() < shards or not self.by_first
        self.group = dist.new_group(backend="gloo")  # writing threads must not use training's collectives
        self.writers = dist.new_group(list(range(shards)), backend="gloo") if self.by_first else self.group

    def check_folder(self) -> None:
        """Raise ConfigError unless all ranks see rank 0's files, if they must."""
        if self.by_first or dist.get_world_size() == 1:
            return
        rank, marker = dist.get_rank(), self.folder / f"{MARKER}{broadcast_from_rank0(time.time_ns())}"
        if rank == 0:
            run_folder(self.folder)
            for leftover in self.folder.glob(f"{MARKER}*"):
                leftover.unlink()
            marker.touch()
        dist.barrier(self.group)
        (blind,) = map(int, all_reduce_max(-1 if _seen(marker) else rank))
        if rank == 0:
            marker.unlink()
        if blind >= 0:
            problem = f"shared, but rank {blind} does not see what rank 0 writes into {self.folder}"
            remedy = "name a run.folder that all nodes share, or set it to first_node"
            raise ConfigError([f"learner.checkpoint_on: {problem}; {remedy}"])

    def require(self, problem: Callable[[], str | None]) -> None:
        """Raise ConfigError on every rank if `problem`, called on rank 0, finds one."""
        judged = [problem() if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(judged, src=0, group=self.group)
        if judged[0]:
            raise ConfigError([judged[0]])

    def newest_sound(self) -> int:
        """Version of the newest complete and undamaged checkpoint, 0 if there is none. Sets damaged ones aside."""
        if dist.get_rank() == 0 and self.folder.is_dir():
            recover(self.folder)
        while version := self._newest():
            folder = folder_of(self.folder, version)
            found: list[str | None] = [None] * dist.get_world_size()
            dist.all_gather_object(found, self._damage(folder) if self.writes else None, group=self.group)
            problem = next((one for one in found if one), None)
            if problem is None:
                break
            if dist.get_rank() == 0:
                aside = set_aside(folder).name
                log.error("checkpoint %s is damaged, skipped and now called %s: %s", folder.name, aside, problem)
        return version

    def _damage(self, folder: Path) -> str | None:
        rank, world = dist.get_rank(self.writers), dist.get_world_size(self.writers)
        try:
            names = sorted(name for name in listed(folder).sums if name.startswith("state/"))
            return damage(folder, names[rank::world])
        except (OSError, ValueError) as error:  # rank 0 could read its manifest
            return f"rank {dist.get_rank()} cannot read its manifest: {error}"

    def _newest(self) -> int:
        rank, world = dist.get_rank(), dist.get_world_size()
        looks = rank % self.shards == 0 if self.by_first else rank == 0
        mine = newest(self.folder) if looks else 0
        version = broadcast_from_rank0(mine)
        most, owner = divmod(int(all_reduce_max(mine * world + rank)[0]), world)
        if most > version:
            problem = f"the node of rank {owner} has checkpoint {most} on its disk, that of rank 0 has {version}"
            remedy = "start that machine as the first node, or copy its checkpoints there"
            raise ConfigError([f"learner.checkpoint_on: first_node, but {problem}; {remedy}"])
        return version


def _seen(marker: Path) -> bool:
    end = time.monotonic() + SEEN_S
    while not (seen := marker.exists()) and time.monotonic() < end:
        time.sleep(0.5)
    return seen
