"""`launch --dry-run` shows answers with their rewards and leaves no run behind."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from actors.supervise import dry_run
from configs.load import ConfigError, load
from configs.schema import Config
from examples.countdown.make_problems import parse, write
from tests.harness.adapted import make_base

RUN = Path(__file__).parents[3] / "examples/countdown/quickstart.yaml"

EVALUATE = """
import json, sys
from pathlib import Path
file, _, model, _, out = sys.argv[1:]
from configs.load import load
config = load([file])
(given,) = config.data.eval.values()
asked = {"path": str(given.path), "limit": given.limit, "temperature": given.temperature, "model": model}
example = {"problem": {"asked": asked}, "answer": "42", "reward": 1.0, "finish": "stop"}
failed = 8 if "none" in str(given.path) else 1
record = {"problems": 8, "failed": failed, "reward": 0.5, "reasons": ["too long"], "examples": [example]}
Path(out).write_text(json.dumps({"models": [record]}))
sys.exit(3 if "broken" in str(given.path) else 0)
"""


def config(folder: Path, *argv: str) -> Config:
    needed = [
        f"--model.path={folder}",
        "--data.train=rows.jsonl",
        "--reward.function=math",
        f"--run.folder={folder}/runs",
    ]
    return load([*needed, "--sampling.temperature=0.7", *argv])


def stand_in(folder: Path) -> list[str]:
    """A command that writes a report as `python -m rollout evaluate` does."""
    (folder / "evaluate.py").write_text(EVALUATE)
    return [sys.executable, str(folder / "evaluate.py")]


def test_answers_and_rewards_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run.main(config(tmp_path), stand_in(tmp_path)) == 0
    shown = capsys.readouterr().out.splitlines()
    (problem,) = (line for line in shown if line.startswith("problem: "))
    asked = json.loads(problem.removeprefix("problem: "))["asked"]
    assert asked == {"path": "rows.jsonl", "limit": dry_run.ROWS, "temperature": 0.7, "model": str(tmp_path)}
    assert "answer: 42" in shown and "reward: 1, ended by stop" in shown
    assert "7 of 8 answers were scored: mean reward 0.5" in shown and "failed: too long" in shown
    assert not (tmp_path / "runs").exists()


def test_the_exit_code_says_whether_an_answer_was_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert dry_run.main(config(tmp_path, "--data.train=none.jsonl"), stand_in(tmp_path)) == 1
    assert dry_run.main(config(tmp_path, "--data.train=broken.jsonl"), stand_in(tmp_path)) == 3
    assert "evaluating ended with exit code 3" in capsys.readouterr().err


def test_the_first_of_several_sources_is_tried(tmp_path: Path) -> None:
    several = "--data.train=[{path: a.jsonl, columns: {problem: q}}, {path: b.jsonl}]"
    data = dry_run.tried(config(tmp_path, several), tmp_path).data
    assert data.eval[dry_run.SET].path == Path("a.jsonl") and data.columns == {"problem": "q"}


def test_a_model_that_is_nowhere_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.path: no/such/model: no folder, and the hub does not"):
        dry_run.model_folder("no/such/model")


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_a_real_engine_answers_and_the_reward_scores(tmp_path: Path) -> None:
    """The whole command, in a process of its own."""
    write(parse(["--out", str(tmp_path), "--count", "30", "--eval", "7"]))
    make_base(tmp_path / "base")
    keys = {"model.path": tmp_path / "base", "data.train": tmp_path / "train.parquet", "run.folder": tmp_path / "runs"}
    argv = [sys.executable, "-m", "actors", "launch", str(RUN), "--dry-run", "--data.eval=null", "--eval.every=null"]
    argv += [f"--{key}={value}" for key, value in keys.items()]
    argv += ["--rollout.engine.kv_cache_memory_bytes=67108864", "--sampling.stop=[]", "--rollout.sequences=8"]
    argv += ["--rollout.engine.max_num_seqs=8"]
    done = subprocess.run(argv, capture_output=True, text=True, env=os.environ | {"VLLM_CPU_CI_ENV": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert "8 of 8 answers were scored: mean reward " in done.stdout
    assert len(re.findall(r"^reward: \d", done.stdout, re.MULTILINE)) == 2
    assert not (tmp_path / "runs").exists()
