"""What a model's folder lacks is named before anything starts, and the files that count are those that are read."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from configs.model_facts import model_facts
from configs.model_folder import AGAIN, INDEX, WHOLE, faults, weight_files

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4\n"
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A model of two shards and an index."""
    folder = tmp_path / "sharded"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    for name, tensor in zip(SHARDS, "ab", strict=True):
        save_file({tensor: np.zeros((4, 5), np.float32)}, folder / name)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", SHARDS, strict=True))}))
    return folder


def put(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text, encoding="utf-8")


def cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


def only(*names: str) -> Callable[[Path], object]:
    """Removes all weights, and puts files with these names in their place."""

    def act(folder: Path) -> None:
        for file in [*folder.glob("*.safetensors"), folder / INDEX]:
            file.unlink()
        for name in names:
            (folder / name).write_bytes(b"weights")

    return act


def dangling(folder: Path) -> None:
    only()(folder)
    (folder / WHOLE).symlink_to("nowhere")


def adapter_alone(folder: Path) -> None:
    only("adapter_model.safetensors")(folder)
    (folder / "config.json").unlink()
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen2.5-7B"}')


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (put("config.json", "\ufeff{}"), "config.json is not JSON (Unexpected UTF-8 BOM"),
        (put("config.json", '{"hidden_size": 64,  // small\n}'), "config.json is not JSON (Expecting property name"),
        (put("config.json", "[]"), "config.json holds no JSON object"),
        (put("config.json", POINTER), "config.json is a pointer of Git LFS, not the file itself; run `git lfs pull`"),
        (put(SHARDS[1], POINTER), f"{SHARDS[1]} is a pointer of Git LFS, not the file itself; run `git lfs pull`"),
        (lambda folder: (folder / SHARDS[1]).unlink(), f"1 of 2 shards in {INDEX} are missing, such as {SHARDS[1]}"),
        (cut(SHARDS[0], 100), f"{SHARDS[0]} is cut off: 100 bytes, "),
        (cut(SHARDS[0], 20), f"{SHARDS[0]} has no header of a safetensors file"),
        (cut(SHARDS[0], 0), f"{SHARDS[0]} has no header of a safetensors file"),
        (put(INDEX, "{}"), f"{INDEX} has no weight_map"),
        (put(INDEX, '{"weight_map": '), f"{INDEX} is not JSON"),
        (
            put(INDEX, json.dumps({"weight_map": {"a": SHARDS[0], "b": SHARDS[1], "c": SHARDS[1]}})),
            f"1 of the tensors in {INDEX} stand in no shard, such as c",
        ),
        (lambda folder: (folder / INDEX).unlink(), f"has {SHARDS[0]}, and neither {WHOLE} nor {INDEX}"),
        (only(), f"has no weights, neither {WHOLE} nor {INDEX} with its shards; {AGAIN}"),
        (only("pytorch_model.bin", "training_args.bin"), "its weights are in pytorch_model.bin, and only safetensors"),
        (only("q4.gguf"), "its weights are in q4.gguf, and only safetensors are read; convert them"),
        (dangling, f"{WHOLE} is no file, or a link to none; {AGAIN}"),
        (adapter_alone, "has an adapter and no model; name the model beneath it, Qwen/Qwen2.5-7B, or merge the two"),
        (put("adapter_config.json", "{}"), "adapter_config.json stands beside the weights"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json; name a folder in Hugging Face format"),
    ],
)
def test_a_fault_is_one_line_with_the_file_and_a_remedy(
    damage: Callable[[Path], object], words: str, sharded: Path
) -> None:
    assert not list(faults(sharded))
    damage(sharded)
    (line,) = faults(sharded)
    assert words in line and ";" in line


def test_a_server_of_another_model_takes_what_vllm_takes(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    assert not list(faults(sharded, served=True))
    cut(SHARDS[1], 90)(sharded)
    assert len(list(faults(sharded, served=True))) == 1
    for name in SHARDS:
        (sharded / name).unlink()
    assert len(list(faults(sharded, served=True))) == 1
    put("pytorch_model.bin", "weights")(sharded)
    assert not list(faults(sharded, served=True))


@pytest.mark.parametrize(("name", "kind"), [("a.weight", "F8_E4M3"), ("a.weight", "I8"), ("a.blocks", "F4")])
def test_quantised_weights_are_refused_though_config_json_has_no_word_of_them(
    name: str, kind: str, sharded: Path
) -> None:
    """As in files of ModelOpt, and where `quantization_config` was removed. Masks and positions are no weights."""
    (sharded / INDEX).unlink()
    for file in sharded.glob("*.safetensors"):
        file.unlink()
    kinds = {name: kind, "attention.bias": "U8", "position_ids": "I64", "norm.weight": "BF16"}
    tensors = {key: {"dtype": value, "shape": [0], "data_offsets": [0, 0]} for key, value in kinds.items()}
    header = json.dumps(tensors).encode()
    (sharded / WHOLE).write_bytes(len(header).to_bytes(8, "little") + header)
    scales = "and would be read without their scales; dequantise them to bfloat16 first"
    assert list(faults(sharded)) == [f"1 of its weights are quantised, such as {name} ({kind}), {scales}"]
    assert not list(faults(sharded, served=True))


def test_only_the_files_of_the_index_count(sharded: Path) -> None:
    before = model_facts(str(sharded)).parameters
    save_file({"a": np.zeros((4, 5), np.float32)}, sharded / "consolidated.safetensors")
    assert model_facts(str(sharded)).parameters == before == 40
    assert [file.name for file in weight_files(sharded)] == [*SHARDS]
    assert not list(faults(sharded))
