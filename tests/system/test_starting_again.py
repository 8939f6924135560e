"""A run that is launched again: real launcher, buffer and learner, and servers without vLLM (harness/stand_in).

Raised versions, forks, live runs and full disks are in the long lane. `test_accept.py` tests the refusals of forks and
live runs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from configs.checkpoint_files import newest
from tests.harness.ports import free_port
from tests.harness.toy import ROOT, Run, python
from tests.harness.world import tiny_model

pytestmark = pytest.mark.timeout(400)
STAND_IN = ROOT / "tests" / "harness" / "stand_in"
SETTINGS: dict[str, Any] = {
    "run": {"versions": 2},
    "data": {"max_prompt_tokens": 8},
    "reward": {"function": "exact_match"},
    "sampling": {"max_tokens": 30},
    "batch": {"groups": 2, "samples": 4, "max_staleness": 1},
    "learner": {"device": "cpu", "threads": 1, "tokens_per_microbatch": 64, "checkpoint_every": 1},
    "rollout": {"device": "cpu"},
}


class World:
    """A folder with a model, problems, a run file and the runs; `launch` runs `python -m actors launch` in it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.full_disk = folder, folder / "full"
        rows = [{"problem": f"{number}+1", "answer": str(number + 1)} for number in range(40)]
        (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        model = {"path": tiny_model(folder / "model").path, "dtype": "float32"}
        words = Tokenizer(models.WordLevel({sign: number for number, sign in enumerate("0123456789+?")}, "?"))
        words.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder / "model")
        data = {**SETTINGS["data"], "train": str(folder / "train.jsonl"), "chat_template": "none"}
        (folder / "run.yaml").write_text(yaml.safe_dump({**SETTINGS, "model": model, "data": data}))

    def run(self, name: str) -> Run:
        return Run(self.folder / "runs" / name)

    def start(self, name: str, *more: str) -> subprocess.Popen[str]:
        """Launch in the folder of this world, where `rollout` is not the repository's."""
        words = [f"--run.name={name}", f"--run.folder={self.folder / 'runs'}", "--no-report", *more]
        address = f"--buffer.address=tcp://127.0.0.1:{free_port()}"
        line = [sys.executable, "-m", "actors", "launch", str(self.folder / "run.yaml"), address, *words]
        env = os.environ | {"PYTHONPATH": f"{STAND_IN}:{ROOT}", "FULL_DISK": str(self.full_disk)}
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=self.folder, env=env, stdout=pipe, stderr=pipe, text=True)

    def launch(self, name: str, *more: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        with self.start(name, *more) as launched:
            out, err = end(launched)
        return launched.returncode, out, err


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("again"))


@pytest.fixture(scope="module")
def finished(world: World) -> Run:
    """A run of two versions."""
    code, out, err = world.launch("first")
    assert code == 0, out + err
    (world.run("first").path / "report.html").write_text("a report")
    return world.run("first")


def files(run: Run) -> dict[str, tuple[int, bytes]]:
    """The run's own files, with the time of their last change."""
    found = ("config.yaml", "report.html", "metrics.jsonl", "buffer.sqlite")
    return {name: ((run.path / name).stat().st_mtime_ns, (run.path / name).read_bytes()) for name in found}


def end(launched: subprocess.Popen[str], timeout_s: float = 200.0) -> tuple[str, str]:
    """Stdout and stderr once it has ended by itself. A launch that does not is killed; its last lines say why."""
    try:
        return launched.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        launched.kill()
        out, err = launched.communicate()
        raise AssertionError(f"it did not end: {out[-3000:]}{err[-3000:]}") from None
    finally:
        launched.kill()


def until(condition: Callable[[], object], launched: subprocess.Popen[str], what: str) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert launched.poll() is None, launched.communicate()
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.1)


def test_a_finished_run_says_so_and_is_left_alone(world: World, finished: Run) -> None:
    before = files(finished)
    code, out, err = world.launch("first", "--log.display=plain")
    assert (code, err) == (0, "")
    assert "run first is finished: version 2 of 2" in out and "run.versions" in out and "--fork-from" in out
    assert files(finished) == before and not finished.processes("buffer")


@pytest.mark.parametrize(
    ("word", "told"),
    [
        ("batch.samples=5", "batch.samples: 4 -> 5;"),
        ("run.seed=1", "run.seed: 0 -> 1;"),
        ("data.shuffle=false", "true"),
    ],
)
def test_a_fixed_key_is_named_with_both_values(world: World, finished: Run, word: str, told: str) -> None:
    before = files(finished)
    code, out, err = world.launch("first", f"--{word}", "--run.versions=4")
    assert code == 2 and out == ""
    (line,) = err.splitlines()
    assert line.startswith(word.partition("=")[0]) and told in line and "--fork-from" in line
    assert files(finished) == before


def test_a_config_edited_in_the_runs_folder_is_judged_too(world: World, finished: Run) -> None:
    config = finished.path / "config.yaml"
    written = config.read_text()
    config.write_text(written.replace("seed: 0", "seed: 7"))
    code, _, err = world.launch("first", "--run.seed=7")
    config.write_text(written)
    assert code == 2 and err.startswith("run.seed: 0 -> 7;")


def test_a_buffer_started_by_hand_is_judged_too(finished: Run) -> None:
    before = files(finished)
    ended = python(
        "buffer", finished.path / "config.yaml", "--run.seed=3", f"--buffer.address=tcp://127.0.0.1:{free_port()}"
    )
    assert ended.returncode == 2 and "run.seed: 0 -> 3;" in ended.stderr
    assert files(finished) == before


