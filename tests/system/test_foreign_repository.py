"""Headrace in a user's own environment and repository, which has packages `configs`, `actors`, `buffer` and `tests`.

The wheel is built and installed into a virtual environment of the test, whose rollout servers are then stand-ins
without vLLM (harness/stand_in). The user's reward and loss import the user's packages; whatever of Headrace imports one
of them ends its process.
"""

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ports import free_port
from tests.harness.toy import ROOT, Run
from tests.system.test_starting_again import STAND_IN, World, until

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]
OURS = ("actors", "buffer", "configs", "headrace", "learner", "rollout")
TEXTS = {
    "configs/__init__.py": "",
    "configs/prompts.py": "RIGHT = 0.5\n",
    "actors/__init__.py": "",
    "actors/actor.py": "from configs.prompts import RIGHT\n",
    "buffer/__init__.py": "raise ImportError('the buffer of the user')\n",
    "rollout/__init__.py": "raise ImportError('the rollout of the user')\n",
    "learner.py": "raise ImportError('the learner of the user')\n",
    "tests/__init__.py": "",
    "tests/test_mine.py": "",
    "rewards/mine.py": "from actors.actor import RIGHT\nfrom helper import TWICE\n"
    "def score(solution_str, ground_truth): return RIGHT * TWICE / 2\n",
    "rewards/loss.py": "from configs.prompts import RIGHT\nfrom learner.algorithms.losses import dppo\n"
    "def loss(inputs, config): return RIGHT * dppo(inputs, config).loss\n",
    "rewards/helper.py": "import configs.prompts\nTWICE = configs.prompts.RIGHT * 4\n",
}


class Foreign:
    """A user's environment with Headrace installed, and a repository to work in."""

    def __init__(self, folder: Path) -> None:
        self.wheel, self.environment, self.repository = built(folder), folder / "venv", folder / "repository"
        venv.create(self.environment, symlinks=True)
        self.python = self.environment / "bin" / "python"
        self.packages = next((self.environment / "lib").glob("python3.*/site-packages"))
        (self.packages / "libraries.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        install = ["--python", str(self.python), "install", "--quiet", "--no-deps", "--no-index", str(self.wheel)]
        subprocess.run([sys.executable, "-m", "pip", *install], check=True, timeout=200)
        shutil.copy(STAND_IN / "rollout" / "__main__.py", self.packages / "rollout" / "__main__.py")
        self.repository.mkdir()
        self.world = World(self.repository)
        for name, text in TEXTS.items():
            (self.repository / name).parent.mkdir(exist_ok=True)
            (self.repository / name).write_text(text)
        self.env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        self.env["PYTHONPATH"] = str(self.repository)  # as users set it, which is what hides Headrace's packages

    def start(self, *words: str | Path, **options: Any) -> subprocess.Popen[str]:
        """The command `headrace` in the repository."""
        line = [str(self.environment / "bin" / "headrace"), *map(str, words)]
        pipe = subprocess.PIPE
        return subprocess.Popen(line, cwd=self.repository, env=self.env, stdout=pipe, stderr=pipe, text=True, **options)

    def headrace(self, *words: str | Path) -> tuple[int, str, str]:
        """Exit code, stdout and stderr of a command."""
        with self.start(*words) as started:
            out, err = started.communicate(timeout=200)
        return started.returncode, out, err

    def run(self, name: str) -> Run:
        return Run(self.repository / "runs" / name)

    def launch(self, *more: str) -> list[str]:
        address = f"--buffer.address=tcp://127.0.0.1:{free_port()}"
        own = ("--reward.function=rewards/mine.py:score", "--algorithm.loss=rewards/loss.py:loss")
        return ["launch", "run.yaml", *own, "--no-report", address, *more]


def built(folder: Path) -> Path:
    """The wheel of this tree."""
    line = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(line, cwd=ROOT, check=True, capture_output=True, timeout=200)
    return next(folder.glob("headrace-*.whl"))


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Foreign:
    return Foreign(tmp_path_factory.mktemp("foreign"))


def test_the_wheel_has_all_files_of_the_packages_and_no_others(foreign: Foreign) -> None:
    listed = subprocess.run(["git", "ls-files", *OURS], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    with zipfile.ZipFile(foreign.wheel) as wheel:
        found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == {*listed.splitlines()}


def test_commands_work_in_a_repository_with_packages_of_the_same_names(foreign: Foreign) -> None:
    code, out, err = foreign.headrace("configs", "run.yaml", "--reward.function=rewards/mine.py:score")
    assert code == 0 and "valid, fingerprint" in out and "rewards/mine.py:score gives 0.5" in out, out + err
    code, out, err = foreign.headrace("configs", "run.yaml", "--batch.grops=4")
    assert (code, out) == (2, "") and err.startswith("batch.grops: no such key") and "batch.groups" in err


def test_a_run_is_launched_stopped_and_goes_on(foreign: Foreign) -> None:
    run = foreign.run("mine")
    named = "--run.name=mine"
    with foreign.start(*foreign.launch(named, "--run.versions=10000")) as launched:
        try:
            until(lambda: len(run.metrics()) >= 2, launched, "second version")
            launched.send_signal(signal.SIGINT)
            out, err = launched.communicate(timeout=200)
        finally:
            launched.kill()
    assert launched.returncode == 130, out + err
    assert "go on with: headrace launch runs/mine/config.yaml" in out.replace("\n", "")
    code, out, err = foreign.headrace("status", "runs/mine")
    assert code == 1 and "Go on with: headrace launch runs/mine/config.yaml" in out and "python -m" not in out, (
        out + err
    )
    assert "algorithm.loss: rewards/loss.py:loss was tried" in out + run.log("learner")
    reached = run.metrics()[-1]["version"]
    code, out, err = foreign.headrace(*foreign.launch(named, f"--run.versions={reached + 2}"))
    assert code == 0, out + err
    assert run.metrics()[-1]["version"] == reached + 2 and "restored version" in run.log("learner")
    code, out, err = foreign.headrace("show", "0", "runs/mine")
    assert code in (0, 2) and "Traceback" not in err
    code, out, err = foreign.headrace("export", "all.parquet", "runs/mine")
    assert code == 0 and "samples" in out, out + err


def test_the_example_notebook_runs_beside_packages_of_the_same_names(foreign: Foreign) -> None:
    port = free_port()
    text = (foreign.repository / "run.yaml").read_text() + f"\nbuffer: {{address: 'tcp://127.0.0.1:{port}'}}\n"
    (foreign.repository / "run.yaml").write_text(text)
    runner = [
        str(foreign.python),
        str(ROOT / "tests" / "harness" / "notebook.py"),
        str(ROOT / "examples/notebook.ipynb"),
    ]
    done = subprocess.run(runner, cwd=foreign.repository, env=foreign.env, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [record["version"] for record in foreign.run("notebook").metrics()] == [1, 2]
    assert "runs/.rewards/score_" in (foreign.repository / "runs" / "notebook" / "config.yaml").read_text()
