"""Users' files are imported as Python would import them, also in processes that they start."""

import subprocess
import sys
from pathlib import Path

import pytest

from configs.user_file import PREFIX, load_function
from rollout.cage.failure_text import describe_error

DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass, field

@dataclass
class Parsed:
    value: float | None
    words: list[str] = field(default_factory=list)

def score(solution_str):
    return float(Parsed(1.0, []) == Parsed(1.0))
"""
PYDANTIC = """
from __future__ import annotations
from typing import Optional
from pydantic import BaseModel

class Verdict(BaseModel):
    inner: Optional[Verdict] = None
    value: Optional[float] = None

def score(solution_str):
    return Verdict.model_validate({"inner": {"value": 1}}).inner.value
"""
HINTS = """
from __future__ import annotations
from enum import Enum
from typing import NamedTuple, TypedDict, get_type_hints

class Kind(Enum):
    RIGHT = 1

class Case(TypedDict):
    kind: Kind

class Pair(NamedTuple):
    case: Case
    weight: float = 1.0

def score(solution_str):
    assert get_type_hints(Case) == {"kind": Kind} and get_type_hints(Pair)["case"] is Case
    return Pair({"kind": Kind.RIGHT}).weight
"""
PICKLED = """
import copy, pickle
from dataclasses import dataclass

@dataclass
class Parsed:
    value: float

def score(solution_str):
    return pickle.loads(pickle.dumps(copy.deepcopy(Parsed(1.0)))).value
"""
SOURCE = """
import inspect

class Rule:
    text = "this text"

def score(solution_str):
    return float("this text" in inspect.getsource(Rule) and "def score" in inspect.getsource(score))
"""
NEIGHBOURS = """
from pathlib import Path
import neighbour

def score(solution_str):
    return neighbour.SCORE * float(Path(__file__).with_name("factor.txt").read_text())
"""
ITSELF = """
import neighbour_of_itself

class Parsed: ...

def score(solution_str):
    return float(neighbour_of_itself.parsed() is Parsed)
"""
FILES = {
    "dataclass": DATACLASS,
    "pydantic": PYDANTIC,
    "hints": HINTS,
    "pickle": PICKLED,
    "source": SOURCE,
    "neighbours": NEIGHBOURS,
}


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of imports at the end of the test."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])


def folder_with(folder: Path, name: str, text: str) -> Path:
    (folder / "neighbour.py").write_text("SCORE = 2.0")
    (folder / "factor.txt").write_text("0.5")
    file = folder / name
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", ["my_score.py", "json.py", "rollout.py", "math_verify.py", "two words.py", "v1.5.py"])
@pytest.mark.parametrize("kind", FILES)
def test_a_file_may_use_all_features_of_python_modules(tmp_path: Path, name: str, kind: str, own_path: None):
    file = folder_with(tmp_path, name, FILES[kind])
    sys.modules.pop("neighbour", None)
    assert load_function("reward.function", f"{file}:score")("text") == 1.0


def test_a_module_has_the_name_of_its_file_if_the_name_is_free(tmp_path: Path, own_path: None):
    file = folder_with(tmp_path, "free_name.py", ITSELF)
    (tmp_path / "neighbour_of_itself.py").write_text("def parsed():\n    import free_name\n    return free_name.Parsed")
    score = load_function("reward.function", f"{file}:score")
    assert score("") == 1.0 and score.__module__ == "free_name"
    assert load_function("reward.function", f"{file}:Parsed") is score.__globals__["Parsed"]  # one module, once


def test_two_files_of_one_name_are_two_modules(tmp_path: Path, own_path: None):
    scores = []
    for number in range(3):
        (folder := tmp_path / str(number)).mkdir()
        (folder / "twice.py").write_text(f"def score(solution_str): return {number}")
        scores.append(load_function("reward.function", f"{folder}/twice.py:score"))
    assert [score("") for score in scores] == [0, 1, 2]
    assert [sys.modules[score.__module__].__file__ for score in scores] == [
        f"{tmp_path}/{n}/twice.py" for n in range(3)
    ]


@pytest.mark.parametrize("package", ["free_package", "tests"])
def test_a_file_of_a_package_imports_relatively(tmp_path: Path, package: str, own_path: None):
    inner = tmp_path / package / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent):
        (folder / "__init__.py").write_text("from .parts import score")
        (folder / "parts.py").write_text("def score(solution_str): return 0.5")
    (inner / "mine.py").write_text("from ..parts import score as outer\nfrom .parts import score")
    (tmp_path / package / "inner" / "plain.py").write_text("import parts\nscore = parts.score")
    sys.modules.pop("parts", None)
    for name in ("__init__.py", "inner/__init__.py", "inner/mine.py", "inner/plain.py"):
        assert load_function("reward.function", f"{tmp_path}/{package}/{name}:score")("") == 0.5


def test_a_file_that_raises_leaves_no_module_behind(tmp_path: Path, own_path: None):
    file = folder_with(tmp_path, "half.py", "1 / 0")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"half.py cannot be imported: ZeroDivisionError"):
            load_function("reward.function", f"{file}:score")
    with pytest.raises(ValueError, match=r"score cannot be imported: ImportError: score does not end in .py"):
        load_function("reward.function", f"{folder_with(tmp_path, 'score', HINTS)}:score")


def test_an_exception_of_a_file_with_the_name_of_our_module_is_the_users(tmp_path: Path, own_path: None):
    file = folder_with(
        tmp_path, "rollout.py", "class Wrong(Exception): ...\ndef score(solution_str): raise Wrong('no')"
    )
    score = load_function("reward.function", f"{file}:score")
    assert score.__module__.startswith(PREFIX)
    with pytest.raises(Exception, match="no") as caught:
        score("")
    assert describe_error("rollout.py:score", caught.value)[1] == "rollout.py:score raised Wrong: no"


POOLED = """
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
import neighbour

@dataclass
class Case:
    text: str
    least: int

def run_test(case: Case) -> bool:
    return len(case.text) >= case.least

def score(solution_str, method):
    context = multiprocessing.get_context(method)
    with ProcessPoolExecutor(1, context) as pool:
        passed = list(pool.map(run_test, [Case(solution_str, n) for n in range(4)]))
        return sum(passed) / len(passed) + pool.submit(neighbour.double, 1).result()
"""
SCRIPT = """
import sys
from configs.user_file import load_function
if __name__ == "__main__":
    for file in sys.argv[1:]:
        for method in ("fork", "spawn"):
            print(load_function("reward.function", f"{file}:score")("ab", method))
"""


def test_a_file_may_start_processes(tmp_path: Path):
    """Rewards for code do this. The processes must not import a module of Python or Headrace with the same name
    instead."""
    files = []
    for number, name in enumerate(["pooled_score.py", "json.py", "rollout.py", "pooled_score.py"]):
        (folder := tmp_path / str(number)).mkdir()
        files.append(str(folder_with(folder, name, POOLED)))
        (folder / "neighbour.py").write_text("def double(x): return 2 * x")
    result = subprocess.run([sys.executable, "-c", SCRIPT, *files], capture_output=True, text=True, timeout=300)
    assert result.stdout.split() == ["2.75"] * 8, result.stderr