@pytest.mark.long
def test_a_fork_goes_on_from_a_checkpoint_with_other_settings(world: World, finished: Run) -> None:
    words = ("--batch.groups=3", "--run.seed=5", "--learner.lr=1e-3", "--algorithm.loss=cispo")
    code, _, err = world.launch("fork", *words, "--fork-from=first")
    assert code == 2 and err.startswith("run.versions: 2 is not above 2")
    code, _, err = world.launch("fork", *words, "--fork-from=first@v9", "--run.versions=3")
    assert code == 2 and "complete checkpoints: v1, v2" in err
    assert not world.run("fork").path.exists()
    code, out, err = world.launch("fork", *words, f"--fork-from={finished.path}@v1", "--run.versions=3")
    assert code == 0, out + err
    fork = world.run("fork")
    assert [record["version"] for record in fork.metrics()] == [2, 3]
    assert "restored version 1 from" in fork.log("learner") and "forked from" in out
    assert fork.query("select version, trained from batches order by version") == [(1, 1), (2, 1)]
    assert (finished.path / "checkpoints" / "v000001" / "manifest.json").exists()
    code, _, err = world.launch("fork", *words, "--fork-from=first@v1", "--run.versions=3")
    assert code == 2 and "has begun already" in err


@pytest.mark.long
def test_raised_versions_go_on_where_the_run_ended(world: World, finished: Run) -> None:
    order = "select item, row from items where state = 'trained' order by item"
    before = finished.query(order)
    code, out, err = world.launch("first", "--run.versions=4", "--learner.lr=1e-4", "--batch.max_staleness=0")
    assert code == 0, out + err
    assert "changed since the last launch: run.versions: 2 -> 4" in out
    assert "changed since the last launch: learner.lr: 1e-06 -> 0.0001" in finished.log("buffer")
    assert [record["version"] for record in finished.metrics()] == [1, 2, 3, 4]
    assert "restored version 2 from" in finished.log("learner") and "version 0, the initial" in finished.log("learner")
    after = finished.query(order)
    assert after[: len(before)] == before and [item for item, _ in after] == list(range(8))
    changed = finished.query("select version, key, old, new from changes order by key")
    assert (2, "run.versions", "2", "4") in changed and (2, "batch.max_staleness", "1", "0") in changed
    line = [sys.executable, "-m", "actors", "status", str(finished.path)]
    shown = subprocess.run(line, cwd=ROOT, capture_output=True, text=True).stdout
    assert "changed at version 2: run.versions: 2 -> 4" in shown


def test_lost_checkpoints_are_missed_before_anything_starts(world: World, finished: Run) -> None:
    """Runs after the test above: the ledger has let go of the first batches."""
    folder = finished.path / "checkpoints"
    shutil.move(folder, finished.path / "elsewhere")
    before = files(finished)
    code, _, err = world.launch("first", "--run.versions=6")
    shutil.move(finished.path / "elsewhere", folder)
    assert code == 2 and len(err.splitlines()) == 1
    assert "there is none in it" in err and "bring the checkpoints back" in err
    assert files(finished) == before


@pytest.mark.long
def test_a_live_run_keeps_its_settings(world: World) -> None:
    """Refused on another port, a second launch leaves no trace: a killed learner comes back to the same buffer."""
    run = world.run("live")
    with world.start("live", "--run.versions=10000") as launched:
        try:
            until(lambda: len(run.metrics()) >= 2, launched, "second version")
            config = (run.path / "config.yaml").read_bytes()
            code, _, err = world.launch("live", "--run.versions=10000")
            assert code == 2 and len(err.splitlines()) == 1 and "in use by process" in err
            assert (run.path / "config.yaml").read_bytes() == config
            reached = len(run.metrics())
            assert run.kill("learner") == 1
            until(lambda: run.log("learner").count("restored version") == 1, launched, "restored learner")
            until(lambda: max(r["version"] for r in run.metrics()) > reached + 2, launched, "later version")
            launched.send_signal(signal.SIGINT)
            said, _ = end(launched, 100.0)
        finally:
            launched.kill()
    assert launched.returncode == 130
    assert f"go on with: python -m actors launch {run.path / 'config.yaml'}" in said.replace("\n", "")
    code, _, err = world.launch("live", "--run.seed=3")
    assert code == 2 and err.startswith("run.seed: 0 -> 3")


@pytest.mark.long
def test_after_a_full_disk_the_run_ends_and_goes_on_from_its_checkpoint(world: World) -> None:
    run, versions = world.run("full"), 20
    with world.start("full", f"--run.versions={versions}") as launched:
        try:
            until(lambda: newest(run.path / "checkpoints"), launched, "checkpoint")
            world.full_disk.touch()
            out, _ = end(launched)
        finally:
            launched.kill()
            world.full_disk.unlink()
    kept = newest(run.path / "checkpoints")
    assert launched.returncode == 1 and 0 < kept < versions and "refused its input" not in out
    assert f"the policy of version {versions} is not on disk" in out and f"goes on from version {kept}" in out
    assert run.log("learner").count("started: pid") == 1
    code, out, err = world.launch("full", f"--run.versions={versions}")
    assert code == 0, out + err
    assert run.log("learner").count(f"restored version {kept} from") == 1
    assert run.query("select version, trained from batches order by version") == [(v, 1) for v in range(versions)]
