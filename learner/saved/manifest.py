"""What makes a folder a checkpoint: a manifest of all its files with their sizes, written last. Which checkpoints a run
has, and which it keeps.

Cheap to import: `learner/checkpoint.py` writes checkpoints, and the launcher looks for them before it starts anything.
"""

import json
import logging
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from configs.schema import LearnerConfig, ModelConfig

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"


class AdapterOf(BaseModel):
    """What an adapter was trained beside.

    Example: `AdapterOf(model=ModelConfig(path="Qwen/Qwen3-8B", lora=LoraConfig(rank=8)), base="8c2f0e1b9a3d4c57")`
    """

    model: ModelConfig
    base: str
    """Digest of its frozen weights: where they lie may change."""


def versions_to_keep(rewards: Mapping[int, float | None], config: LearnerConfig) -> set[int]:
    """Of the checkpoints, version: mean reward if known: the newest, each `keep_every`-th, and the best rewarded."""
    newest = sorted(rewards)[-config.keep_checkpoints :]
    every = [version for version in rewards if config.keep_every and version % config.keep_every == 0]
    known = [(reward, version) for version, reward in rewards.items() if reward is not None]
    best = [version for _, version in sorted(known, reverse=True)[: config.keep_best]]
    return {*newest, *every, *best}


def reward_of(checkpoint: Path) -> float | None:
    """The mean reward that a complete checkpoint was saved with; None if unknown."""
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    if "files" not in manifest and (checkpoint / "figures.json").exists():  # written by an earlier release
        manifest = json.loads((checkpoint / "figures.json").read_text())
    reward: float | None = manifest.get("reward")
    return reward


def adapter_of(checkpoint: Path) -> AdapterOf | None:
    """What the adapter in a complete checkpoint was trained beside; None if it has whole weights. Raises OSError or
    ValueError, with one line, if the manifest cannot be read."""
    try:
        found = json.loads((checkpoint / MANIFEST).read_text()).get("adapter")
        return AdapterOf.model_validate(found) if found else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, ["adapter", *first["loc"]]))
        raise ValueError(f"{checkpoint / MANIFEST}: {where}: {first['msg']}") from None
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{checkpoint / MANIFEST}: cannot be read ({error})") from None


def folder_of(folder: Path, version: int) -> Path:
    """The folder of the checkpoint of `version`."""
    return folder / f"v{version:06d}"


def seal(partial: Path, reward: float | None = None, adapter: AdapterOf | None = None) -> None:
    """Give `v000100.tmp` its manifest and its name: from now on it is a checkpoint, even after a power cut."""
    files = sorted(path for path in partial.rglob("*") if path.is_file())
    sizes = {str(path.relative_to(partial)): path.stat().st_size for path in files}
    of_adapter = {"adapter": adapter.model_dump(mode="json")} if adapter else {}
    (partial / MANIFEST).write_text(json.dumps({"reward": reward, **of_adapter, "files": sizes}, indent=1))
    for path in [*files, partial / MANIFEST]:
        _fsync(path)
    final, old = partial.with_suffix(""), partial.with_suffix(".old")
    if final.exists():  # incomplete, or without the export it now gets
        final.rename(old)
    partial.rename(final)
    _fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def discard(checkpoint: Path) -> None:
    """Remove a checkpoint: the manifest first, so that it is never mistaken for a complete one."""
    (checkpoint / MANIFEST).unlink(missing_ok=True)
    shutil.rmtree(checkpoint)


def fault(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, for people; None if all its files are there with their sizes."""
    try:
        manifest = json.loads((checkpoint / MANIFEST).read_text())
        files = manifest.get("files", manifest).items()  # an earlier release wrote the files alone
    except (OSError, ValueError, AttributeError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, size in files:
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def complete(folder: Path) -> list[int]:
    """Versions of the complete checkpoints in `folder`, oldest first."""
    found = (path for path in folder.glob("v*") if path.name[1:].isdigit())
    return sorted(int(path.name[1:]) for path in found if fault(path) is None)


def newest(folder: Path) -> int:
    """Version of the newest complete checkpoint, 0 if there is none; logs a warning for each newer incomplete one."""
    for path in sorted(folder.glob("v*"), reverse=True):
        if not path.name[1:].isdigit():
            continue
        if (why := fault(path)) is None:
            return int(path.name[1:])
        log.warning("checkpoint %s is incomplete and skipped: %s", path.name, why)
    return 0
