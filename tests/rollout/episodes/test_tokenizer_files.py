"""A tokenizer whose files are broken or absent is refused in one line with the model's folder."""

import json
from pathlib import Path

import pytest

from configs.load import load
from examples.countdown.make_model import make_tokenizer
from rollout.episodes.prompts import load_tokenizer


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("tokenizer.json", None, "has added tokens and no others"),
        ("tokenizer.json", "", "Expecting value"),
        ("tokenizer.json", "{}", "KeyError: 'added_tokens'"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "none"}}', ""),
        ("tokenizer_config.json", "[]", "AttributeError"),
    ],
)
def test_a_broken_tokenizer_is_refused(name: str, text: str | None, words: str, tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    config = load([f"--model.path={tmp_path}", "--data.train=d", "--reward.function=countdown"])
    assert len(load_tokenizer(config)) > 2
    (tmp_path / name).unlink() if text is None else (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"^model\.path: ") as error:
        load_tokenizer(config)
    line = str(error.value)
    assert str(tmp_path) in line and words in line and line.endswith("; correct its files or download the model again")
