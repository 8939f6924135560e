"""What `benchmarks.vision` runs on is what it says: sizes of the model, photos, prompts; how its figures compare."""

import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoTokenizer

from benchmarks.rollout import ServerBenchmark
from benchmarks.runs.bare import once
from benchmarks.runs.photos import write_photos
from benchmarks.runs.processes import PROMPT_TOKENS, TEXT_ONLY, data_of, prompt_of
from benchmarks.vision.__main__ import VisionBenchmark, arguments
from benchmarks.vision.loading import same
from benchmarks.vision.pushes import differences, rows_of
from benchmarks.weights.known import silence
from benchmarks.weights.seeing import SEEING, special_ids
from benchmarks.weights.shapes import END, folder_of
from buffer.data.images import ImageFormat, decode
from configs.schema import DataConfig, ModelConfig
from learner.model.loading import build_on_meta

SMALL = sorted(shape for shape in SEEING if shape.startswith("speck"))


def test_the_shape_has_the_public_model_s_size(tmp_path: Path) -> None:
    folder = folder_of("Qwen2.5-VL-3B", tmp_path)
    model = build_on_meta(ModelConfig(path=str(folder)), "sdpa")
    assert model.num_parameters() == 3_754_622_976
    form = ImageFormat.of(str(folder), DataConfig(train="x"))
    assert form is not None and (form.factor, form.max_pixels, form.num_tokens(980, 980)) == (28, 1_048_576, 1225)


@pytest.mark.parametrize("shape", SMALL)
def test_the_marks_of_an_image_are_single_tokens(shape: str, tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder_of(shape, tmp_path))
    first, last, image, *_ = special_ids(shape).values()
    marked, wanted = "ab<|vision_start|><|image_pad|><|vision_end|>", [first, image, last]
    assert tokenizer.encode(marked)[2:] == wanted and tokenizer.eos_token_id == END


def test_photos_that_other_arguments_made_are_not_kept(tmp_path: Path) -> None:
    form, file = ImageFormat.of(str(folder_of(SMALL[0], tmp_path)), DataConfig(train="x")), tmp_path / "photos.parquet"
    assert form is not None

    def made(rows: int) -> tuple[int, int]:
        write_photos(file, form, rows, (4, 8), "ab", 5, 2)
        return pq.read_metadata(file).num_rows, file.stat().st_mtime_ns

    first = made(2)
    assert made(2) == first and made(3)[0] == 3


@pytest.mark.parametrize("shape", SMALL)
def test_photos_have_the_tokens_of_the_shape(shape: str, tmp_path: Path) -> None:
    folder = folder_of(shape, tmp_path)
    data = data_of(shape, tmp_path, folder)
    form = ImageFormat.of(str(folder), DataConfig(**data))
    rows = pq.read_table(data["train"]).slice(0, 48).to_pylist()
    fewest, most = SEEING[shape]["photos"]
    for number, row in enumerate(rows):
        shown = [decode(image["bytes"], form).num_tokens for image in row["images"]]
        assert len(shown) == (number % TEXT_ONLY > 0) == row["problem"].count("<image>")
        assert all(0.8 * fewest <= tokens <= 1.1 * most for tokens in shown)
        assert sum(shown) + PROMPT_TOKENS + 2 <= prompt_of(shape) == data["max_prompt_tokens"]
    kinds = {image["bytes"][:4] for row in rows for image in row["images"]}
    assert len(kinds) == 2, "JPEG and PNG"


def test_silence_leaves_the_tower_alone() -> None:
    tower = torch.ones(2, 2)
    silence([("model.visual.blocks.0.mlp.down_proj.weight", tower)])
    assert bool((tower == 1).all())


def test_a_placeholder_stands_once_for_each_image() -> None:
    assert once([7, 9, 9, 8, 9, 9, 9, 5], 9) == [7, 9, 8, 9, 5]


def test_the_control_of_the_probe_is_the_other_picture() -> None:
    server = {"text": [-1.0, -2.0], "picture": [-3.0, -4.0], "other": [-5.0, -4.0]}
    learner = {"text": [-1.0, -2.5], "picture": [-3.0, -4.0]}
    assert differences(server, learner) == {"text": 0.25, "picture": 0.0, "other": 1.0}


def test_frozen_pushes_stand_beside_pushes_of_everything() -> None:
    def way(size: float, seconds: float) -> dict:
        event = {"lag_s": seconds, "interrupted_s": seconds, "load_s": seconds, "before": 100.0, "after": 90.0}
        update = {"publish_s": seconds, "weights/span_s": seconds, "weights/probe": 0.01}
        probes = {"text": 0.01, "picture": 0.02, "other": 1.0}
        return {"bytes": size, "events": [event], "updates": [update], "probes": probes, "lost": 0, "finished": 9}

    rows = rows_of({"trained": way(2e9, 0.2), "frozen": way(1e9, 0.1)}, "speck-3-VL")
    first = next(row for row in rows if row.what.startswith("sent for a version"))
    assert (first.value, first.against_value, first.unit) == (1.0, 2.0, "GB")
    lag = next(row for row in rows if row.what.startswith("published to swapped, median"))
    assert (lag.value, lag.against_value) == (100.0, 200.0)
    alone = rows_of({"trained": way(2e9, 0.2)}, "speck-3-VL")
    assert all("tower trained" in row.what for row in alone)


def test_two_ways_of_loading_are_compared_tensor_by_tensor() -> None:
    ours = {"a": torch.ones(2), "b": torch.zeros(2)}
    assert same(ours, {name: x.clone() for name, x in ours.items()}) == ""
    assert same(ours, ours | {"b": torch.ones(2)}) == "1 of 2 tensors differ, b among them"
    assert same(ours, {"a": torch.ones(2)}) == "b is in one only"


def test_the_part_server_has_what_its_contenders_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It shares them with `benchmarks.rollout`, which has other arguments."""
    ran = list[tuple[str, int | None]]()
    monkeypatch.setattr(ServerBenchmark, "run", lambda self, contender, gpu: ran.append((contender, gpu)))
    where = ["--work", str(tmp_path), "--out", str(tmp_path / "found.json")]
    words = ["--parts", "server", "--shape", "speck-3-VL", "--gpus", "2", *where]
    monkeypatch.setattr(sys, "argv", ["vision", *words])
    VisionBenchmark(arguments()).server()
    assert sorted(contender for contender, _ in ran) == ["llm", "llm-ours", "server"]
    assert {gpu for contender, gpu in ran if contender != "server"} == {0, 1}
