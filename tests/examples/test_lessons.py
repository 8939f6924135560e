"""Lessons for real models: what they show is true, never held out, and they write a model that is kept."""

import json
import random
from argparse import Namespace
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoTokenizer

from buffer.data.entry_maker import GeneratedRows
from examples import lesson, warm_start
from examples.chain_sum import teach_form
from examples.countdown import make_model, make_problems, teach_search
from examples.fine_tuning import write_down
from rollout.rewards.countdown import compute_score
from tests.harness.world import ROOT

TERMS = st.lists(st.tuples(st.sampled_from("+-"), st.integers(0, 99)), min_size=1, max_size=4)


@given(first=st.integers(0, 99), more=TERMS)
def test_each_step_of_a_sum_is_right(first: int, more: list[tuple[str, int]]) -> None:
    expression = " ".join([str(first), *(f"{sign} {term}" for sign, term in more)])
    steps = list(teach_form.steps_of(expression))
    assert [eval(text) for text, _ in steps] == [value for _, value in steps] and len(steps) == len(more)
    assert steps[-1][1] == eval(expression)


@pytest.mark.long
def test_the_answers_shown_to_sums_are_those_of_the_set() -> None:
    rows = GeneratedRows(teach_form.SHOWN)
    for row in (rows(index) for index in range(40)):
        assert teach_form.answer(row["problem"]).endswith(f" <answer>{row['answer']}</answer>")


def test_traces_are_true_and_some_give_up() -> None:
    """Every value is right; a trace that ends with the target is rewarded, and others are not."""
    source, rewards = random.Random(0), []
    for _ in range(200):
        text = teach_search.trace([8, 6, 4], 2, "+-*", source)
        steps = text.removeprefix("<think>").partition("</think>")[0].split(", ")
        assert all(teach_search.value_of(step.rpartition("=")[0]) == step.rpartition("=")[2] for step in steps)
        score = compute_score(text, {"numbers": [8, 6, 4], "target": 2})
        rewards.append(score["score"] if isinstance(score, dict) else score)
        assert (rewards[-1] == 1.0) == (steps[-1].rpartition("=")[2] == "2")
    assert 0.02 < sum(reward == 1.0 for reward in rewards) / len(rewards) < 0.9


@pytest.mark.long
def test_a_lesson_writes_a_model_and_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By `python -m learner sft`, on as many demonstrations as its steps need."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    problems, base, out = tmp_path / "problems", tmp_path / "base", tmp_path / "out"
    made = ["--out", str(problems), "--prompt", "words", "--count", "90", "--eval", "10"]
    make_problems.write(make_problems.parse(made))
    tokenizer = make_model.make_tokenizer()
    warm_start.make_network(tokenizer).save_pretrained(base)
    tokenizer.save_pretrained(base)
    given_ = ["--model", str(base), "--problems", str(problems / "train.parquet"), "--out", str(out)]
    args = teach_search.parse([*given_, "--steps", "2", "--batch", "2"])
    assert "2 steps of 2 answers" in teach_search.write(args)
    assert json.loads((out / "lesson.json").read_text())["steps"] == 2
    assert len((out / "lesson" / "demonstrations.jsonl").read_text().splitlines()) == 4
    first, taught = load_file(base / "model.safetensors"), load_file(out / "model.safetensors")
    assert first.keys() == taught.keys() and not torch.equal(first["lm_head.weight"], taught["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(out).chat_template == tokenizer.chat_template
    assert "kept" in teach_search.write(args)
    (out / "lesson.json").write_text("{}")
    failing = Namespace(**vars(args) | {"steps": 3, "model": tmp_path / "nowhere"})
    with pytest.raises(SystemExit) as ended:
        teach_search.write(failing)
    assert ended.value.code == 2 and not (out / "lesson.json").exists()


def test_a_lesson_never_shows_a_held_out_problem(tmp_path: Path) -> None:
    make_problems.write(make_problems.parse(["--out", str(tmp_path), "--count", "90", "--eval", "30"]))
    rows = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("train", "eval")}
    texts = {name: {row["prompt"][0]["content"] for row in found} for name, found in rows.items()}
    file = tmp_path / "shown.jsonl"
    drawn = lesson.demonstrations(teach_search.traces_of(rows["train"], "+-"), random.Random(0))
    write_down(file, islice(drawn, 200))
    shown = [json.loads(line)["prompt"][0]["content"] for line in file.read_text().splitlines()]
    assert len(shown) == 200 and {*shown} <= texts["train"] and not texts["train"] & texts["eval"]


@pytest.mark.parametrize(
    "wrong", [["--steps", "0"], ["--lr", "-1"], ["--model", "nowhere"]], ids=lambda words: words[0]
)
def test_wrong_arguments_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], wrong: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        teach_form.parse(["--model", str(tmp_path), "--out", str(tmp_path / "out"), *wrong])
    assert ended.value.code == 2 and wrong[0] in capsys.readouterr().err
