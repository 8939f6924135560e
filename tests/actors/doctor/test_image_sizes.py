"""What is said of the images of the data before anything starts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from actors.doctor.image_sizes import judge_images
from actors.doctor.run_file import judge, rows_to_try
from actors.doctor.trial import Judgement
from buffer.problems import check_images, load_problems
from configs.load import ConfigError, load
from configs.schema import Config
from tests.buffer.test_image_rows import write
from tests.buffer.test_images import CONFIG, PROCESSOR, file, model, noise
from tests.harness.weightless import add_weights

SMALL, LARGE = (file(Image.fromarray(noise(*size))) for size in ((100, 120), (600, 800)))


def run_file(folder: Path, images: list[bytes], **settings: Any) -> Config:
    rows = [{"problem": "<image>", "answer": "", "images": [image]} for image in images]
    rows.append({"problem": "text", "answer": "", "images": []})
    path = write(folder, "parquet", rows)
    given = {"model.path": folder, "data.train": path, "reward.function": "math"} | settings
    return load([f"--{name}={value}" for name, value in given.items()])


def judged(folder: Path, images: list[bytes], **settings: Any) -> Judgement:
    config = run_file(folder, images, **settings)
    problems, judgement = load_problems(config.data.train, config.data, room=folder), Judgement()
    judge_images(judgement, config, problems, "train")
    return judgement


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    model(tmp_path, CONFIG, preprocessor_config=PROCESSOR)
    return tmp_path


def test_sizes_are_said_in_pixels_and_tokens(seeing: Path) -> None:
    (fact,) = judged(seeing, [LARGE, SMALL, SMALL]).facts
    small, large = "120 x 100 (16 tokens)", "800 x 600 (609 tokens)"
    assert fact == (f"images of data.train: 3 of 4 rows have some; smallest {small}, median {small}, largest {large}")


def test_data_without_images_need_no_tower(seeing: Path) -> None:
    (fact,) = judged(seeing, []).facts
    assert fact.endswith("is trained with them; model.text_alone: true saves the tower's memory and time")
    assert judged(seeing, [], **{"model.text_alone": "true"}).facts == []


def test_the_encoder_takes_the_largest_image(seeing: Path) -> None:
    key = "rollout.engine.max_num_batched_tokens"
    assert judged(seeing, [LARGE], **{key: 609}).facts
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens: 608 is less than the 609 tokens .* set it to 609"):
        judged(seeing, [LARGE], **{key: 608})
    assert judged(seeing, [LARGE], **{key: 608, "data.max_pixels": 100_000}).facts


def test_images_that_cannot_be_shown_are_a_warning_or_if_all_of_them_a_refusal(seeing: Path) -> None:
    thin = file(Image.fromarray(np.zeros((1, 300, 3), np.uint8)))
    (warning,) = judged(seeing, [SMALL, b"<html>", thin, SMALL]).warnings
    assert "2 of 4 images looked at cannot be shown" in warning and "row 1: image 0: no image" in warning
    with pytest.raises(ConfigError, match=r"none of the 2 images looked at can be shown .*row 0: image 0: no image"):
        judged(seeing, [b"<html>", thin])


def test_the_judgement_on_a_run_has_them_too(seeing: Path) -> None:
    warnings = judge(run_file(seeing, [SMALL, b"<html>"], **{"run.folder": seeing})).warnings
    assert any("1 of 2 images looked at cannot be shown" in line for line in warnings)


def test_bounds_that_contradict_each_other_are_said_once(seeing: Path) -> None:
    settings = {"run.folder": seeing, "data.min_pixels": 5000, "data.max_pixels": 4000}
    assert sum("data.min_pixels" in line for line in judge(run_file(seeing, [SMALL], **settings)).refused) == 1


def test_a_message_holds_the_images_of_a_ranks_part(seeing: Path) -> None:
    images = [np.random.default_rng(row).bytes(400_000) for row in range(8)]
    images[0] = SMALL
    settings = {"buffer.max_message_mib": 2, "batch.groups": 8, "batch.samples": 2, "data.max_prompt_tokens": 10}
    with pytest.raises(
        ConfigError, match=r"max_message_mib: 2 is less than the images of 8 rows, .*, 3 MiB; set it to 3"
    ):
        judged(seeing, images, **settings)
    assert judged(seeing, images, **settings, **{"learner.ranks": 2}).facts, "each rank gets half of them"


def test_a_text_model_is_refused_images_by_both_keys(tmp_path: Path) -> None:
    model(tmp_path, {"model_type": "qwen2"})
    with pytest.raises(ConfigError, match=r"data\.train .*: 1 rows have images, but model\.path .* is a text model"):
        judged(tmp_path, [SMALL])


def test_rows_without_images_ask_nothing_of_the_model(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text(json.dumps({"problem": "<image>", "answer": ""}) + "\n")
    config = load([f"--data.train={path}", "--model.path=absent/from/here", "--reward.function=math"])
    assert check_images(config, load_problems(path, config.data)) is None


def test_rows_are_tried_with_few_bytes_of_images(seeing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judged(seeing, [LARGE] * 50)
    config = load([f"--data.train={seeing / 'train.parquet'}", f"--model.path={seeing}", "--reward.function=math"])
    problems = load_problems(config.data.train, config.data)
    monkeypatch.setattr("actors.doctor.run_file.IMAGE_BYTES", 10 * len(LARGE))
    rows = rows_to_try(problems)
    assert [number for number, _ in rows[:3]] == [0, 25, 50]
    with_images = [row for _, row in rows if "images" in row]
    assert len(with_images) == 10 and all(row["images"] == [LARGE] for row in with_images)


def test_a_text_model_has_nothing_to_freeze(tmp_path: Path) -> None:
    add_weights(Path(model(tmp_path, {"model_type": "qwen2"})))
    refused = judge(run_file(tmp_path, [], **{"run.folder": tmp_path, "model.freeze": "[vision]"})).refused
    assert any(line.startswith("model.freeze: [vision]: ") and line.endswith("remove the key") for line in refused)
