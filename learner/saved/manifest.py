"""The manifest that completes a checkpoint, written last: its files with sizes and checksums. Which checkpoints a run
keeps."""

import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel, ValidationError

from configs.checkpoint_files import (
    DAMAGED,
    MANIFEST,
    OWN_SUM,
    POSITION,
    REPLACED,
    SUMS,
    crc32c_of,
    fault,
    manifest_of,
    sum_of,
)
from configs.schema import LearnerConfig, ModelConfig
from configs.variables import open_private

SUM_NOTE = ".crc32c-note"
"""Suffix of the file with a shard's CRC32C."""


class AdapterOf(BaseModel):
    """What an adapter was trained beside.

    Example: `AdapterOf(model=ModelConfig(path="Qwen/Qwen3-8B", lora=LoraConfig(rank=8)), base="8c2f0e1b9a3d4c57")`
    """

    model: ModelConfig
    base: str
    """Digest of its frozen weights."""


class DataPosition(BaseModel):
    """How far demonstrations are read. Example: `DataPosition(data="8c2f0e1b9a3d4c57", rows=640)`"""

    data: str
    rows: int
    beside: bool = False
    began: int | None = None
    """Local time at the start of the run, in seconds as if it were UTC. Chat templates may write the date."""

    @property
    def kind(self) -> str:
        return "reinforcement learning with demonstrations" if self.beside else "supervised fine-tuning"


def versions_to_keep(rewards: Mapping[int, float | None], config: LearnerConfig) -> set[int]:
    """The newest checkpoints, each `keep_every`-th, and the best rewarded."""
    newest = sorted(rewards)[-config.keep_checkpoints :]
    every = [version for version in rewards if config.keep_every and version % config.keep_every == 0]
    known = [(reward, version) for version, reward in rewards.items() if reward is not None]
    best = [version for _, version in sorted(known, reverse=True)[: config.keep_best]]
    return {*newest, *every, *best}


def reward_of(checkpoint: Path) -> float | None:
    """The mean reward of a checkpoint's batch."""
    manifest = manifest_of(checkpoint)
    if "files" not in manifest and (checkpoint / "figures.json").exists():  # written by an earlier release
        manifest = json.loads((checkpoint / "figures.json").read_text())
    reward: float | None = manifest.get("reward")
    return reward


def adapter_of(checkpoint: Path) -> AdapterOf | None:
    """What the adapter was trained beside; None: whole weights. Raises OSError or ValueError."""
    try:
        found = manifest_of(checkpoint).get("adapter")
        return AdapterOf.model_validate(found) if found else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ["adapter", *first["loc"]]))
        raise ValueError(f"{checkpoint / MANIFEST}: {where}: {first['msg']}") from None
    except ValueError as error:
        raise ValueError(f"{checkpoint / MANIFEST}: cannot be read ({error})") from None


def position_of(checkpoint: Path) -> DataPosition | None:
    """How far demonstrations were read, if any."""
    found = manifest_of(checkpoint).get(POSITION)
    return DataPosition.model_validate(found) if found else None


def began_at(folder: Path) -> int | None:
    """`DataPosition.began` of a run's checkpoints, which is the same in all."""
    for file in sorted(folder.glob(f"v*/{MANIFEST}")):
        with suppress(OSError, ValueError):
            if (position := position_of(file.parent)) and position.began is not None:
                return position.began
    return None


def seal(
    partial: Path,
    reward: float | None = None,
    adapter: AdapterOf | None = None,
    position: DataPosition | None = None,
) -> None:
    """Give `v000100.tmp` its manifest and name, safe from a power cut."""
    sums = _sums_of_shards(partial)
    files = sorted(path for path in partial.rglob("*") if path.is_file() and path.name != MANIFEST)
    names = {str(path.relative_to(partial)): path for path in files}
    manifest = {
        "reward": reward,
        **({"adapter": adapter.model_dump(mode="json")} if adapter else {}),
        **({POSITION: position.model_dump(mode="json")} if position else {}),
        "files": {name: path.stat().st_size for name, path in names.items()},
        SUMS: {name: sums[name] if name in sums else crc32c_of(path) for name, path in names.items()},
    }
    manifest = json.loads(json.dumps(manifest))  # as a reader will see it
    with open(partial / MANIFEST, "w", encoding="utf-8", opener=open_private) as file:
        json.dump(manifest | {OWN_SUM: sum_of(manifest)}, file, indent=1)
    for path in [*files, partial / MANIFEST]:
        _fsync(path)
    final, old = partial.with_suffix(""), partial.with_suffix(REPLACED)
    if final.exists():  # incomplete, or without its export
        final.rename(old)
    partial.rename(final)
    _fsync(final.parent)
    for before in (old, partial.with_suffix(DAMAGED)):
        shutil.rmtree(before, ignore_errors=True)


def _sums_of_shards(partial: Path) -> dict[str, int]:
    sums = {}
    for note in sorted(partial.rglob(f"*{SUM_NOTE}")):
        sums[str(note.relative_to(partial)).removesuffix(SUM_NOTE)] = int(note.read_text(encoding="ascii"), 16)
        note.unlink()
    return sums


def recover(folder: Path) -> None:
    """Finish an interrupted `seal`, and remove unfinished checkpoints."""
    for old in folder.glob(f"v*{REPLACED}"):
        final, partial = old.with_suffix(""), old.with_suffix(".tmp")
        if not final.exists() and fault(partial) is None:
            partial.rename(final)
        if final.exists():
            shutil.rmtree(old)
        else:
            old.rename(final)
    for leftover in folder.glob("v*.tmp"):
        shutil.rmtree(leftover)


def set_aside(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, so that it is none any more."""
    aside = checkpoint.with_suffix(DAMAGED)
    shutil.rmtree(aside, ignore_errors=True)
    return checkpoint.rename(aside)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint, its manifest first: it never seems complete."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)
