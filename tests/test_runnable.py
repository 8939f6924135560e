"""Every module that can be run explains itself: `--help` is short and ends with 0. A flag that it does not have ends it
with 2, before anything else is done.

`modules` finds them by their `if __name__ == "__main__":`.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.toy import ROOT
from tests.sizes import CORE

FOLDERS = (*CORE, "benchmarks", "examples", "tests")
PARSES = ("ArgumentParser(", "run_and_exit(", "inner_words(", "split_flags(", "--help")
"""A module with one of these looks at its whole command line."""
READS_STDIN = "examples.calculator.agent"
"""An agent that the page on agents shows: a rollout server starts it without words, with a row on stdin."""
STAND_INS = ("tests.harness.stand_in.rollout", "tests.benchmarks.soak_stand_ins")
"""They take the words of the commands that they stand for."""
LIGHT = (
    "tests.sizes",
    "tests.lanes",
    "tests.sentences",
    "actors.supervise.guard",
    "actors",
    "headrace",
    "buffer.data.entries",
)
"""Modules that import little."""
MOST_LINES = 70
"""Most lines of a help: a terminal of usual height and a half."""


def modules() -> Iterator[tuple[str, str]]:
    """Name and text of each."""
    for file in sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "__main__" not in text:
            continue  # parsing every module would cost each worker of the tests more than a second
        blocks = [node for node in ast.parse(text).body if isinstance(node, ast.If)]
        if any(ast.unparse(block.test) == "__name__ == '__main__'" for block in blocks):
            parts = file.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__main__" else parts), text


MODULES = dict(modules())


def run(module: str, *words: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", module, *words]
    return subprocess.run(line, cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("module", sorted(set(MODULES) - {READS_STDIN, *STAND_INS}))
def test_a_module_that_can_be_run_looks_at_its_words(module: str) -> None:
    assert any(word in MODULES[module] for word in PARSES), f"{module}: call `inner_words` below `if __name__`"


def check_help(module: str) -> None:
    done = run(module, "--help")
    assert (done.returncode, "Traceback" in done.stderr) == (0, False), done.stderr[-2000:]
    assert 1 <= len(done.stdout.splitlines()) <= MOST_LINES


@pytest.mark.parametrize("module", LIGHT)
def test_help_is_short_and_an_unknown_flag_is_refused_in_a_line(module: str) -> None:
    check_help(module)
    done = run(module, "--no-such-flag=3")
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2 and done.stdout == "" and "--no-such-flag" in line


@pytest.mark.long
@pytest.mark.parametrize("module", sorted(set(MODULES) - {READS_STDIN, *STAND_INS, *LIGHT}))
def test_help_of_all_others(module: str) -> None:
    check_help(module)


def test_too_few_and_too_many_words_are_refused(tmp_path: Path) -> None:
    for words, count in (((), "0 words"), (("a", "b"), "2 words")):
        done = run("tests.harness.teaching", *words)
        assert (
            done.returncode == 2
            and done.stderr
            == f"python -m tests.harness.teaching: {count}; usage: python -m tests.harness.teaching PORT\n"
        )
