"""A reward function of a notebook becomes a file that another process imports, or is refused by name."""

import linecache
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace.function_source import NoSource, reward_file

CELLS = """
import json, re
import os.path as p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Optional
PATTERN = re.compile(r"(\\d+)", re.IGNORECASE)
WEIGHTS = {"right": 1.0, "words": {"b", "a", "c"}, "pair": (1, [None, True])}
LIMIT = 3
LOOKED_UP = json

@dataclass
class Parsed:
    value: Optional[int] = None
    def ok(self) -> bool:
        return self.value is not None and self.value < LIMIT

@lru_cache(maxsize=LIMIT)
def parse(text: str) -> Parsed:
    found = PATTERN.search(text)
    return Parsed(int(found[1])) if found else again(text)

def again(text: str) -> Parsed:
    return parse("1") if text == "again" else Parsed()

def score(solution_str: str, ground_truth: Any = LIMIT, **further: Any) -> float:
    path = p.join("a", "b")
    assert path == "a/b" and LOOKED_UP.loads("1") == 1
    def inner():
        return [WEIGHTS["right"] for _ in range(1)]
    return inner()[0] if parse(solution_str).ok() else 0.0

async def waits(solution_str): return 0.25
short = lambda solution_str: 0.0
def make(k):
    def closure(solution_str): return k
    def free(solution_str): return LIMIT
    return closure, free
CLOSURE, FREE = make(2)
TOKENIZER = object()
def uses_object(solution_str): return TOKENIZER
def uses_nothing(solution_str): return undefined_name
def uses_lambda(solution_str): return short(solution_str)
@lru_cache
def once(text): return LIMIT
later = lru_cache(again)
def uses_later(solution_str): return later(solution_str)
class Scorer:
    def score(self, solution_str): return 1.0
bound = Scorer().score
"""


@pytest.fixture(scope="module")
def cells() -> dict[str, Any]:
    """The names of a notebook after its cell ran. IPython puts the cells' texts where `inspect` finds them."""
    name = "<ipython-input-1-abc>"
    linecache.cache[name] = (len(CELLS), None, CELLS.splitlines(keepends=True), name)
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(CELLS, name, "exec"), names)
    return names


def answers(place: str, *texts: str) -> str:
    """What the function gives in a new process."""
    code = "import sys; from configs.user_file import load_function as load; f = load('reward', sys.argv[1])\n"
    code += "print([f(text) for text in sys.argv[2:]])"
    done = subprocess.run([sys.executable, "-c", code, place, *texts], capture_output=True, text=True, timeout=60)
    return done.stdout.strip() or done.stderr


def test_a_function_reaches_another_process_with_all_that_it_uses(cells: dict[str, Any], tmp_path: Path) -> None:
    place = reward_file(cells["score"], tmp_path / ".rewards")
    assert place.startswith(f"{tmp_path}/.rewards/score_") and place.endswith(".py:score")
    assert answers(place, "2 apples", "7", "again", "none") == "[1.0, 0.0, 1.0, 0.0]"
    text = Path(place.rpartition(":")[0]).read_text()
    assert "TOKENIZER" not in text and "uses_object" not in text and "__main__" not in text
    assert reward_file(cells["score"], tmp_path / ".rewards") == place
    file = Path(place.rpartition(":")[0])
    file.with_suffix(f".{os.getpid()}").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        reward_file(cells["score"], tmp_path / ".rewards")
    assert list(file.parent.glob("*.*")) == [file]


@pytest.mark.parametrize("name", ["waits", "FREE"])
def test_further_functions_are_accepted(name: str, cells: dict[str, Any], tmp_path: Path) -> None:
    assert reward_file(cells[name], tmp_path).endswith(f":{cells[name].__name__}")


def test_another_text_is_another_file(cells: dict[str, Any], tmp_path: Path) -> None:
    place = reward_file(cells["FREE"], tmp_path)
    changed = cells | {"LIMIT": 4}
    other = type(cells["FREE"])(cells["FREE"].__code__, changed, "free")
    assert reward_file(other, tmp_path) != place


def test_a_function_of_a_module_stays_in_its_file(tmp_path: Path) -> None:
    assert reward_file(linecache.getlines, tmp_path) == f"{linecache.__file__}:getlines"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("of", "words"),
    [
        (lambda cells: cells["short"], "reward: a lambda has no name that workers can import; write it as a function"),
        (lambda cells: cells["uses_lambda"], "reward: a lambda has no name"),
        (lambda cells: cells["CLOSURE"], "reward: closure is a closure over k, which workers do not have; pass it as"),
        (lambda cells: cells["uses_object"], "reward: uses_object uses TOKENIZER, an object of object, which has no"),
        (lambda cells: cells["uses_nothing"], "reward: uses_nothing uses undefined_name, which is not defined"),
        (
            lambda cells: cells["uses_later"],
            "reward: again was wrapped after its definition; write the wrapper as a dec",
        ),
        (lambda cells: cells["once"], "reward: an object of _lru_cache_wrapper is no function"),
        (lambda cells: cells["bound"], "reward: a method is no function with a source"),
        (lambda cells: partial(cells["score"], ground_truth=1), "reward: an object of partial is no function"),
        (lambda cells: cells["Scorer"](), "reward: an object of Scorer is no function"),
        (lambda cells: eval("lambda solution_str: 1"), "reward: a lambda has no name"),
    ],
)
def test_what_has_no_source_is_refused_by_name(
    of: Callable[[dict[str, Any]], Any], words: str, cells: dict[str, Any], tmp_path: Path
) -> None:
    with pytest.raises(NoSource) as error:
        reward_file(of(cells), tmp_path)
    assert str(error.value).startswith(words) and "\n" not in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_function_typed_without_a_file_is_refused(tmp_path: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec("def typed(solution_str): return 1", names)
    with pytest.raises(NoSource, match="the source of the function typed is not known here; write the function into"):
        reward_file(names["typed"], tmp_path)
