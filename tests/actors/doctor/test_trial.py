"""What users' code does in the process that tries it, and what is said of the rows of a data file."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import psutil
import pytest

from actors.doctor.run_file import ROWS, parts_to_try, rows_to_try
from actors.doctor.trial import PARTS, Judgement, Trial, architecture, judge_failures, judge_lengths, try_out
from configs.architecture import PROVEN
from configs.load import load
from configs.schema import Config
from examples.countdown.make_model import make_tokenizer

ROW = {"problem": "1+1", "answer": "2"}
CODE = """
import asyncio, os, time
print("x" * 10_000_000, flush=True)
def fine(reward_input): return {"score": 0.5, "format": 1}
def dies(reward_input): os._exit(7)
def hangs(reward_input): time.sleep(600)
def nothing(reward_input): ...
async def waits(solution_str):
    await asyncio.sleep(0.1)
    return 0.25
def loops(solution_str): return asyncio.run(waits(solution_str))
def task(problem, generate): ...
async def stream(problem, generate): yield
"""


def config(folder: Path, *overrides: str) -> Config:
    needed = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=countdown", f"--run.folder={folder}"]
    needed += ["--reward.timeout_s=100"]  # 70 s for an import, however slow the machine is
    return load([*needed, *(f"--{override}" for override in overrides)])


class TrialHere(Trial):
    """A trial that must not end its process, which is that of the tests."""

    def end(self) -> NoReturn:
        raise AssertionError(self.found)


def try_here(part: str, run: Config, rows: list[tuple[int, dict[str, Any]]]) -> Judgement:
    """What `try_out` returns for a part that runs none of the user's code. A process would first import for seconds."""
    run.run.path.mkdir(exist_ok=True)
    trial = TrialHere(run.run.path)
    PARTS[part][1](trial, run, rows, 0)
    return trial.found


@pytest.mark.parametrize(
    ("function", "fact", "warning"),
    [
        ("fine", "gives 0.5, 0.5 for empty answers to 2 rows", ""),
        ("dies", "", "ends its process"),
        pytest.param("hangs", "", "gave none within 7 s", marks=pytest.mark.long),  # like a slow import
        ("nothing", "", "fails on 2 of 2 rows, row 0: RewardError"),
        ("waits", "gives 0.25, 0.25 for empty answers to 2 rows", ""),
        ("loops", "gives 0.25, 0.25 for empty answers to 2 rows", ""),
    ],
)
def test_a_reward_is_called_with_made_up_answers(function: str, fact: str, warning: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    quick = ["reward.timeout_s=10"] if function == "hangs" else []
    run = config(tmp_path, f"reward.function={tmp_path}/own.py:{function}", *quick)
    judgement = try_out(["reward"], run, [(0, ROW), (1, ROW)])
    assert judgement.refused == []
    assert [fact in line for line in judgement.facts] == [True] * bool(fact)
    assert [warning in line for line in judgement.warnings] == [True] * bool(warning)


@pytest.mark.parametrize("function", ["fine", "dies"])
def test_nothing_is_left_of_what_a_file_starts(function: str, tmp_path: Path) -> None:
    """Sandboxes and servers that a file starts at its import, as daemons too."""
    daemon = "import subprocess; subprocess.Popen(['sleep', '600'], start_new_session=True)"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {daemon!r}], cwd={str(tmp_path)!r})"
    (tmp_path / "own.py").write_text(starts + CODE)
    judgement = try_out(["reward"], config(tmp_path, f"reward.function={tmp_path}/own.py:{function}"), [(0, ROW)])
    assert judgement.refused == [] and len(judgement.facts + judgement.warnings) == 1
    assert [each.pid for each in psutil.process_iter() if cwd_of(each) == str(tmp_path)] == []


def cwd_of(process: psutil.Process) -> str:
    """The folder of a process, empty for one that has ended or is another user's."""
    with suppress(psutil.Error):
        return str(process.cwd())
    return ""


def test_a_loss_of_the_users_is_tried_by_the_learners_code(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def loss(inputs, config): return -inputs.advantages * inputs.policy_logprobs\n"
        "def mean(inputs, config): return loss(inputs, config).mean()\n"
        "def advantage(rewards, groups, lengths): return rewards - rewards.mean()\n"
    )
    chosen = [f"algorithm.loss={tmp_path}/own.py:loss", f"algorithm.advantage={tmp_path}/own.py:advantage"]
    run = config(tmp_path, *chosen)
    assert "algorithm" in parts_to_try(run, []) and "algorithm" not in parts_to_try(config(tmp_path), [])
    judgement = try_out(["algorithm"], run, [])
    assert judgement.refused == judgement.warnings == []
    assert [line.partition(":")[0] for line in judgement.facts] == ["algorithm.advantage", "algorithm.loss"]
    judgement = try_out(["algorithm"], config(tmp_path, f"algorithm.loss={tmp_path}/own.py:mean"), [])
    (line,) = judgement.refused
    assert line.startswith("algorithm.loss: ") and "return the loss of each token" in line


