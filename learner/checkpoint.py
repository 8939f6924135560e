"""Checkpoints: sharded, written while training goes on, complete or absent.

A thread of each rank fills `checkpoints/v000100.tmp`. Once all ranks are done, rank 0 adds the Hugging Face export and
a manifest (all files with sizes and checksums), and renames the folder. With `model.lora` state and export are the
adapter's, which is restored beside the same base only. With `learner.checkpoint_on: first_node` the first replica alone
writes, and hands its copy to the others when restored. Each public method is a collective.
"""

import logging
import shutil
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse, async_save

from configs.checkpoint_files import FORKED, complete, folder_of, manifest_of, newest
from configs.critic import STATE_BYTES
from configs.help import show
from configs.load import ConfigError
from configs.model_facts import SPARE_BYTES, checkpoint_bytes
from configs.schema import LearnerConfig, ModelConfig
from configs.variables import private_folder, run_folder
from learner.critic.critic import KEY, Critic
from learner.model.loading import ADAPTER
from learner.model.lora.base import digest
from learner.model.policy import Policy
from learner.saved import adapter_files, export
from learner.saved.manifest import (
    AdapterOf,
    DataPosition,
    adapter_of,
    discard,
    position_of,
    recover,
    reward_of,
    seal,
    versions_to_keep,
)
from learner.saved.saving_ranks import SavingRanks
from learner.saved.shards import Planner, Reader, Uncopied, Writer, of_another_model, read_index, refusal, refused_value
from learner.train.collectives import broadcast_from_rank0, broadcast_state
from learner.train.optimizer import Optimizer

log = logging.getLogger(__name__)


class NoDiskSpace(RuntimeError):
    """The last checkpoint could not be written."""


class Checkpoints:
    """One checkpoint every `checkpoint_every` versions and at version `versions`, which is exported. `shards`: ranks
    that share one copy of the model. `position`: of a version, in fine-tuning."""

    def __init__(
        self,
        folder: Path,
        model: ModelConfig,
        config: LearnerConfig,
        optimizer: Optimizer,
        versions: int,
        shards: int | None = None,
        position: Callable[[int], DataPosition] | None = None,
        critic: Critic | None = None,
    ) -> None:
        self._position, self._critic = position, critic
        self.folder, self.model, self.config, self.optimizer, self.versions = folder, model, config, optimizer, versions
        self.ranks = SavingRanks(folder, shards or dist.get_world_size(), config.checkpoint_on == "first_node")
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None
        self._last = -1
        self._reward: float | None = None
        self._export = "adapter" if model.lora else "huggingface"
        self._base: str | None = None

    def restore(self, policy: Policy) -> int:
        """Load the newest complete checkpoint whose checksums hold; returns its version, 0 if there is none."""
        version = self._last = self.ranks.newest_sound()
        if version == 0:
            log.info("no checkpoint in %s: version 0, the initial model", self.folder)
            return 0
        folder = folder_of(self.folder, version)
        wanted, position = self._adapter(policy), self._position and self._position(version)
        self.ranks.require(
            lambda: (
                _refusal(folder, self.model, wanted)
                or _misplaced(folder, position)
                or refusal(folder / "state")
                or (_criticless(folder) if self._critic else None)
            )
        )
        state = self._state(policy, version)
        if self.ranks.writes:
            self._load(state, folder / "state")
        if self.ranks.by_first:
            broadcast_state(state, policy.mesh["replicate"].get_group())
        options = StateDictOptions(strict=self.model.lora is None)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(policy.model, self.optimizer.adamw, **states, options=options)
        if policy.masters:
            policy.masters.to_device()
        self.optimizer.restore_options()
        if self._critic:
            self._critic.load(state)
        torch.set_rng_state(state["rng"])
        assert int(state["version"]) == version, "a folder renamed by hand"
        self._reward = reward_of(folder) if self.ranks.writes else None
        log.info("restored version %d from %s", version, folder)
        return version

    def _adapter(self, policy: Policy) -> AdapterOf | None:
        """A collective of all ranks the first time."""
        if self.model.lora is None:
            return None
        self._base = self._base or digest(policy.model, policy.mesh)
        return AdapterOf(model=self.model, base=self._base)

    def _load(self, state: dict[str, Any], folder: Path) -> None:
        """Raises ConfigError if the shards hold more than plain values, or are another model's."""
        try:
            load(state, storage_reader=Reader(folder), planner=Planner(), process_group=self.ranks.writers)
        except CheckpointException as error:
            if refused := refused_value(folder, error) or of_another_model(folder, error):
                raise ConfigError([refused]) from None
            raise

    def save(self, policy: Policy, version: int, reward: float | None = None) -> int:
        """Begin to write `version` if it is due; returns the oldest version that a restart may restore, or 0. Call it
        for every version. `reward`: mean of the batch that made `version`."""
        self._reward = reward
        export_every, keep_every = self.config.export_every, self.config.keep_every
        exported = version == self.versions or (export_every is not None and version % export_every == 0)
        if exported or version % self.config.checkpoint_every == 0 or (keep_every and version % keep_every == 0):
            self._begin(policy, version, exported)
        kept = complete(self.folder)[-self.config.keep_checkpoints :] if self.ranks.writes else []
        return min(kept, default=0)

    def finish(self, policy: Policy, version: int) -> None:
        """Write `version` with its export. Raises NoDiskSpace."""
        self._wait()
        if self._is_exported(version):
            return
        begun = self._begin(policy, version, exported=True)
        self._wait()
        if not begun or not self._is_exported(version):
            where = (
                f"from version {last}" if (last := newest(self.folder)) else "from version 0: no other one is on disk"
            )
            problem = f"the policy of version {version} is not on disk: its checkpoint could not be written"
            raise NoDiskSpace(f"{problem}; make room in {self.folder} and launch again, the run goes on {where}")

    def _is_exported(self, version: int) -> bool:
        exported = (folder_of(self.folder, version) / self._export).exists() and version in complete(self.folder)
        return bool(broadcast_from_rank0(version == 0 or exported))

    def close(self) -> None:
        self._wait()
        self._thread.shutdown()
        dist.barrier(self.ranks.group)

    def _begin(self, policy: Policy, version: int, exported: bool) -> bool:
        self._wait()
        partial = folder_of(self.folder, version).with_suffix(".tmp")
        if not broadcast_from_rank0(dist.get_rank() != 0 or self._has_space(policy, partial, exported)):
            return False
        weights = export.collect(policy) if exported or self.model.lora else None
        adapter = self._adapter(policy)
        state = self._state(policy, version)
        if self.ranks.writes:
            run_folder(partial)
            private_folder(partial / "state")
            options: dict[str, Any] = {"storage_writer": Writer(partial / "state"), "process_group": self.ranks.writers}
            response = async_save(state, async_stager=Uncopied() if policy.masters else None, **options)
            shards = response.upload_completion if isinstance(response, AsyncSaveResponse) else response
            position = self._position and self._position(version)
            self._writing = self._thread.submit(
                self._complete, shards, partial, weights, self._reward, adapter, position
            )
        self._last = version
        if policy.masters:  # there is no room for a copy of what the next step changes
            self._wait()
        return True

    def _complete(
        self,
        shards: Future[Any],
        partial: Path,
        weights: dict[str, Tensor] | None,
        reward: float | None,
        adapter: AdapterOf | None,
        position: DataPosition | None,
    ) -> None:
        shards.result()
        if dist.get_rank() != 0:
            return
        if weights is not None:
            write = adapter_files.write if adapter else export.write
            write(weights, self.model, partial / self._export)
        seal(partial, reward, adapter, position)
        rewards = {version: reward_of(folder_of(self.folder, version)) for version in complete(self.folder)}
        for version in rewards.keys() - versions_to_keep(rewards, self.config):
            discard(folder_of(self.folder, version))

    def _wait(self) -> None:
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
        if self.model.lora:
            model = {name: value for name, value in model.items() if name.endswith(ADAPTER)}
        if policy.masters:
            model = policy.masters.in_place_of(model)
        state = {"model": model, "optimizer": optimizer, "rng": torch.get_rng_state(), "version": torch.tensor(version)}
        return state | (self._critic.state() if self._critic else {})

    def _has_space(self, policy: Policy, partial: Path, exported: bool) -> bool:
        """Removes what a killed process left; returns whether there is space for three fp32 copies and the export."""
        run_folder(self.folder)
        recover(self.folder)
        saved = (p for p in policy.model.parameters() if p.requires_grad or not self.model.lora)
        needed = checkpoint_bytes(sum(p.numel() for p in saved), self.model, exported) + SPARE_BYTES
        if self._critic:
            needed += STATE_BYTES * sum(p.numel() for p in self._critic.body.parameters())
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            log.warning(
                "checkpoint %s not written: it takes %.2f GiB and %s has %.2f GiB free; training goes on. "
                "Free some, or lower learner.keep_checkpoints (%d)",
                *(partial.stem, needed / 2**30, self.folder, free / 2**30, self.config.keep_checkpoints),
            )
        return free >= needed


