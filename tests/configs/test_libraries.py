"""Variables with which torch or transformers fail are refused in one line."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs import libraries
from configs.entrypoint import ABOVE
from configs.load import ConfigError
from configs.variables import given_to_libraries

ROOT = Path(__file__).parents[2]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A library that reads TORCH_NUMBER while it is imported."""
    (tmp_path / "picky_library.py").write_text("import os\nint(os.environ['TORCH_NUMBER'])\n")
    monkeypatch.syspath_prepend(tmp_path)
    return "picky_library"


def test_the_variable_in_the_traceback_is_named(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"TORCH_NUMBER": "abc", "TORCH_OTHER": "b", "HOME": "/home/ann"}
    monkeypatch.setenv("TORCH_NUMBER", "abc")
    with pytest.raises(ConfigError) as caught:
        libraries.use_all([module], given)
    line = "torch or transformers cannot be used (ValueError: invalid literal for int() with base 10: 'abc')"
    assert str(caught.value) == f"TORCH_NUMBER: {line}; unset it, or correct it"
    with pytest.raises(ConfigError, match=r"^TORCH_ONE, TQDM_TWO: .*; unset them, or correct them$"):
        libraries.use_all([module], {"TORCH_ONE": "a", "TQDM_TWO": "b"})


def test_a_library_that_is_broken_by_itself_is_no_fault_of_a_variable(
    module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NUMBER", "abc")
    with pytest.raises(ValueError, match=r"^invalid literal"):
        libraries.use_all([module], {"TORCH_HOME": "/hub", "TORCH_SWITCH": "1", "TORCHELASTIC_RUN_ID": "a"})
    monkeypatch.setenv("TORCH_NUMBER", "1")
    libraries.use_all([module], {"TORCH_NUMBER": "1"})


def test_python_without_docstrings_is_refused() -> None:
    line = [sys.executable, "-m", "configs.libraries"]
    env = os.environ | {"PYTHONOPTIMIZE": "2"}
    done = subprocess.run(line, cwd=ROOT, env=env, capture_output=True, text=True, timeout=180)
    assert done.returncode == 2 and done.stderr.startswith("PYTHONOPTIMIZE: 2 (python -OO) leaves out docstrings")


def test_the_learner_imports_torch_by_them() -> None:
    """Any import before them would end in a traceback."""
    text = (ROOT / "learner" / "__main__.py").read_text(encoding="utf-8")
    imports = [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [getattr(node, "module", None) or node.names[0].name for node in imports]
    own = names.index("learner")
    assert imports[own].names[0].name == "first" and own < names.index("torch")
    assert all(name.partition(".")[0] in sys.stdlib_module_names for name in names[:own])


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("TORCH_LOGS", "nosuch"), ("PYTHONOPTIMIZE", "2"), ("HF_HUB_DOWNLOAD_TIMEOUT", "abc")),
        *(("TQDM_MININTERVAL", "x"), ("TORCH_FR_BUFFER_SIZE", "abc"), ("TORCH_GLOO_LAZY_INIT", "abc")),
    ],
)
def test_a_process_started_by_hand_says_so_in_one_line(name: str, value: str) -> None:
    line = [sys.executable, "-m", "learner", "/no/such.yaml"]
    done = subprocess.run(line, cwd=ROOT, env=os.environ | {name: value}, capture_output=True, text=True, timeout=180)
    (said,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert said.startswith(f"python -m learner: {name}: ")
    assert "cannot be used (" in said or "which transformers reads" in said


def test_warnings_that_end_no_import_are_not_tried() -> None:
    assert given_to_libraries({"PYTHONWARNINGS": "ignore::FutureWarning,default"}) == []
    assert given_to_libraries({"PYTHONWARNINGS": "default,error::DeprecationWarning"}) == ["PYTHONWARNINGS"]


def test_a_launched_process_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    libraries.refuse({"TORCH_LOGS": "nosuch", ABOVE: "1"})
    libraries.refuse({"HF_HOME": "/hub"})
