"""The Countdown example: its problems, its solver, its tokenizer and its warm start."""

import json
import random
import shutil
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoTokenizer

from configs.checks import check
from configs.load import load
from configs.schema import LoraConfig
from configs.writing import WriteError, draft_of, writing
from examples import fine_tuning, quickstart, warm_start
from examples.calculator import make_problems as calculator
from examples.countdown import make_model, make_problems
from examples.countdown.solver import expressions, solutions
from examples.kept import copy_whole
from examples.shapes import make_problems as shapes
from learner.record.metrics import read
from rollout.rewards.countdown import compute_score
from tests.harness.warm_started import reader_of_warm_start

QUICKSTART = Path(make_problems.__file__).with_name("quickstart.yaml")


def made(folder: Path, *words: str) -> tuple[list[dict], list[dict]]:
    make_problems.write(make_problems.parse(["--out", str(folder), *words]))
    train, held_out = (pq.read_table(folder / f"{split}.parquet").to_pylist() for split in ("train", "eval"))
    return train, held_out


def key(row: dict) -> tuple[tuple[int, ...], int]:
    truth = row["reward_model"]["ground_truth"]
    return tuple(sorted(truth["numbers"])), truth["target"]


def test_the_quickstart_s_problems_are_all_there_are_once_each_and_solvable(tmp_path: Path):
    train, held_out = made(tmp_path)
    keys = [key(row) for row in train + held_out]
    assert (len(train), len(held_out)) == (470, 80) and len(set(keys)) == 550
    for (numbers, target), row in zip(keys, train + held_out, strict=True):
        assert len(numbers) == 3 and set(numbers) <= set(range(1, 10)) and 1 <= target <= 27
        assert solutions(numbers, target, "+-")
        assert (
            row["prompt"][0]["content"]
            == " ".join(map(str, row["reward_model"]["ground_truth"]["numbers"])) + f"={target}\n"
        )
    assert set(train[0]) == {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def test_rows_depend_on_the_seed_alone_and_are_kept(tmp_path: Path):
    words = ["--count", "60", "--eval", "10"]
    first, again, other = (
        made(tmp_path / name, *words, "--seed", seed) for name, seed in (("a", "1"), ("b", "1"), ("c", "2"))
    )
    assert first == again and first != other
    written = (tmp_path / "a/train.parquet").stat().st_mtime_ns
    assert "kept" in make_problems.write(make_problems.parse(["--out", str(tmp_path / "a"), *words, "--seed", "1"]))
    assert (tmp_path / "a/train.parquet").stat().st_mtime_ns == written
    assert len(made(tmp_path / "a", "--count", "70", "--eval", "10", "--seed", "1")[0]) == 60


def test_larger_problems_use_all_operations_and_the_words_of_tinyzero(tmp_path: Path):
    words = [
        "--numbers",
        "4",
        "--largest",
        "50",
        "--target",
        "100",
        "--operations",
        "+-*/",
        "--count",
        "200",
        "--eval",
        "20",
    ]
    train, held_out = made(tmp_path, *words, "--prompt", "words")
    assert (len(train), len(held_out)) == (180, 20)
    assert not {key(row) for row in train} & {key(row) for row in held_out}
    assert train[0]["prompt"][0]["content"].startswith("Using the numbers [")


@pytest.mark.parametrize(
    ("words", "reason"),
    [(["--count", "600"], "only 550 distinct problems"), (["--count", "80"], "--eval 80: there are only 80")],
)
def test_too_many_problems_are_refused(tmp_path: Path, words: list[str], reason: str):
    with pytest.raises(ValueError, match=reason):
        made(tmp_path, *words)


def test_the_solver_finds_exactly_what_the_reward_calls_right():
    for text in expressions([8, 6, 4], "+-"):
        right = compute_score(f"<answer>{text}</answer>", {"numbers": [8, 6, 4], "target": 2})["score"] == 1.0
        assert right == (text in solutions([8, 6, 4], 2, "+-"))
    assert sorted(solutions([8, 6, 4], 2, "+-")) == ["4+6-8", "4-8+6", "6+4-8", "6-8+4"]
    assert solutions([1, 1, 1], 9, "+-*/") == []


def test_the_tokenizer_survives_its_folder_and_keeps_tags_whole(tmp_path: Path):
    tokenizer = make_model.make_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    warm_start.make_network(tokenizer).config.save_pretrained(tmp_path)
    text = "8 6 4=2\n<think>\n(a)</think> <answer>6-8+4</answer>"
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        tokens = loaded.encode(text, add_special_tokens=False)
        assert tokens == tokenizer.encode(text) and loaded.decode(tokens) == text
        assert len(loaded.encode("<answer>6-8+4</answer>", add_special_tokens=False)) == 7
        assert (
            loaded.apply_chat_template([{"role": "user", "content": "1\n"}], tokenize=False, add_generation_prompt=True)
            == "1\n"
        )


def test_the_network_is_small_and_vllm_s_cpu_attention_takes_its_heads():
    network = warm_start.make_network(make_model.make_tokenizer())
    assert sum(parameter.numel() for parameter in network.parameters()) == 211_968
    assert network.config.hidden_size // network.config.num_attention_heads == 32
    assert network.lm_head.weight is not network.model.embed_tokens.weight


def test_the_warm_start_never_sees_a_problem_that_is_held_out(tmp_path: Path):
    train, held_out = made(tmp_path)
    hidden = {key(row) for row in held_out}
    pairs = make_model.examples(train, "+-", random.Random(0))
    tagged = right = 0
    for _ in range(3000):
        prompt, answer = next(pairs)
        numbers, target = prompt.strip().split("=")
        given = sorted(map(int, numbers.split()))
        assert (tuple(given), int(target)) not in hidden
        tagged += answer.startswith("<answer>")
        truth = {"numbers": given, "target": int(target)}
        right += compute_score(f"<answer>{answer.removeprefix('<answer>').removesuffix('</answer>')}</answer>", truth)[
            "solved"
        ]
    assert 0.55 < tagged / 3000 < 0.65  # 40 % lack their tags
    assert 0.6 < right / 3000 < 0.75  # 40 % are random, and some of these are right


def test_exactly_prompt_answer_and_end_are_trained(tmp_path: Path):
    """The tokens are those that the texts have apart, and only the answer and its end are learned."""
    train, _ = made(tmp_path)
    tokenizer = make_model.make_tokenizer()
    reader = reader_of_warm_start(tmp_path, tokenizer, plain=True)
    for prompt, answer in islice(make_model.examples(train, "+-", random.Random(0)), 50):
        (text,) = reader.texts({"prompt": prompt, "answer": answer})
        given, learned = tokenizer.encode(prompt), [*tokenizer.encode(answer), tokenizer.eos_token_id]
        assert text.tokens.tolist() == [*given, *learned]
        assert text.trained.tolist() == [False] * len(given) + [True] * len(learned)
    reader.close()


@pytest.mark.long
def test_a_warm_start_lowers_the_loss_writes_a_model_and_is_kept(tmp_path: Path):
    """By `python -m learner sft`, which shows each demonstration once."""
    made(tmp_path)
    out = tmp_path / "model"
    words = ["--problems", str(tmp_path / "train.parquet"), "--out", str(out), "--steps", "25"]
    assert "211,968 parameters" in make_model.write(make_model.parse(words))
    records = read(out / "warm_start" / "run" / "metrics.jsonl")
    assert [record["version"] for record in records] == list(range(1, 26))
    assert {record["rows"] for record in records} == {warm_start.BATCH} and records[-1]["epoch"] == 1
    assert records[-1]["loss"] < records[0]["loss"] / 2
    first, taught = (load_file(folder / "model.safetensors") for folder in (out / "warm_start" / "random", out))
    assert first.keys() == taught.keys() and not torch.equal(first["lm_head.weight"], taught["lm_head.weight"])
    assert AutoTokenizer.from_pretrained(out).chat_template == make_model.TEMPLATE
    assert "kept" in make_model.write(make_model.parse(words))
    (out / "warm_start.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        make_model.write(Namespace(**vars(make_model.parse(words)) | {"steps": 0}))
    assert ended.value.code == 2 and not (out / "warm_start.json").exists()


def asked_for_model(tmp_path: Path) -> Namespace:
    made(tmp_path)
    return make_model.parse(["--problems", str(tmp_path / "train.parquet"), "--out", str(tmp_path / "model")])


def test_a_model_that_an_earlier_release_taught_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The same arguments gave other weights there, and it has no demonstrations."""
    args, out = asked_for_model(tmp_path), tmp_path / "model"
    monkeypatch.setattr(warm_start, "tune", lambda *given: 0.5)
    rows = pq.read_table(args.problems).to_pylist()
    earlier = {"seed": args.seed, "steps": args.steps, "operations": args.operations, "problems": rows}
    out.mkdir()
    (out / "model.safetensors").touch()
    (out / "warm_start.json").write_text(json.dumps(earlier))
    assert "kept" not in make_model.write(args)
    assert "kept" in make_model.write(args)


def test_a_model_that_was_shown_other_answers_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its script's constants have changed, which no argument names."""
    monkeypatch.setattr(warm_start, "tune", lambda out, folder, rows, sections: float(next(rows)["answer"]))
    sections = warm_start.run_file(tmp_path / "random", 0, 3)
    (tmp_path / "model.safetensors").touch()

    def taught(answers: Iterable[str]) -> str:
        rows = ({"prompt": "which?", "answer": answer} for answer in answers)
        return warm_start.teach(tmp_path, {"seed": 0}, lambda folder: 0, sections, rows)

    assert "loss 1.0" in taught(["1", "2"]), "the first answer is shown too"
    assert "kept" in taught(["1", "2"])
    assert "kept" not in taught(["1", "3"])
    sections["learner"]["lr"] = 1.0
    assert "kept" not in taught(["1", "3"])


def test_a_folder_of_another_program_is_neither_used_nor_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args, own = asked_for_model(tmp_path), tmp_path / "model" / "warm_start" / "notes.txt"
    own.parent.mkdir(parents=True)
    own.write_text("mine")
    with pytest.raises(SystemExit) as ended:
        make_model.write(args)
    assert ended.value.code == 2 and own.read_text() == "mine"
    assert f"{own.parent} has no lesson.yaml, so another program made it" in capsys.readouterr().err


def test_two_processes_do_not_make_one_model_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args, folder = asked_for_model(tmp_path), tmp_path / "model" / "warm_start"
    with fine_tuning.begun(folder), pytest.raises(SystemExit) as ended:
        make_model.write(args)
    assert ended.value.code == 2 and f"{folder} is in use by another process" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    args = asked_for_model(tmp_path)
    args.out.touch()
    with pytest.raises(SystemExit) as ended:
        make_model.write(args)
    assert ended.value.code == 2 and f"{args.out / 'warm_start'}: Not a directory; " in capsys.readouterr().err


def test_what_an_earlier_call_left_is_removed(tmp_path: Path):
    with fine_tuning.begun(tmp_path):
        (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    with fine_tuning.begun(tmp_path):
        assert [path.name for path in tmp_path.iterdir()] == ["lesson.yaml"]


def test_no_steps_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        make_model.parse(["--problems", str(QUICKSTART), "--out", str(tmp_path), "--steps", "0"])
    assert ended.value.code == 2 and "--steps 0: give at least 1" in capsys.readouterr().err


def test_the_quickstart_s_run_file_fits_its_model_and_its_answers():
    config = load([str(QUICKSTART)])
    tokenizer = make_model.make_tokenizer()
    longest = tokenizer.encode("9 9 9=27\n")
    assert len(longest) <= config.data.max_prompt_tokens
    assert len(tokenizer.encode("<answer>9+9+9</answer>")) < config.sampling.max_tokens
    assert config.rollout.engine["max_num_seqs"] == config.rollout.sequences


def test_the_quickstart_of_an_adapter_differs_in_what_is_trained_only():
    full, adapter = (load([str(QUICKSTART), *more]) for more in ([], [str(QUICKSTART.with_name("lora.yaml"))]))
    check(adapter, files=())
    assert adapter.model.lora == LoraConfig(rank=8) and adapter.learner.lr == 10 * full.learner.lr
    same = {"model": full.model, "learner": full.learner}
    assert adapter.model_copy(update=same) == full
    assert adapter.model.model_copy(update={"lora": None}) == full.model


def test_the_run_file_with_a_critic_differs_in_the_algorithm_only():
    plain, valued = (load([str(QUICKSTART), *more]) for more in ([], [str(QUICKSTART.with_name("ppo.yaml"))]))
    check(valued, files=())
    assert (
        valued.algorithm.advantage == "gae" and valued.algorithm.loss == "ppo" and valued.algorithm.critic.updates > 1
    )
    assert valued.model_copy(update={"algorithm": plain.algorithm}) == plain


def test_a_toy_without_an_adapter_says_so(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        quickstart.main(["shapes", "--lora"])
    assert ended.value.code == 2 and "shapes has no lora.yaml; --lora is for countdown" in capsys.readouterr().err


def test_a_teacher_is_shown_right_answers_only(tmp_path: Path):
    train, _ = made(tmp_path)
    pairs = make_model.examples(train, "+-", random.Random(0), right_only=True)
    for _ in range(300):
        prompt, answer = next(pairs)
        numbers, target = prompt.strip().split("=")
        truth = {"numbers": list(map(int, numbers.split())), "target": int(target)}
        assert compute_score(answer, truth)["solved"] == 1


def test_the_quickstart_with_a_teacher_differs_in_the_teacher_only():
    plain, taught = (load([str(QUICKSTART), *more]) for more in ([], [str(QUICKSTART.with_name("teacher.yaml"))]))
    check(taught, files=())
    assert list(taught.teacher.teachers) == [""] and taught.teacher.served == [""]
    assert taught.model_copy(update={"teacher": plain.teacher}) == plain


def test_ctrl_c_ends_the_warm_start_with_its_training_and_without_a_traceback(tmp_path: Path) -> None:
    make_problems.write(make_problems.parse(["--out", str(tmp_path)]))
    words = ["--problems", str(tmp_path / "train.parquet"), "--out", str(tmp_path / "model"), "--steps", "200"]
    command = [sys.executable, "-m", "examples.countdown.make_model", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout
        shown = next(line for line in process.stdout if "Traceback" in line or "certificate" in line)
        process.send_signal(signal.SIGINT)
        shown += process.stdout.read()  # until nobody writes to it any more
        assert "Traceback" not in shown
    assert process.returncode == -signal.SIGINT
    assert not (tmp_path / "model" / "config.json").exists()
    assert not (tmp_path / "model" / "warm_start" / "run" / "metrics.jsonl").exists(), "it went on without its parent"


def test_a_place_that_cannot_be_written_ends_a_script_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    out = tmp_path / "file" / "out"
    line = [sys.executable, "-m", "examples.countdown.make_problems", "--out", str(out), "--count", "90"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    said = f"examples: {out}: Not a directory; make it writable, or name another place\n"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", said)


@pytest.mark.parametrize("script", [make_problems, calculator, shapes])
@pytest.mark.parametrize("name", ["train.parquet", "problems.json"])
def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, script: Any, name: str) -> None:
    draft_of(tmp_path / name).symlink_to("/dev/full")
    count = [] if script is calculator else ["--count", "60"]
    args = script.parse(["--out", str(tmp_path), *count, "--eval", "10"])
    with pytest.raises(WriteError, match=rf"{name}: No space left on device; make room on its disk"):
        script.write(args)
    assert not (tmp_path / name).exists() and not list(tmp_path.glob(".*"))
    assert "held out" in script.write(args)


def test_a_full_disk_leaves_no_part_of_a_model_that_is_copied(tmp_path: Path) -> None:
    (made := tmp_path / "made").mkdir()
    (made / "model.safetensors").write_bytes(b"weights")
    (out := tmp_path / "out").mkdir()
    draft_of(out / "model.safetensors").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="No space left on device; make room on its disk"), writing(out):
        shutil.copytree(made, out, copy_function=copy_whole, dirs_exist_ok=True)
    assert list(out.iterdir()) == []


def test_more_problems_than_there_are_end_the_script_with_one_line(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "examples.countdown.make_problems", "--out", str(tmp_path), "--count", "9999"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2 and done.stderr.startswith("make_problems: --count 9999: only 550 distinct problems")
    assert len(done.stderr.splitlines()) == 1


def test_a_script_whose_reader_has_left_ends_well(tmp_path: Path) -> None:
    line = [sys.executable, "-m", "examples.countdown.make_problems", "--out", str(tmp_path), "--count", "90"]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as script:
        assert script.stdout and script.stderr
        script.stdout.close()
        assert script.stderr.read() == b""
    assert script.returncode == 0 and (tmp_path / "problems.json").exists()


def test_a_full_disk_under_a_warm_start_is_named(tmp_path: Path) -> None:
    """Before the training, at the run file that is never removed."""
    args = asked_for_model(tmp_path)
    (args.out / "warm_start").mkdir(parents=True)
    (args.out / "warm_start" / fine_tuning.RUN_FILE).symlink_to("/dev/full")
    with pytest.raises(WriteError) as error, writing(args.out):
        make_model.write(args)
    assert str(error.value) == f"{args.out}: No space left on device; make room on its disk"
