"""Checkpoints that cannot be lost: sharded, written beside training, complete or absent.

`checkpoints/v000100.tmp` is filled by torch.distributed.checkpoint in a thread of each rank; once all ranks are done,
rank 0 adds the Hugging Face export and a manifest of all files with their sizes, and renames the folder. Each public
method is a collective: all ranks must call it. `save` waits for the writing before it, `finish` for all; `restore`
takes the newest complete one.
"""

import json
import logging
import math
import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from buffer.wire.protocol import Part
from configs.schema import LearnerConfig, ModelConfig
from learner import collectives, export
from learner.interfaces import Algorithm
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
FIGURES = "figures.json"
SPARE = 64 << 20
"""Bytes of disk to leave free beside what a checkpoint takes."""


class NoDiskSpace(RuntimeError):
    """There is no room for the last checkpoint."""


class Checkpoints:
    """The checkpoints in `folder`: one every `checkpoint_every` versions, and version `versions`, with its export."""

    def __init__(
        self, folder: Path, model: ModelConfig, config: LearnerConfig, optimizer: Optimizer, versions: int
    ) -> None:
        self.folder, self.model, self.config, self.optimizer, self.versions = folder, model, config, optimizer, versions
        self.group = dist.new_group(backend="gloo")  # its own: the writing threads must not meet training's collectives
        self._writing: Future[None] | None = None
        self._threads = ThreadPoolExecutor(1, "checkpoint")
        self._last = -1
        self.reward = -math.inf
        """Mean reward of the last batch, by which `keep_best` chooses; `Rewarded` sets it."""

    def restore(self, policy: Policy) -> int:
        """Load the newest complete checkpoint into `policy` and optimizer; returns its version, 0 if there is none."""
        mine = newest(self.folder) if dist.get_rank() == 0 else 0
        version = self._last = collectives.broadcast_from_rank0(mine)
        if version == 0:
            return 0
        state = self._state(policy, version)
        load(state, checkpoint_id=folder_of(self.folder, version) / "state", process_group=self.group)
        set_state_dict(
            policy.model, self.optimizer.adamw, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        torch.set_rng_state(state["rng"])
        assert int(state["version"]) == version, "a folder renamed by hand"
        return version

    def save(self, policy: Policy, version: int) -> int:
        """Begin to write `version` if it is due; returns the oldest version to go back to, 0 if there is none."""
        export_every, keep_every = self.config.export_every, self.config.keep_every
        exported = version == self.versions or (export_every is not None and version % export_every == 0)
        if exported or version % self.config.checkpoint_every == 0 or (keep_every and version % keep_every == 0):
            self._save(policy, version, exported)
        return min(complete(self.folder)[-self.config.keep_checkpoints :], default=0)

    def finish(self, policy: Policy, version: int) -> None:
        """Write `version` with its export, if that is not on disk, and wait. Raises NoDiskSpace where there is no room."""
        self._settle()
        exported = (folder_of(self.folder, version) / "huggingface").exists() and version in complete(self.folder)
        if not collectives.broadcast_from_rank0(version == 0 or exported) and not self._save(
            policy, version, exported=True
        ):
            raise NoDiskSpace(f"the policy of version {version} is not on disk; what is: {complete(self.folder)}")
        self._settle()

    def close(self) -> None:
        """Wait for the writing thread; call it before the process group ends."""
        self._settle()
        self._threads.shutdown()
        dist.barrier(self.group)

    def _save(self, policy: Policy, version: int, exported: bool) -> bool:
        """Whether there was room to begin."""
        self._settle()
        partial = folder_of(self.folder, version).with_suffix(".tmp")
        if not collectives.broadcast_from_rank0(dist.get_rank() != 0 or self._room(policy, partial, exported)):
            return False
        weights = export.collect(policy) if exported else None
        state = self._state(policy, version)
        answer = async_save(state, checkpoint_id=partial / "state", process_group=self.group)
        written = answer.upload_completion if isinstance(answer, AsyncSaveResponse) else answer
        self._writing = self._threads.submit(self._complete, written, partial, weights, self.reward)
        self._last = version
        return True

    def _complete(self, written: Future[Any], partial: Path, weights: export.Weights | None, reward: float) -> None:
        """In the thread: wait for all ranks' shards; rank 0 then makes the folder a checkpoint."""
        written.result()
        if dist.get_rank() != 0:
            return
        if weights is not None:
            export.write(weights, self.model, partial / "huggingface")
        (partial / FIGURES).write_text(json.dumps({"reward": reward if math.isfinite(reward) else None}))
        seal(partial)
        rewards = {version: reward_of(folder_of(self.folder, version)) for version in complete(self.folder)}
        for version in rewards.keys() - kept(rewards, self.config):
            discard(folder_of(self.folder, version))

    def _settle(self) -> None:
        """Wait for the checkpoint being written. One that failed is a warning: the one before is still there."""
        writing, self._writing = self._writing, None
        if writing is None:
            return
        try:
            writing.result()
        except (OSError, RuntimeError, CheckpointException) as error:
            reason = " ".join(str(error).split())[:300] or type(error).__name__
            log.warning("checkpoint v%06d failed: %s; training goes on, older ones are kept", self._last, reason)

    def _state(self, policy: Policy, version: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(policy.model, self.optimizer.adamw)
        return {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "version": torch.tensor(version)}

    def _room(self, policy: Policy, partial: Path, exported: bool) -> bool:
        """Clear what a death left behind, then see whether the disk takes three fp32 copies, and the export's one."""
        partial.parent.mkdir(parents=True, exist_ok=True)
        for leftover in [*self.folder.glob("v*.tmp"), *self.folder.glob("v*.old")]:
            shutil.rmtree(leftover)
        parameters = sum(p.numel() for p in policy.model.parameters())
        needed = parameters * (12 + policy.dtype.itemsize * exported) + SPARE
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            log.warning(
                "checkpoint %s not written: it takes %.2f GiB and %s has %.2f GiB free; training goes on. "
                "Free some, or lower learner.keep_checkpoints (%d)",
                *(partial.stem, needed / 2**30, self.folder, free / 2**30, self.config.keep_checkpoints),
            )
        return free >= needed


class Rewarded:
    """`algorithm`, whose batches' mean rewards the checkpoints get to know."""

    def __init__(self, algorithm: Algorithm, checkpoints: Checkpoints) -> None:
        self.algorithm, self.checkpoints = algorithm, checkpoints

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        figures = self.algorithm.step(policy, part)
        self.checkpoints.reward = figures.get("reward/mean", -math.inf)
        return figures


def kept(rewards: Mapping[int, float], config: LearnerConfig) -> set[int]:
    """Which of the checkpoints, version: reward, stay: the newest, every so many, and those of the highest reward."""
    newest = sorted(rewards)[-config.keep_checkpoints :]
    every = [version for version in rewards if config.keep_every and version % config.keep_every == 0]
    rewarded = [version for version in rewards if rewards[version] > -math.inf]
    best = sorted(rewarded, key=lambda version: (rewards[version], version), reverse=True)[: config.keep_best]
    return {*newest, *every, *best}


def reward_of(checkpoint: Path) -> float:
    """The mean reward a checkpoint was written with; -inf where none is known."""
    try:
        reward = json.loads((checkpoint / FIGURES).read_text())["reward"]
    except (OSError, ValueError, KeyError):
        return -math.inf
    return -math.inf if reward is None else float(reward)


def folder_of(folder: Path, version: int) -> Path:
    """Where the checkpoint of `version` lies."""
    return folder / f"v{version:06d}"


def seal(partial: Path) -> None:
    """Give `v000100.tmp` its manifest and its name: from here on it is a checkpoint, also after a power cut."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    (partial / MANIFEST).write_text(json.dumps(sizes, indent=1))
    for path in [*files, partial / MANIFEST]:
        _sync(path)
    final, old = partial.with_suffix(""), partial.with_suffix(".old")
    if final.exists():  # not whole, or without the export it is now to have
        final.rename(old)
    partial.rename(final)
    _sync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint: the manifest first, so that it is never taken for a whole one."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None if all its files are there at their sizes."""
    try:
        sizes: dict[str, int] = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, size in sizes.items():
        try:
            there = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if there != size:
            return f"{name} has {there} bytes instead of {size}"
    return None


def complete(folder: Path) -> list[int]:
    """Versions of the complete checkpoints in `folder`, oldest first."""
    found = (path for path in folder.glob("v*") if path.name[1:].isdigit())
    return sorted(int(path.name[1:]) for path in found if fault(path) is None)


def newest(folder: Path) -> int:
    """Version of the newest complete checkpoint, 0 if there is none; a warning for each newer one that is not whole."""
    for path in sorted(folder.glob("v*"), reverse=True):
        if not path.name[1:].isdigit():
            continue
        if (why := fault(path)) is None:
            return int(path.name[1:])
        log.warning("checkpoint %s is not whole and is passed over: %s", path.name, why)
    return 0