def test_a_template_that_no_row_fits_is_refused_with_its_file_and_what_it_names(tmp_path: Path) -> None:
    file = tmp_path / "judge.jinja"
    given = {"url": "http://127.0.0.1:1/v1", "model": "m", "template": str(file), "pattern": "x", "retries": 0}
    run = config(tmp_path, "reward.function=judge", f"reward.kwargs={json.dumps(given)}")
    file.write_text("Is {{ answer[0] }} right for {{ question }}? {{ ground_truth }}")
    judgement = try_here("reward", run, [(0, ROW), (1, ROW)])
    (line,) = judgement.refused
    assert line.startswith("reward.kwargs.template: judge cannot be asked about 2 of 2 rows, row 0: ")
    assert f"template {file} cannot be filled: 'question' is undefined; there are problem, answer, ground_truth" in line
    judgement = try_here("reward", run, [(0, ROW), (1, ROW | {"question": "1+1"})])
    assert judgement.refused == [] and "cannot be asked about 1 of 2 rows, row 0" in judgement.warnings[0]
    file.write_text("{% if answer %}")
    (line,) = try_out(["reward"], run, [(0, ROW)]).refused
    assert line.startswith(f"reward.kwargs: template {file}, line 1: ")


def test_the_template_of_the_runs_own_reward_model_is_tried_before_it_is_there(tmp_path: Path) -> None:
    given = ["reward.function=reward_model", "reward.kwargs={template: '{{ answer }}{{ solution }}'}"]
    servers = ["reward.servers=1", "reward.model=rm"]
    (line,) = try_here("reward", config(tmp_path, *given, *servers), [(0, ROW)]).refused
    assert "its template cannot be filled: 'solution' is undefined" in line


