"""`python -m rollout evaluate`: what it prints, what it writes, what it refuses."""

from pathlib import Path
from typing import Any

import pytest

from configs.entrypoint import split_flags
from configs.load import ConfigError, load
from configs.schema import EvalSet
from examples.countdown.make_model import make_tokenizer
from examples.countdown.make_problems import parse, write
from rollout import evaluate
from rollout.episodes.prompts import Prompts
from rollout.episodes.setup import RolloutSetup
from rollout.evaluation.players import ProblemSet
from rollout.rewards.workers import RewardPool
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeEngine

RUN = Path(__file__).parents[2] / "examples/countdown/quickstart.yaml"


def rows(*problems: tuple[str, int]) -> list[dict[str, Any]]:
    return [
        {
            "prompt": [{"role": "user", "content": f"{numbers}={target}\n"}],
            "reward_model": {"ground_truth": {"numbers": [int(n) for n in numbers.split()], "target": target}},
        }
        for numbers, target in problems
    ]


async def test_answers_are_greedy_and_failures_are_counted(capsys: pytest.CaptureFixture[str]):
    config, tokenizer = load([str(RUN)]), make_tokenizer()
    engine = FakeEngine(lambda prompt: tokenizer.encode("<answer>1+2</answer>"))
    setup = RolloutSetup(Prompts(tokenizer, config), single_turn, RewardPool(config.reward))
    problems = rows(("1 2", 3), ("2 2", 4), ("2 1", 3), ("1 2 3 4 5 6 7 8", 9))
    sets, models = [ProblemSet("eval", EvalSet(path="e"), problems)], [Path("before"), Path("after")]
    async with setup.rewards:
        before, after = await evaluate.evaluate_models(config, setup, engine, sets, models)
    assert engine.temperatures == {0.0} and engine.loaded == [Path("before"), Path("after")]
    assert (before["model"], before["problems"], before["failed"]) == ("before", 4, 1)
    assert before["solved"] == pytest.approx(2 / 3) and before["reward"] == pytest.approx(2.1 / 3)
    assert before["reasons"] == ["prompt longer than data.max_prompt_tokens 12"]
    assert [example["reward"] for example in before["examples"]] == [1.0, 0.1]
    assert before["examples"][0]["answer"] == "<answer>1+2</answer>" and after["reward"] == before["reward"]
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "problems", "reward", "solved", "failed"]
    assert [line.split() for line in lines] == [[m, "4", "0.700", "0.667", "1"] for m in ("before", "after")]


def test_the_command_line_is_folders_a_report_and_the_run_file():
    argv = ["run.yaml", "--batch.groups=4", "--models", "a", "b/c", "--out", "r.json", "more.yaml"]
    flags, rest = split_flags(argv, evaluate.PROG, **evaluate.FLAGS)
    assert (flags.models, flags.out) == ([Path("a"), Path("b/c")], Path("r.json"))
    assert rest == ["run.yaml", "--batch.groups=4", "more.yaml"]
    argv = ["--models", "a", "--run.seed=1", "run.yaml", "--models", "b", "--sampling.stop=[the end]"]
    flags, rest = split_flags(argv, evaluate.PROG, **evaluate.FLAGS)
    assert (flags.models, flags.out) == ([Path("a"), Path("b")], None)
    assert rest == ["--run.seed=1", "run.yaml", "--sampling.stop=[the end]"]


def test_missing_models_or_problems_are_refused(tmp_path: Path):
    config = load([str(RUN), f"--data.eval={tmp_path / 'eval.parquet'}"])
    with pytest.raises(ConfigError, match=r"--models: name one or more folders"):
        evaluate.chosen_sets(config, [])
    with pytest.raises(ConfigError, match=r"no config.json there"):
        evaluate.chosen_sets(config, [tmp_path])
    with pytest.raises(ConfigError, match=r"data.eval: null"):
        evaluate.chosen_sets(load([str(RUN), "--data.eval=null"]), [tmp_path])


def test_the_rows_are_the_eval_file_s(tmp_path: Path):
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    (tmp_path / "config.json").write_text("{}")
    (given,) = evaluate.chosen_sets(load([str(RUN), f"--data.eval={tmp_path / 'eval.parquet'}"]), [tmp_path])
    assert (given.name, len(given.rows), given.given.samples) == ("eval", 7, 1)


def test_a_missing_eval_file_exits_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as caught:
        evaluate.main(
            [str(RUN), f"--data.eval={tmp_path / 'none.parquet'}", f"--model.path={tmp_path}", "--models", "a"]
        )
    assert caught.value.code == 2
    assert f"data.eval: {tmp_path / 'none.parquet'}: no such file" in capsys.readouterr().err


async def test_named_sets_get_a_line_each_and_columns_for_what_they_ask(capsys: pytest.CaptureFixture[str]):
    config, tokenizer = load([str(RUN)]), make_tokenizer()
    engine = FakeEngine(lambda prompt: tokenizer.encode("<answer>1+2</answer>"))
    setup = RolloutSetup(Prompts(tokenizer, config), single_turn, RewardPool(config.reward))
    problems = rows(("1 2", 3), ("2 2", 4))
    sets = [
        ProblemSet("few", EvalSet(path="e", samples=3, k=[1, 2], temperature=0.5), problems),
        ProblemSet("all", EvalSet(path="f"), problems[:1]),
    ]
    async with setup.rewards:
        few, every = await evaluate.evaluate_models(config, setup, engine, sets, [Path("m")])
    assert engine.temperatures == {0.5, 0.0}
    assert (few["set"], few["samples"], few["solved"], few["mean@3"]) == ("few", 3, 0.5, 0.5)
    assert few["pass@1"] == few["pass@2"] == few["pass^2"] == 0.5 and every["solved"] == 1.0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["model", "set", "problems", "reward", "solved", "failed", "pass@1", "pass@2", "pass^2"]
    assert lines[0].split() == ["m", "few", "2", "0.550", "0.500", "0", "0.500", "0.500", "0.500"]
    assert lines[1].split() == ["m", "all", "1", "1.000", "1.000", "0"]


def test_sets_are_chosen_by_name(tmp_path: Path):
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    (tmp_path / "config.json").write_text("{}")
    given = [f"--data.eval.{name}.path={tmp_path / 'eval.parquet'}" for name in ("one", "two")]
    config = load([str(RUN), *given])
    assert [each.name for each in evaluate.chosen_sets(config, [tmp_path])] == ["eval", "one", "two"][1:]
    assert [each.name for each in evaluate.chosen_sets(config, [tmp_path], ["two"])] == ["two"]
    with pytest.raises(ConfigError, match=r"--sets three: data.eval has one, two"):
        evaluate.chosen_sets(config, [tmp_path], ["two", "three"])
