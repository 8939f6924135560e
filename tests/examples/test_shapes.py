"""The vision quickstart: its images, its reward, its model's supervised start, and that run file and page fit them."""

import json
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

from buffer.data.images import ImageFormat, decode
from configs.load import load
from examples import quickstart
from examples.shapes import make_model, make_problems, tiny_vlm
from examples.shapes.reward import compute_score

FOLDER = Path(make_problems.__file__).parent
QUICKSTART = FOLDER / "quickstart.yaml"


def made(folder: Path, *words: str) -> tuple[list[dict], list[dict]]:
    make_problems.write(make_problems.parse(["--out", str(folder), *words]))
    train, held_out = (pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "eval"))
    return train, held_out


def test_each_image_shows_the_colours_of_its_answer_and_none_is_held_out_twice(tmp_path: Path):
    train, held_out = made(tmp_path, "--count", "60", "--eval", "20")
    assert (len(train), len(held_out)) == (60, 20)
    files = {row["images"][0]["bytes"] for row in train + held_out}
    assert len(files) == 80
    model = tmp_path / "model"
    tiny_vlm.tiny_vlm(model, make_model.KIND)
    form = ImageFormat.of(str(model), load([str(QUICKSTART)]).data)
    assert form
    names, values = list(make_problems.COLOURS), np.array(list(make_problems.COLOURS.values()))
    for row in train:
        picture = decode(row["images"][0]["bytes"], form)
        assert picture.num_tokens == 2  # nothing is resized: a square is a token
        halves = picture.pixels.reshape(make_problems.SIDE, 2, make_problems.SIDE, 3).mean((0, 2))
        nearest = np.abs(halves[:, None] - values).sum(-1).argmin(1)
        assert row["answer"] == " ".join(names[index] for index in nearest)
        assert row["problem"].count("<image>") == 1


def test_rows_depend_on_the_seed_alone_and_are_kept(tmp_path: Path):
    words = ["--count", "6", "--eval", "2"]
    first, again, other = (
        made(tmp_path / name, *words, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first == again and first != other
    assert "kept" in make_problems.write(make_problems.parse(["--out", str(tmp_path / "a"), *words, "--seed", "1"]))


@pytest.mark.parametrize(
    ("said", "score"),
    [("red gold", 1.0), ("red blue", 0.5), ("gold red", 0.0), ("red", 0.0), ("red gold red", 0.0), ("", 0.0)],
)
def test_the_reward_is_the_share_of_colours_that_are_right(said: str, score: float):
    assert compute_score(said, "red gold") == score


@pytest.mark.long
def test_a_supervised_start_lowers_the_loss_writes_a_model_and_is_kept(tmp_path: Path):
    train, _ = made(tmp_path, "--count", "64", "--eval", "1")
    words = ["--problems", str(tmp_path / "train.parquet"), "--out", str(tmp_path / "model")]
    threads = torch.get_num_threads()

    def loss_after(steps: int) -> float:
        said = make_model.write(make_model.parse([*words, "--steps", str(steps)]))
        torch.set_num_threads(threads)
        assert f"after {steps} steps" in said
        model = AutoModelForImageTextToText.from_pretrained(tmp_path / "model", dtype=torch.float32)
        form = ImageFormat.of(str(tmp_path / "model"), load([str(QUICKSTART)]).data)
        with torch.no_grad():
            return model(**make_model.batch(train, AutoTokenizer.from_pretrained(tmp_path / "model"), form)).loss.item()

    assert loss_after(12) < loss_after(1) / 2
    assert "kept" in make_model.write(make_model.parse([*words, "--steps", "1"]))
    assert json.loads((tmp_path / "model/warm_start.json").read_text())["steps"] == 1
    made(tmp_path, "--count", "63", "--eval", "1")  # other images in the same file: another model
    assert "kept" not in make_model.write(make_model.parse([*words, "--steps", "1"]))
    torch.set_num_threads(threads)


def test_the_run_file_fits_its_model_and_its_answers(tmp_path: Path):
    config = load([str(QUICKSTART)])
    tokenizer = tiny_vlm.tiny_tokenizer()
    longest = tokenizer.encode(make_model.prompt(tokenizer, make_problems.QUESTION, 2), add_special_tokens=False)
    assert len(longest) <= config.data.max_prompt_tokens
    for colour in make_problems.COLOURS:
        assert len(tokenizer.encode(colour, add_special_tokens=False)) == 1
    answer = [*tokenizer.encode("gold blue", add_special_tokens=False), tokenizer.eos_token_id]
    assert len(answer) <= config.sampling.max_tokens
    assert config.data.max_prompt_tokens + config.sampling.max_tokens <= config.rollout.engine["max_model_len"]
    assert config.rollout.engine["max_num_seqs"] == config.rollout.sequences
    file, _, function = config.reward.function.partition(":")
    assert (Path(*FOLDER.parts[-2:]) / "reward.py", "compute_score") == (Path(file), function)
    assert config.run.name == quickstart.NAMES["shapes"]


@pytest.mark.parametrize("toy", quickstart.NAMES)
def test_the_page_of_a_toy_names_all_its_files_and_its_commands(toy: str):
    folder = FOLDER.parent / toy
    page = (folder / "README.md").read_text(encoding="utf-8")
    files = {path.name for path in folder.iterdir() if path.is_file() and path.name != "README.md"}
    assert set(re.findall(r"^\| `([^`/]+)`", page, re.M)) == files - {"smollm2.yaml"}
    for module in re.findall(rf"examples\.{toy}\.(\w+)", page):
        assert f"{module}.py" in files
