"""Writes and reads a checkpoint's shards with checksums, and without running code.

`Writer` notes the CRC32C of a shard as it writes it: nobody has to read a shard again. torch unpickles `.metadata` and
all of a state that is no tensor, so a file made for it could run any program; `Reader` and `Planner` take only what
torch writes for a learner's state.
"""

import io
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, cast

import torch
from google_crc32c import extend
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import DEFAULT_SUFFIX, FileSystem, FileSystemReader, _FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.staging import AsyncStager

from configs.checkpoint_files import CHUNK_BYTES
from learner.saved.manifest import SUM_NOTE

METADATA = ".metadata"
CHECKPOINT = "torch.distributed.checkpoint"
CLASSES = {
    *((f"{CHECKPOINT}.metadata", name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((f"{CHECKPOINT}.metadata", f"{name}StorageMetadata") for name in ("Bytes", "Chunk", "Tensor")),
    (f"{CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{CHECKPOINT}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
}
"""What `.metadata` of a learner's state refers to."""
UNFIT = re.compile(r"Missing key in checkpoint state_dict: (\S+)\.|Size mismatch between saved .* for (\S+)")
UNREADABLE = (
    *(pickle.UnpicklingError, EOFError, ValueError, KeyError, IndexError, TypeError, AttributeError, ImportError),
    OSError,
)


class SummedStream:
    """A stream and its CRC32C."""

    def __init__(self, stream: io.IOBase) -> None:
        self._stream, self.crc = stream, 0

    def write(self, data: bytes | memoryview) -> int:
        view = memoryview(data).cast("B")
        for begin in range(0, len(view), CHUNK_BYTES):
            self.crc = extend(self.crc, bytes(view[begin : begin + CHUNK_BYTES]))
        return int(self._stream.write(data))  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class SummedFiles(FileSystem):
    """Notes the CRC32C of each shard beside it."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as stream:
            if not str(path).endswith(DEFAULT_SUFFIX) or mode != "wb":
                yield stream
                return
            summed = SummedStream(stream)
            yield cast(io.IOBase, summed)
        Path(f"{path}{SUM_NOTE}").write_text(f"{summed.crc:08x}", encoding="ascii")


class Writer(_FileSystemWriter):
    """torch's writer; not its public subclass, which copies the state in another way than `async_save`."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.fs = SummedFiles()


class Uncopied(AsyncStager):
    """Has the writer read a state where it lies: it is too large to copy, and nobody changes it meanwhile."""

    _synchronize_after_execute = False

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict

    def synchronize_staging(self) -> None: ...

    def close(self) -> None: ...


class RefusedClass(pickle.UnpicklingError):
    """A file refers to what no checkpoint has."""


class PlainUnpickler(pickle.Unpickler):
    """Loads objects of CLASSES and plain values. Raises RefusedClass for all else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in CLASSES:
            return super().find_class(module, name)
        if (module, name) == ("builtins", "getattr"):
            return _member
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise RefusedClass(f"{module}.{name}")


def _member(kind: Any, name: str) -> Any:
    """Python 3.11 pickles an Enum's member as a `getattr` call."""
    if isinstance(kind, type) and issubclass(kind, Enum) and name in kind.__members__:
        return kind.__members__[name]
    raise RefusedClass(f"builtins.getattr of {name}")


class Reader(FileSystemReader):
    """torch's reader, with PlainUnpickler."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = read_index(Path(self.path))
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class Planner(DefaultLoadPlanner):
    """torch's planner, with tensors and plain values only."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        try:
            torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:  # torch's text is long
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            raise RefusedClass(named[1] if named else "something that torch does not name") from None
        value.seek(0)
        super().load_bytes(read_item, value)


def read_index(folder: Path) -> Metadata:
    """The index of the shards. Raises UNREADABLE."""
    with open(folder / METADATA, "rb") as file:
        found = PlainUnpickler(file).load()
    if not isinstance(found, Metadata):
        raise pickle.UnpicklingError(f"{type(found).__name__} instead of Metadata")
    return found


def refusal(folder: Path) -> str | None:
    """Why the index is refused, if so."""
    try:
        read_index(folder)
    except RefusedClass as error:
        return _refused(folder / METADATA, error)
    except UNREADABLE as error:
        return f"{folder / METADATA}: cannot be read ({type(error).__name__}: {error}); remove that checkpoint"
    return None


def refused_value(folder: Path, error: CheckpointException) -> str | None:
    """Why a shard was refused, if so."""
    found = next((one for one, _ in error.failures.values() if isinstance(one, RefusedClass)), None)
    return _refused(folder, found) if found else None


def of_another_model(folder: Path, error: CheckpointException) -> str | None:
    """Why the shards do not fit the model, if so."""
    for one, _ in error.failures.values():
        if found := UNFIT.search(str(one)):
            lacks = f"has no {found[1]}" if found[1] else f"holds {found[2]} in another shape"
            return (
                f"model.path: {folder} is of another model: it {lacks}; undo the change of model, or begin another run"
            )
    return None


def _refused(path: Path, error: BaseException) -> str:
    return f"{path}: refers to {error}, which no checkpoint of a learner does: it could run any program; remove it"
