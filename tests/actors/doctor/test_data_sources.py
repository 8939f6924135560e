"""What is said of a run's data before it starts: weights, sets that overlap, long prompts, and what ends an answer."""

import json
from pathlib import Path

import pytest

from actors.doctor.run_file import judge, shares
from actors.doctor.trial import Judgement, judge_ends, judge_lengths
from configs.data.sources import shared_entries
from configs.load import load
from configs.schema import Config, MixedSource
from examples.countdown.make_model import make_tokenizer
from rollout.episodes.prompts import Prompts
from tests.harness.tiny_vlm import encoded, picture
from tests.harness.weightless import add_weights


def config(folder: Path, *overrides: str) -> Config:
    needed = [f"--model.path={folder}", "--data.train=d.jsonl", "--reward.function=math", f"--run.folder={folder}"]
    return load([*needed, "--buffer.address=tcp://127.0.0.1:*", *(f"--{override}" for override in overrides)])


def test_a_mixture_is_judged_as_a_whole(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (add_weights(tmp_path) / "config.json").write_text('{"model_type": "qwen2"}')
    rows = ["8 6 4=2", "8 6 4=2 " * 300]
    (tmp_path / "own.jsonl").write_text("".join(json.dumps({"question": row, "answer": "1"}) + "\n" for row in rows))
    (tmp_path / "more.csv").write_text("problem,answer\n8 6,1\n")
    sources = f"[{{path: {tmp_path}/own.jsonl, weight: 1, columns: {{problem: question}}}}, "
    sources += f"{{path: {tmp_path}/more.csv, weight: 3}}]"
    judgement = judge(config(tmp_path, f"data.train={sources}", f"data.eval={tmp_path}/more.csv"), live=True)
    assert judgement.refused == [] and judgement.rows == 3
    assert [line for line in judgement.facts if line.startswith("data.train: ")] == [
        f"data.train: 25.0% of the problems are of {tmp_path}/own.jsonl: 2 rows; an epoch has 1 of them, 0.375 passes",
        f"data.train: 75.0% of the problems are of {tmp_path}/more.csv: 1 rows; an epoch has 2 of them, 2.25 passes",
    ]
    (long,) = [line for line in judgement.warnings if line.startswith("data.max_prompt_tokens")]
    assert "1 of 3 rows looked at (33.3%) have longer prompts and are dropped" in long
    assert any(line.startswith("answers end at <|endoftext|> (tokenizer) or after") for line in judgement.facts)


def test_demonstrations_with_a_row_that_no_rank_can_read_are_refused_before_anything_starts(tmp_path: Path) -> None:
    """`configs` once said valid, and the learner refused the row after all processes had started."""
    make_tokenizer().save_pretrained(tmp_path)
    (add_weights(tmp_path) / "config.json").write_text('{"model_type": "qwen2"}')
    rows = [json.dumps({"problem": "8 6 4=2", "answer": answer}) + "\n" for answer in ("a", "\ud83d", "b")]
    (tmp_path / "d.jsonl").write_text(rows[0])
    (tmp_path / "shown.jsonl").write_text("".join(rows))
    given = [f"data.train={tmp_path}/d.jsonl", f"data.demonstrations={{path: {tmp_path}/shown.jsonl, share: 0.5}}"]
    (line,) = judge(config(tmp_path, *given), live=True).refused
    assert line.startswith(f"data.demonstrations {tmp_path}/shown.jsonl: line 2: answer has half a surrogate pair")


@pytest.mark.parametrize(
    ("image", "why"),
    [
        (
            "a.png",
            ": 1 rows have images, but model.path {folder} is a text model; name a model whose images are trained",
        ),
        ("b.png", ": line 1: image 0: {folder}/b.png: No such file or directory; correct data.image_dir"),
    ],
)
def test_images_of_demonstrations_that_cannot_be_trained_are_refused(tmp_path: Path, image: str, why: str) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    (add_weights(tmp_path) / "config.json").write_text('{"model_type": "qwen2"}')
    (tmp_path / "a.png").write_bytes(encoded(picture(32, 32)))
    row = {"problem": "<image>8 6 4=2", "answer": "a", "images": [image]}
    (tmp_path / "d.jsonl").write_text(json.dumps({"problem": "8 6 4=2", "answer": "a"}) + "\n")
    (tmp_path / "shown.jsonl").write_text(json.dumps(row) + "\n")
    given = [f"data.train={tmp_path}/d.jsonl", f"data.demonstrations.path={tmp_path}/shown.jsonl"]
    (line,) = judge(config(tmp_path, *given), live=True).refused
    assert line.startswith(f"data.demonstrations {tmp_path}/shown.jsonl{why.format(folder=tmp_path)}")


def test_how_many_prompts_of_all_are_too_long(tmp_path: Path) -> None:
    found = Judgement(rows=8000)
    judge_lengths(found, config(tmp_path, "data.max_prompt_tokens=10"), {0: 10, 1: 11, 2: 40, 3: 3})
    assert "(50.0%) have longer prompts, as about 4,000 of all 8,000 have, and are dropped" in found.warnings[0]


def test_what_ends_an_answer_of_a_base_model(tmp_path: Path) -> None:
    plain, found = config(tmp_path, "data.chat_template=none"), Judgement()
    prompts = Prompts(make_tokenizer(), plain)
    judge_ends(found, plain, prompts)
    assert found.facts[0].startswith(
        "note: data.chat_template: none: answers end at <|endoftext|> (tokenizer) or after"
    )
    prompts.end_sources = {}
    judge_ends(found, plain, prompts)
    assert found.warnings == [
        "sampling.stop: []: nothing ends an answer but sampling.max_tokens 1024; name a token of the tokenizer"
    ]


def test_sets_that_share_entries_are_named() -> None:
    train = "reasoning_gym:gcd?size=10000&seed=1"
    (line,) = shared_entries(train, "reasoning_gym:gcd?size=200&seed=2")
    assert line.startswith(
        "reasoning_gym:gcd?size=200&seed=2: 200 of its 200 entries are in data.train too: entry i is"
    )
    assert line.endswith("set seed=10001 or more")
    for fine in ("gcd?size=200&seed=10001", "lcm?size=200&seed=2", "gcd?size=200&seed=2&max_value=9"):
        assert list(shared_entries([MixedSource(path=Path(train))], f"reasoning_gym:{fine}")) == []
    assert list(shared_entries("d.jsonl", "reasoning_gym:gcd?size=9&seed=1")) == []


def test_sources_without_weights_are_not_listed() -> None:
    assert list(shares(Path("d.jsonl"), ())) == []
