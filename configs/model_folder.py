"""Finds what a model's folder lacks before anything reads its weights."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from configs.model_sizes import oversized

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"
OTHER_FORMS = (".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
POINTER = b"version https://git-lfs"
"""Git LFS leaves it in place of a large file."""
MOST_HEADER = 100_000_000
FLOATS = ("BF16", "F16", "F32", "F64")
AGAIN = "download the model again"


class FolderError(ValueError):
    """One line with the file's name, without the folder."""


class Header(NamedTuple):
    shapes: dict[str, list[int]]
    num_bytes: int
    quantised: tuple[str, ...] = ()
    """Weights that are no plain numbers, each with its type."""


def weight_files(folder: Path) -> list[Path]:
    if os.path.lexists(folder / WHOLE):  # a link whose target is gone too
        return [folder / WHOLE]
    if os.path.lexists(folder / INDEX):
        return [folder / name for name in sorted(set(_shards(folder).values()))]
    return sorted(folder.glob("*.safetensors"))


def header_of(file: Path) -> Header:
    """8 bytes of length, then JSON. Raises FolderError."""
    try:
        with file.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if first == POINTER[:8]:
                raise FolderError(_pointer(file))
            found: dict[str, Any] = json.loads(stream.read(length) if length <= MOST_HEADER else b"")
        tensors = {name: tensor for name, tensor in found.items() if name != "__metadata__"}
        shapes = {name: [int(size) for size in tensor["shape"]] for name, tensor in tensors.items()}
        end = max((int(tensor.get("data_offsets", (0, 0))[1]) for tensor in tensors.values()), default=0)
    except FolderError:
        raise
    except OSError as error:
        raise FolderError(f"{file.name} cannot be read: {error.strerror}; {AGAIN}") from None
    except (ValueError, AttributeError, LookupError, TypeError, RecursionError):
        raise FolderError(f"{file.name} has no header of a safetensors file; {AGAIN}") from None
    kinds = {name: str(tensor.get("dtype")) for name, tensor in tensors.items()}
    quantised = tuple(f"{name} ({kind})" for name, kind in kinds.items() if _is_quantised(name, kind))
    return Header(shapes, 8 + length + end, quantised)


def _is_quantised(name: str, kind: str) -> bool:
    """Other tensors, such as masks and positions, may be whole numbers."""
    return kind.startswith(("F8", "F4", "F6")) or (name.endswith("weight") and kind not in FLOATS)


def faults(folder: Path, weights: bool = True, served: bool = False) -> Iterator[str]:
    """`served`: vLLM alone reads the weights, and takes other forms too."""
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER).is_file():
            yield f"has an adapter and no model; name the model beneath it, {_base(folder)}, or merge the two"
        else:
            yield "has no config.json; name a folder in Hugging Face format"
        return
    try:
        config = _json(folder / "config.json")
    except FolderError as error:
        yield str(error)
        return
    if too_large := list(oversized(config)):
        yield from too_large
        return
    if weights:
        yield from _weights(folder, served)


def _weights(folder: Path, served: bool) -> Iterator[str]:
    if (folder / ADAPTER).is_file():
        yield f"{ADAPTER} stands beside the weights, and transformers would lay that adapter on them; move it elsewhere"
        return
    try:
        files = weight_files(folder)
    except FolderError as error:
        yield str(error)
        return
    named = any(os.path.lexists(folder / name) for name in (WHOLE, INDEX))
    if not named and not (served and (files or _other_forms(folder))):
        yield _without(folder, files)
        return
    if missing := [file for file in files if not file.is_file()]:
        several = f"{len(missing)} of {len(files)} shards in {INDEX} are missing, such as {missing[0].name}"
        yield f"{several if len(files) > 1 else f'{missing[0].name} is no file, or a link to none'}; {AGAIN}"
        return
    held: set[str] = set()
    quantised: list[str] = []
    try:
        for file in files:
            header = _whole_header(file)
            held.update(header.shapes)
            quantised += header.quantised
        indexed = _shards(folder) if named and files != [folder / WHOLE] else {}
    except FolderError as error:
        yield str(error)
        return
    if lost := [name for name in indexed if name not in held]:
        yield f"{len(lost)} of the tensors in {INDEX} stand in no shard, such as {lost[0]}; {AGAIN}"
    if quantised and not served:
        scales = "and would be read without their scales; dequantise them to bfloat16 first"
        yield f"{len(quantised)} of its weights are quantised, such as {quantised[0]}, {scales}"


def _without(folder: Path, files: list[Path]) -> str:
    if files:
        return f"has {files[0].name}, and neither {WHOLE} nor {INDEX}, by which weights are found; {AGAIN}"
    if others := _other_forms(folder):
        convert = "convert them with save_pretrained of transformers"
        return f"its weights are in {others[0]}, and only safetensors are read; {convert}, or name another folder"
    return f"has no weights, neither {WHOLE} nor {INDEX} with its shards; {AGAIN}"


def _other_forms(folder: Path) -> list[str]:
    return sorted(
        file.name for file in folder.iterdir() if file.suffix in OTHER_FORMS and file.name != "training_args.bin"
    )


def _whole_header(file: Path) -> Header:
    header, size = header_of(file), file.stat().st_size
    if size != header.num_bytes:
        how = "is cut off" if size < header.num_bytes else "is too long"
        raise FolderError(f"{file.name} {how}: {size:,} bytes, {header.num_bytes:,} by its header; {AGAIN}")
    return header


def _shards(folder: Path) -> dict[str, str]:
    given = _json(folder / INDEX).get("weight_map")
    if not isinstance(given, dict) or not given or not all(isinstance(name, str) for name in given.values()):
        raise FolderError(f"{INDEX} has no weight_map of tensors and files; {AGAIN}")
    return given


def _base(folder: Path) -> str:
    try:
        named = _json(folder / ADAPTER).get("base_model_name_or_path")
    except FolderError:
        named = None
    return str(named or f"base_model_name_or_path in {ADAPTER}")


def _json(file: Path) -> dict[str, Any]:
    try:
        data = file.read_bytes()
        if data.startswith(POINTER):
            raise FolderError(_pointer(file))
        found = json.loads(data.decode())
    except OSError as error:
        raise FolderError(f"{file.name} cannot be read: {error.strerror}; {AGAIN}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, FolderError):
            raise
        raise FolderError(f"{file.name} is not JSON ({str(error).splitlines()[0]}); correct it, or {AGAIN}") from None
    if not isinstance(found, dict):
        raise FolderError(f"{file.name} holds no JSON object; {AGAIN}")
    return found


def _pointer(file: Path) -> str:
    return f"{file.name} is a pointer of Git LFS, not the file itself; run `git lfs pull` in the folder"
