"""The vision quickstart: its images, its reward, its model's supervised start, and that run file and page fit them."""

import argparse
import re
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import yaml
from transformers import AutoModelForImageTextToText

from buffer.data.images import ImageFormat, decode
from configs.checks import check_sft
from configs.load import load
from examples import quickstart, warm_start
from examples.shapes import make_model, make_problems, tiny_vlm
from examples.shapes.reward import compute_score
from learner.record.metrics import read
from learner.sft.answers import TrainedText, reader_of

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


def asked_for_model(folder: Path, *words: str) -> argparse.Namespace:
    return make_model.parse(["--problems", str(folder / "train.parquet"), "--out", str(folder / "model"), *words])


def texts_of(args: argparse.Namespace, rows: list[dict]) -> list[TrainedText]:
    """What the supervised start trains of `rows`."""
    sections = make_model.run_file(args)
    tiny_vlm.tiny_vlm(Path(sections["model"]["path"]), make_model.KIND)
    file = args.out / "sft.yaml"
    file.write_text(yaml.safe_dump(sections))
    config = load([str(file)])
    check_sft(config)
    reader = reader_of(config)
    files = [[image["bytes"] for image in row["images"]] for row in rows]
    found = [reader.texts(row | {"images": images}) for row, images in zip(rows, files, strict=True)]
    reader.close()
    return [text for (text,) in found]


@pytest.mark.long
def test_a_supervised_start_lowers_the_loss_writes_a_model_and_is_kept(tmp_path: Path):
    """By `python -m learner sft`, which shows each image once."""
    made(tmp_path, "--count", "400", "--eval", "1")
    args = asked_for_model(tmp_path, "--steps", "12")
    assert "770,496 parameters" in make_model.write(args)
    records = read(args.out / "warm_start" / "run" / "metrics.jsonl")
    assert [record["version"] for record in records] == list(range(1, 13))
    assert {record["images"] for record in records} == {make_model.BATCH} and records[-1]["epoch"] <= 1
    assert records[-1]["loss"] < records[0]["loss"] / 4
    model = AutoModelForImageTextToText.from_pretrained(args.out)
    assert model.num_parameters() == 770_496 and (args.out / "preprocessor_config.json").is_file()
    assert "kept" in make_model.write(args)


def test_other_images_in_the_same_file_make_another_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warm_start, "tune", lambda *given: 0.5)
    made(tmp_path, "--count", "4", "--eval", "1")
    args = asked_for_model(tmp_path)
    assert "kept" not in make_model.write(args)
    (args.out / "model.safetensors").touch()
    assert "kept" in make_model.write(args)
    made(tmp_path, "--count", "5", "--eval", "1")
    assert "kept" not in make_model.write(args)


def test_the_colours_and_their_end_are_trained(tmp_path: Path):
    train, _ = made(tmp_path, "--count", "6", "--eval", "1")
    tokenizer = tiny_vlm.tiny_tokenizer()
    for text, row in zip(texts_of(asked_for_model(tmp_path), train), train, strict=True):
        assert tokenizer.decode(text.tokens[text.trained]) == f"{row['answer']}<|im_end|>"
        assert (
            len(text.images) == 1 and text.tokens.tolist().count(tokenizer.convert_tokens_to_ids("<|image_pad|>")) == 2
        )


def test_no_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        asked_for_model(tmp_path, "--steps", "0")
    assert ended.value.code == 2 and "--steps 0: give at least 1" in capsys.readouterr().err


def test_the_run_file_fits_its_model_and_its_answers(tmp_path: Path):
    config = load([str(QUICKSTART)])
    tokenizer = tiny_vlm.tiny_tokenizer()
    train, _ = made(tmp_path, "--count", "1", "--eval", "1")
    (text,) = texts_of(asked_for_model(tmp_path), train)
    assert text.trained.argmax() <= config.data.max_prompt_tokens
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
