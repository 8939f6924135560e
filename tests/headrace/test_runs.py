"""What `headrace.launch` and `headrace.Run` do without a run: refusals, and what is read of a run's folder."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import headrace
from configs.entrypoint import ABOVE
from headrace import runs
from headrace.runs import Launcher

RECORDS: list[dict[str, Any]] = [
    {"version": 1, "reward/mean": 0.1},
    {"version": 2, "reward/mean": 0.2},
    {"kind": "servers", "time": 5.0},
    {"version": 1, "reward/mean": 0.3},
    {"version": 2, "eval/version": 1, "eval/aime/score": 0.5},
]


def test_metrics_are_a_dict_for_each_version_and_the_later_record_counts(tmp_path: Path) -> None:
    run = headrace.Run(tmp_path)
    assert (run.metrics(), run.evaluations(), run.output) == ([], [], [])
    lines = [*map(json.dumps, RECORDS), '{"version": 3, "rew']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines))
    assert run.metrics() == [RECORDS[3], RECORDS[1]] and run.evaluations() == [RECORDS[4]]
    assert repr(run) == f"Run('{tmp_path}': read only, 2 versions)"
    with pytest.raises(headrace.HeadraceError, match="this program did not launch the run"):
        run.stop()


def test_every_problem_of_a_run_file_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"model": {"path": Path("m")}, "data": {"train": "d.jsonl"}, "batch": {"grops": 3}}
    with pytest.raises(headrace.HeadraceError) as error:
        headrace.launch(config, {"learner.lrr": 1e-3}, reward=refuse)
    assert "batch.grops: no such key" in str(error.value) and "did you mean learner.lr?" in str(error.value)
    assert not list(tmp_path.iterdir())
    with pytest.raises(headrace.NoSource, match="a lambda has no name"):
        headrace.launch({**config, "batch": {}}, reward=lambda solution_str: 1.0)
    with pytest.raises(TypeError, match="cannot stand in a run file; write a number"):
        headrace.launch({"run": {"name": object()}})


def refuse(solution_str: str) -> float:
    return 0.0


@pytest.fixture
def stand_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program in the place of the launcher: accepts the run, then prints until SIGINT."""
    program = tmp_path / "launcher.py"
    program.write_text(
        "import signal, sys, time\n"
        "from pathlib import Path\n"
        "signal.signal(signal.SIGINT, lambda *_: (print('stopped', flush=True), sys.exit(130)))\n"
        "print('checked', flush=True)\n"
        "Path('run/config.yaml').write_text('x')\n"
        "print('started', flush=True)\n"
        "if 'fails' in sys.argv: sys.exit('no memory')\n"
        "if 'done' not in sys.argv: time.sleep(60)\n"
    )
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(runs, "ENTRY", program)
    return Path("run")


def started(folder: Path, *words: str) -> headrace.Run:
    run = headrace.Run(folder)
    run.launcher = Launcher([*words], folder)
    assert run.launcher.accepted.wait(120)
    with run.launcher._changed:
        assert run.launcher._changed.wait_for(lambda: "started" in run.output, 120)
    return run


def test_a_run_is_waited_for_and_stopped(stand_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = started(stand_in)
    with pytest.raises(TimeoutError, match=r"the run run has not ended in 0\.01 s"):
        run.wait(0.01)
    assert run.stop() == 128 + signal.SIGINT and "ended with 130" in repr(run)
    assert run.output == ["checked", "started", "stopped"]
    assert capsys.readouterr().out == "checked\nstarted\nstopped\n"


def test_a_run_that_fails_raises_with_its_last_lines(stand_in: Path) -> None:
    assert started(stand_in, "done").wait(show=False) == 0
    with pytest.raises(headrace.HeadraceError, match="exit code 1:\nchecked\nstarted\nno memory"):
        started(stand_in, "fails").wait(show=False)


def test_the_status_of_a_dead_run_is_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "entry.py"
    program.write_text("import sys; print('dead since 12:00'); sys.exit(2 if 'none' in sys.argv else 1)")
    monkeypatch.setattr(runs, "ENTRY", program)
    assert headrace.Run("run").status() == "dead since 12:00\n"
    with pytest.raises(headrace.HeadraceError):
        headrace.Run("none").status()


def test_a_run_is_stopped_when_its_program_ends(stand_in: Path) -> None:
    code = "import sys; from pathlib import Path; from headrace import runs\n"
    code += "runs.ENTRY = Path('launcher.py'); runs.Launcher([], Path('run')).accepted.wait()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr.startswith("headrace: stopping the run run, because the program")


def test_a_process_that_the_program_forked_does_not_stop_its_run(stand_in: Path) -> None:
    """It inherits what the program does at its end."""
    run = started(stand_in)
    if (child := os.fork()) == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(10)
        try:
            assert run.launcher is not None
            run.launcher._stop_at_exit()
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(TimeoutError):
        run.wait(0.5)
    assert run.stop() == 128 + signal.SIGINT


def test_a_stop_forces_no_run_that_a_scheduler_has_signalled_already(stand_in: Path, tmp_path: Path) -> None:
    """Slurm sends SIGTERM to all processes of a job, and the program may stop its run at the same time."""
    (tmp_path / "launcher.py").write_text(
        "import time\nfrom pathlib import Path\nfrom configs.entrypoint import StopSignals\n"
        "told = []\n"
        "with StopSignals(told.append, lambda number: told.append('forced')):\n"
        "    print('checked', flush=True)\n"
        "    Path('run/config.yaml').write_text('x')\n"
        "    print('started', flush=True)\n"
        "    while not told: time.sleep(0.01)\n"
        "    print('drains', flush=True)\n"
        "    time.sleep(1)\n"
        "print(told, flush=True)\n"
    )
    run = started(stand_in)
    assert run.launcher is not None
    os.kill(run.launcher.guarded.pid, signal.SIGTERM)
    with run.launcher._changed:
        assert run.launcher._changed.wait_for(lambda: "drains" in run.output, 120)
    run.stop()
    assert run.output[-1] == "[15]"
    assert runs.ABOVE == ABOVE


def test_the_module_imports_none_of_the_packages() -> None:
    code = "import sys, headrace; print(sorted({'configs', 'actors', 'buffer', 'learner', 'rollout'} & {*sys.modules}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"
