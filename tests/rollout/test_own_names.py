"""A user's repository with packages of Headrace's names: each file imports its own, in the process of a worker too."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.own_packages import ROOT

REWARD = """
import importlib
import configs
import configs.prompts as prompts
from actors import names
from buffer.deep.inner import VALUE
from rollout.tasks import Trajectory
from configs import prompts as again
assert configs.__file__.endswith("/mine/configs/__init__.py") and prompts is again
assert importlib.import_module("configs.prompts") is prompts

def score(solution_str):
    from configs.prompts import SYSTEM
    from learner.saved import manifest
    return [SYSTEM, names.NAMES, VALUE, Trajectory.__module__, manifest.__file__]
"""
SCRIPT = """
import sys
from configs.user_file import load_function
found = load_function("reward.function", "mine/reward.py:score")("")
import rollout.rewards.convention, rollout.rewards.math
print(found, *(sys.modules[name].__file__ for name in ("configs", "actors", "configs.schema")))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A folder as users have them: the reward file beside packages of Headrace's names."""
    texts = {
        "reward.py": REWARD,
        "configs/__init__.py": "from configs.prompts import SYSTEM\n",
        "configs/prompts.py": "SYSTEM = 'mine'\n",
        "actors/names.py": "NAMES = 'no __init__'\n",
        "buffer/__init__.py": "",
        "buffer/deep/__init__.py": "from .inner import VALUE\n",
        "buffer/deep/inner.py": "import configs\nVALUE = configs.SYSTEM\n",
        "rollout/__init__.py": "",
        "learner.py": "raise ImportError('a file cannot have submodules, so this one is not imported')\n",
    }
    for name, text in texts.items():
        file = tmp_path / "mine" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def test_a_users_file_imports_the_users_packages_and_headrace_its_own(repository: Path) -> None:
    line = [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {ROOT!r})\n{SCRIPT}"]
    done = subprocess.run(line, cwd=repository, capture_output=True, text=True, timeout=60)
    expected = f"['mine', 'no __init__', 'mine', 'rollout.tasks.trajectory', '{ROOT}/learner/saved/manifest.py']"
    ours = " ".join(f"{ROOT}/{name}.py" for name in ("configs/__init__", "actors/__init__", "configs/schema"))
    assert done.stdout == f"{expected} {ours}\n", done.stderr
