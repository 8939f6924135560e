"""Which checkpoints a run's folder has, and whether their files are those that were written.

A manifest is written last and makes a folder a checkpoint. It has CRC32C of all files and of itself; earlier releases
wrote sizes alone.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from google_crc32c import extend, value

log = logging.getLogger(__name__)
MANIFEST = "manifest.json"
KEYS = {"reward", "adapter", "files"}
SUMS, OWN_SUM = "crc32c", "manifest_crc32c"
"""CRC32C of each file, and of the manifest without this key."""
POSITION, FORKED = "position", "forked"
"""Keys of a manifest: the position among demonstrations, and whether the checkpoint was copied into a new run."""
CHUNK_BYTES = 1 << 20
REPLACED, DAMAGED = ".old", ".damaged"
"""Endings of folders that are being replaced, or whose files are damaged."""


class Listed(NamedTuple):
    sizes: Mapping[str, int]
    sums: Mapping[str, int]
    """Empty for an earlier release."""


def folder_of(folder: Path, version: int) -> Path:
    return folder / f"v{version:06d}"


def crc32c_of(file: Path) -> int:
    crc = 0
    with open(file, "rb", buffering=0) as stream:
        while chunk := stream.read(CHUNK_BYTES):
            crc = extend(crc, chunk)
    return crc


def manifest_of(checkpoint: Path) -> dict[str, Any]:
    """Raises OSError or ValueError."""
    manifest = json.loads((checkpoint / MANIFEST).read_text(encoding="utf-8"))
    if not isinstance(manifest, dict):
        raise ValueError(f"a map is needed, and this is a {type(manifest).__name__}")
    own = manifest.pop(OWN_SUM, None)
    if own is None and SUMS not in manifest:  # of an earlier release
        unknown = sorted(manifest.keys() - KEYS) if "files" in manifest else []
        if unknown:
            raise ValueError(f"{unknown[0]} is no key of it: its bytes are damaged")
    elif own != sum_of(manifest):
        raise ValueError("its CRC32C is wrong: its bytes are damaged")
    return manifest


def sum_of(manifest: Mapping[str, Any]) -> int:
    return int(value(json.dumps(manifest, sort_keys=True).encode()))


def listed(checkpoint: Path) -> Listed:
    """Raises OSError or ValueError."""
    manifest = manifest_of(checkpoint)
    sizes = manifest.get("files", manifest)  # an earlier release wrote the files alone
    if not isinstance(sizes, dict):
        raise ValueError(f"files is a {type(sizes).__name__}")
    return Listed(sizes, manifest.get(SUMS, {}) if "files" in manifest else {})


def fault(checkpoint: Path) -> str | None:
    """Return what is missing or has another size, if any."""
    try:
        files = listed(checkpoint).sizes.items()
    except (OSError, ValueError) as error:
        return f"{MANIFEST} cannot be read ({error})"
    for name, size in files:
        try:
            found = (checkpoint / name).stat().st_size
        except OSError:
            return f"{name} is missing"
        if found != size:
            return f"{name} has {found} bytes instead of {size}"
    return None


def damage(checkpoint: Path, names: Iterable[str] | None = None) -> str | None:
    """Name a file that differs from its checksum."""
    for name, crc in listed(checkpoint).sums.items():
        if names is not None and name not in names:
            continue
        try:
            found = crc32c_of(checkpoint / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != crc:
            return f"{name} is damaged: its CRC32C is {found:08x}, and was {crc:08x} when it was written"
    return None


def complete(folder: Path) -> list[int]:
    """Complete versions, oldest first."""
    return sorted(version for version, path in _found(folder).items() if fault(path) is None)


def newest(folder: Path) -> int:
    """The newest complete version, or 0."""
    for version, path in sorted(_found(folder).items(), reverse=True):
        if (why := fault(path)) is None:
            return version
        log.warning("checkpoint %s is incomplete and skipped: %s", path.name, why)
    return 0


def _found(folder: Path) -> dict[int, Path]:
    """Includes a checkpoint that was being replaced when the learner was killed."""
    replaced = {int(path.stem[1:]): path for path in folder.glob(f"v*{REPLACED}") if path.stem[1:].isdigit()}
    return replaced | {int(path.name[1:]): path for path in folder.glob("v*") if path.name[1:].isdigit()}