def _refusal(folder: Path, model: ModelConfig, wanted: AdapterOf | None) -> str | None:
    """Why the adapter or its base does not fit."""
    try:
        found = adapter_of(folder)
    except (OSError, ValueError) as error:
        return f"{error}; install the Headrace that wrote it, or remove {folder}: the run goes on from the one before"
    was, now = found and found.model.lora, model.lora
    if was != now:
        said = [show(lora and lora.model_dump()) for lora in (now, was)]
        return f"model.lora: {said[0]}, but {folder} is of {said[1]}; undo that, or begin another run"
    if found and wanted and found.base != wanted.base:
        problem = f"model.path: {model.path} has other weights, or model.dtype is another, than when {folder}"
        return f"{problem} was written; give it back what it had, or begin another run"
    return None


def _criticless(folder: Path) -> str | None:
    if any(name.startswith(f"{KEY}.") for name in read_index(folder / "state").state_dict_metadata):
        return None
    problem = f"algorithm.advantage: gae, but {folder} was written by a run without a critic"
    return f"{problem}; begin a run of its own, with model.path naming its export"


def _misplaced(folder: Path, wanted: DataPosition | None) -> str | None:
    if manifest_of(folder).get(FORKED):
        return None
    found = position_of(folder)
    if (found.model_copy(update={"began": wanted.began}) if found and wanted else found) == wanted:
        return None
    was, now = (each.kind if each else "reinforcement learning" for each in (found, wanted))
    if was != now or wanted is None:
        return f"run.name: {folder} is a checkpoint of {was}, and this run is {now}; choose another run.name"
    what = f"the demonstrations, in tokens and pixels, are not those with which {folder} was trained"
    key = "data.demonstrations" if wanted.beside else "data.train"
    remedy = "give back data, images, tokenizer, chat template and limit of tokens as they were, or begin another run"
    return f"{key}: {what}; {remedy}"