def test_each_of_several_functions_is_tried_but_one_that_asks_the_runs_own_servers(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    judge = "{url: 'http://127.0.0.1:1/v1', model: m, template: '{{answer}}', pattern: x}"
    own = "{function: reward_model, kwargs: {template: '{{answer}}'}}"
    parts = f"[{{function: '{tmp_path}/own.py:fine'}}, {own}, {{function: judge, kwargs: {judge}}}, {{function: math}}]"
    given = ("reward.servers=1", "reward.model=rm")
    judgement = try_out(["reward"], config(tmp_path, f"reward.function={parts}", *given), [(0, {"answer": "5"})])
    assert judgement.refused == []
    assert [line.partition(" for ")[0] for line in judgement.facts] == [
        f"reward: {tmp_path}/own.py:fine gives 0.5",
        "reward: math gives 0",
    ]
    (warning,) = judgement.warnings
    assert "judge, asked for" in warning and "Cannot connect to host 127.0.0.1:1" in warning


def test_files_with_the_same_name_and_neighbours_are_tried_in_separate_processes(tmp_path: Path) -> None:
    for name, given in (("a", 0.25), ("b", 0.75)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "neighbour.py").write_text(f"GIVEN = {given}")
        (tmp_path / name / "own.py").write_text("import neighbour\ndef score(reward_input): return neighbour.GIVEN")
    parts = ", ".join(f"{{function: '{tmp_path}/{name}/own.py:score', name: {name}}}" for name in "ab")
    judgement = try_out(["reward"], config(tmp_path, f"reward.function=[{parts}]"), [(0, ROW)])
    assert judgement.refused == judgement.warnings == []
    assert [line.split(" gives ")[1].split()[0] for line in judgement.facts] == ["0.25", "0.75"]


def test_a_built_in_reward_without_what_it_needs_is_refused(tmp_path: Path) -> None:
    judgement = try_out(["reward"], config(tmp_path, "reward.function=judge"), [(0, ROW)])
    assert judgement.refused == ["reward.function judge: it needs url; add reward.kwargs.url"]


@pytest.mark.parametrize("function", ["math_verify", "exact_match", "countdown", "reasoning_gym"])
def test_ground_truths_that_a_built_in_reward_cannot_use_are_refused_before_the_start(
    function: str, tmp_path: Path
) -> None:
    run, bad = config(tmp_path, f"reward.function={function}"), {"problem": "1+1", "answer": {"value": 2}}
    good = {"answer": {"target": 1, "numbers": [1]}} if function == "countdown" else ROW
    (line,) = try_here("reward", run, [(n, ROW if function == "countdown" else bad) for n in range(3)]).refused
    assert line.startswith(f"data.train: d.jsonl: no row has a ground truth that {function} can use, row 0: ")
    if function == "reasoning_gym":
        assert "the row does not come from reasoning-gym: its extra_info.reasoning_gym names no entry" in line
        return
    assert "; correct it, or name another column in data.columns" in line
    judgement = try_here("reward", run, [*((n, good) for n in range(5)), (7, ROW | {"answer": None})])
    (warning,) = judgement.warnings
    share = f"1 of 6 rows looked at have no ground truth that {function} can use and are dropped, such as row 7: ground"
    assert judgement.refused == [] and warning.startswith(f"data.train: d.jsonl: {share} truth is ")


@pytest.mark.long
def test_a_file_whose_import_takes_long_is_no_refusal(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(600)\ndef score(reward_input): return 1.0\n")
    run = config(tmp_path, f"reward.function={tmp_path}/slow.py:score", "reward.timeout_s=10")
    judgement = try_out(["reward"], run, [(0, ROW)])
    assert judgement.refused == [] and "slow.py has not ended after 7 s, it is not judged" in judgement.warnings[0]


def test_a_task_is_imported_and_its_signature_looked_at(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(CODE)
    judgement = try_out(["task"], config(tmp_path, f"rollout.task={tmp_path}/own.py:task"), [])
    assert judgement.refused == [] and "is no `async def`" in judgement.warnings[0]
    judgement = try_out(["task"], config(tmp_path, f"rollout.task={tmp_path}/own.py:stream"), [])
    assert "yields; let it return one Trajectory" in judgement.refused[0]


def test_some_bad_rows_are_a_warning_and_all_a_refusal(tmp_path: Path) -> None:
    run, found = config(tmp_path, "data.max_prompt_tokens=10"), Judgement()
    judge_lengths(found, run, {0: 10, 1: 11, 2: 40, 3: 3})
    judge_failures(found, run, {2: "no text"}, others=3)
    assert found.refused == []
    longer, failed = found.warnings
    assert "2 of 4 rows looked at (50.0%) have longer prompts and are dropped, the longest has 40 tokens" in longer
    assert "1 of 4 rows looked at make no prompt and are dropped, such as row 2: no text" in failed
    judge_lengths(found, run, {0: 11})
    judge_failures(found, run, {2: "no text"}, others=0)
    assert [line.partition(":")[0] for line in found.refused] == ["data.max_prompt_tokens", "data.train"]


@pytest.mark.parametrize(("number", "tried"), [(1, 1), (2, 2), (999, 999), (10_000, ROWS)])
def test_rows_of_the_whole_file_are_tried_its_ends_first(number: int, tried: int) -> None:
    rows = rows_to_try([{"n": n} for n in range(number)])
    assert tried <= len(rows) <= tried + 2
    assert [n for n, _ in rows[:3]] == list(dict.fromkeys([0, (number - 1) // 2, number - 1]))
    assert all(row == {"n": n} for n, row in rows)
    assert len({n for n, _ in rows}) == len(rows)


@pytest.mark.parametrize(
    ("kind", "keys", "refused"),
    [
        ("glm4", {"logit_scale": 0.25}, "it would be trained wrongly: its head does more than multiply"),
        ("olmo2", {}, ""),
        ("qwen2", {}, ""),
    ],
)
def test_a_model_of_an_untested_type_is_tried_as_a_small_copy(
    kind: str, keys: dict[str, object], refused: str, tmp_path: Path
) -> None:
    """Reads only the config: there are no weights."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **keys}))
    trial = Trial(tmp_path)
    architecture(trial, config(tmp_path, f"model.path={tmp_path}"), [], 0)
    if refused:
        (line,) = trial.found.refused
        assert line.startswith(f"model.path: {tmp_path} ({kind}): {refused}") and trial.found.facts == []
    else:
        tried = [f"model.path: {tmp_path}: a small copy was tried; its packed rows are computed exactly"]
        assert trial.found.refused == [] and trial.found.facts == tried * (kind not in PROVEN)


def test_only_untested_model_types_are_tried(tmp_path: Path) -> None:
    """It imports torch, which takes longer than all other checks."""
    run = config(tmp_path, f"model.path={tmp_path}")
    for kind in ("cohere", *PROVEN):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        assert ("architecture" in parts_to_try(run, [])) is (kind == "cohere")
    assert "architecture" in parts_to_try(config(tmp_path, "model.path=org/name"), [])
    assert parts_to_try(run, ["model.path: nope: no such folder"]) == ["reward"]


def test_a_teacher_with_another_vocabulary_is_refused_with_the_token_that_differs(tmp_path: Path) -> None:
    for name in ("policy", "same", "other"):
        make_tokenizer().save_pretrained(tmp_path / name)
    file = tmp_path / "other" / "tokenizer.json"
    file.write_text(file.read_text().replace('"<|unused111|>"', '"<|changed|>"'))
    by_source = f"teacher.by_source=[{{data_source: a, url: 'http://h:1', tokenizer: {tmp_path}/other}}]"
    model = f"model.path={tmp_path}/policy"
    rows = [(0, ROW), (1, ROW | {"data_source": "b"})]
    run = config(tmp_path, model, f"teacher.model={tmp_path}/same", "teacher.servers=1", by_source)
    judgement = try_here("teacher", run, rows)
    (line,) = judgement.refused
    assert line.startswith(f"teacher.by_source.0.tokenizer: {tmp_path}/other: its vocabulary is not that of model.path")
    assert "token 111 is '<|unused111|>' there and '<|changed|>' here (112 and 112 tokens); name a teacher" in line
    assert judgement.facts == judgement.warnings == []
    gone = config(tmp_path, model, f"teacher.model={tmp_path}/none", "teacher.servers=1")
    (line,) = try_here("teacher", gone, rows).refused
    assert line.startswith(f"teacher.model: {tmp_path}/none: no tokenizer can be loaded: ")


def test_a_teacher_whose_key_is_not_there_is_refused(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    given = ["teacher.url=http://h:1", f"teacher.tokenizer={tmp_path}", "teacher.api_key_env=NO_SUCH_KEY"]
    (line,) = try_here("teacher", config(tmp_path, f"model.path={tmp_path}", *given), [(0, ROW)]).refused
    key = "teacher.api_key_env: there is no environment variable NO_SUCH_KEY"
    assert line == f"{key}; export it where the run is started"


def test_a_teacher_whose_key_is_empty_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its servers would refuse every request, which was sent without a key."""
    monkeypatch.setenv("EMPTY_KEY", "")
    make_tokenizer().save_pretrained(tmp_path)
    given = ["teacher.url=http://h:1", f"teacher.tokenizer={tmp_path}", "teacher.api_key_env=EMPTY_KEY"]
    (line,) = try_here("teacher", config(tmp_path, f"model.path={tmp_path}", *given), [(0, ROW)]).refused
    assert line.startswith("teacher.api_key_env: the environment variable EMPTY_KEY is empty; export it where")


def test_rows_without_a_teacher_are_counted(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    given = [f"model.path={tmp_path}", f"teacher.by_source=[{{data_source: a, model: {tmp_path}, servers: 1}}]"]
    rows = [(0, ROW | {"data_source": "a"}), (1, ROW | {"data_source": "b"}), (2, ROW)]
    found = "2 of 3 rows looked at have a data_source without a teacher, such as row 1"
    assert try_here("teacher", config(tmp_path, *given), rows).facts == [
        f"note: {found}: they are trained by their reward alone"
    ]
    alone = config(tmp_path, *given, "reward.function=none")
    remedy = "set teacher.model for them, or leave them out of the data"
    assert try_here("teacher", alone, rows).warnings == [
        f"teacher.by_source: {found}: nothing is learned from them; {remedy}"
    ]
    (line,) = try_here("teacher", alone, rows[1:]).refused
    assert line.startswith("teacher.by_source: 2 of 2 rows looked at have a data_source without a teacher")


def test_a_teacher_is_tried_where_there_is_one_and_a_reward_where_there_is_one(tmp_path: Path) -> None:
    taught = config(tmp_path, "teacher.model=t", "teacher.servers=1", "reward.function=none")
    assert {"teacher", "reward"} & set(parts_to_try(taught, [])) == {"teacher"}
    assert "teacher" not in parts_to_try(taught, ["teacher.model: t: no such folder"])
    assert {"teacher", "reward"} & set(parts_to_try(config(tmp_path), [])) == {"reward"}
