"""The calculator example: its rules, its problems, its warm start, and that run files and episodes fit the model."""

import asyncio
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from configs.load import load
from examples import quickstart
from examples.calculator import make_model, make_problems, problems
from examples.calculator.task import CALL, TURNS, calculate, score, solve
from examples.warm_start import END
from tests.harness.warm_started import reader_of_warm_start

FOLDER = Path(problems.__file__).parent
QUICKSTART = str(FOLDER / "quickstart.yaml")


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("<calc>17*6</calc>", "102"),
        ("<calc>102-9</calc>", "93"),
        ("<calc>2-9</calc>", "-7"),
        ("<calc>-7+9</calc>", None),
        ("<calc>1+2+3</calc>", None),
        ("<calc>1/0</calc>", None),
        ("<calc>9*9</calc> ", None),
        ("<answer>93</answer>", None),
        ("", None),
    ],
)
def test_the_calculator_does_one_operation_a_call(said: str, value: str | None):
    assert calculate(said) == value


def test_the_problems_are_distinct_right_and_parted_by_the_seed(tmp_path: Path):
    parts = problems.split(0, 200)
    texts = [row["problem"] for part in parts.values() for row in part]
    assert (len(parts["train"]), len(parts["eval"])) == (34_240, 200) and len(set(texts)) == len(texts)
    for row in islice(parts["train"], 2000):
        first, sign, second, then, third = make_model.problem_of(row["problem"])
        assert int(row["answer"]) == eval(f"({first}{sign}{second}){then}{third}") >= 0
    make_problems.write(words := make_problems.parse(["--out", str(tmp_path), "--seed", "1", "--eval", "30"]))
    written = {name: pq.read_table(tmp_path / f"{name}.parquet").to_pylist() for name in ("eval", "train")}
    assert written == problems.split(1, 30) and written["eval"] != parts["eval"][:30]
    assert "kept" in make_problems.write(words)


async def play(messages: list[str], row: dict[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    said, shown = iter(messages), []

    async def chat(sent: list[dict[str, Any]]) -> dict[str, Any]:
        shown[:] = sent
        return {"role": "assistant", "content": next(said)}

    return await solve(row, chat), shown


@pytest.mark.parametrize(
    ("messages", "reward", "asked"),
    [
        (["<calc>17*6</calc>", "<calc>102-9</calc>", "<answer>93</answer>"], 1.0, ["102", "93"]),
        (["<answer>93</answer>"], 1.0, []),
        (["<calc>17*6</calc>", "93"], 0.0, ["102"]),
        (["<calc>17*6</calc>", "<answer>102</answer>"], 0.0, ["102"]),
        (["<calc>17*6</calc>"] * TURNS, 0.0, ["102"] * (TURNS - 1)),
    ],
)
def test_an_episode_ends_with_what_is_no_call(messages: list[str], reward: float, asked: list[str]):
    scored, shown = asyncio.run(play(messages, {"problem": "17*6-9=", "answer": "93"}))
    assert scored == reward
    assert [message["content"] for message in shown[::2]] == ["17*6-9=", *asked]


def test_a_chat_extends_token_by_token():
    tokenizer = make_model.make_tokenizer()
    chat = [{"role": "user", "content": "17*6-9="}]
    for said in ("<calc>17*6</calc>", "<answer>93</answer>"):
        before = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        chat.append({"role": "assistant", "content": said})
        assert tokenizer.apply_chat_template(chat, tokenize=False) == before + said + END
        tokens = tokenizer.encode(before + said + END, add_special_tokens=False)
        assert tokens == [*tokenizer.encode(before), *tokenizer.encode(said), tokenizer.eos_token_id]
        assert tokenizer.decode(tokens, skip_special_tokens=False) == before + said + END
        chat.append({"role": "user", "content": "102"})
    assert len(tokenizer.encode("<calc>17*6</calc>", add_special_tokens=False)) == 6


def test_the_warm_start_shows_whole_episodes_a_quarter_of_them_right_and_none_that_is_held_out():
    parts = problems.split(0, 200)
    answers = {row["problem"]: row["answer"] for row in parts["train"]}
    right = 0
    for chat in islice(make_model.episodes(parts["train"], random.Random(0)), 2000):
        assert [message["role"] for message in chat] == ["user", "assistant"] * (len(chat) // 2)
        given, said = ([message["content"] for message in chat[role::2]] for role in (0, 1))
        right += score(said[-1], answers[given[0]])  # a KeyError for one that is held out
        assert given[1:] == [calculate(each) for each in said[:-1]]
        assert not CALL.fullmatch(said[-1]) and len(said) <= TURNS
    assert 0.23 < right / 2000 < 0.33


def test_each_message_of_the_model_is_trained_with_its_end(tmp_path: Path):
    """The tokens are those that the texts have apart."""
    tokenizer, row = make_model.make_tokenizer(), {"problem": "17*6-9=", "answer": "93"}
    reader = reader_of_warm_start(tmp_path, tokenizer, plain=False)
    for chat in islice(make_model.episodes([row], random.Random(0)), 50):
        (text,) = reader.texts({"messages": chat})
        tokens, trained = list[int](), list[bool]()
        for asked, said in zip(chat[::2], chat[1::2], strict=True):
            given = tokenizer.encode(f"<|user|>{asked['content']}{END}<|assistant|>")
            learned = tokenizer.encode(said["content"] + END)
            tokens += [*given, *learned]
            trained += [False] * len(given) + [True] * len(learned)
        assert (text.tokens.tolist(), text.trained.tolist()) == (tokens, trained)
    reader.close()


def test_the_run_files_fit_the_model_and_its_episodes(tmp_path: Path):
    config = load([QUICKSTART])
    tokenizer = make_model.make_tokenizer()

    def num_tokens(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    longest = max(problems.split(0, 200)["train"], key=lambda row: len(row["problem"]) + len(row["answer"]))
    assert num_tokens(f"<|user|>{longest['problem']}{END}<|assistant|>") <= config.data.max_prompt_tokens
    for said in ("<calc>891*9</calc>", "<answer>-1000</answer>"):
        assert num_tokens(said + END) <= config.sampling.max_tokens
    calls = [f"{left}{sign}{right}" for left, right in (("9" * 6, "99"), ("1", "9" * 6)) for sign in "+-*"]
    shown = [value for call in calls if (value := calculate(f"<calc>{call}</calc>"))]
    given = config.data.max_prompt_tokens + (TURNS - 1) * max(
        num_tokens(f"<|user|>{v}{END}<|assistant|>") for v in shown
    )
    assert given + TURNS * config.sampling.max_tokens <= config.rollout.engine["max_model_len"]
    assert config.rollout.engine["max_num_seqs"] == config.rollout.sequences
    assert config.run.name == quickstart.NAMES["calculator"]
    for further, task in (("agent", "examples/calculator/agent.py:solve"), ("environment", "environment")):
        other = load([QUICKSTART, str(FOLDER / f"{further}.yaml")])
        assert other.rollout.task == task and other.reward.function == "task" and other.run.name != config.run.name
