"""The lanes of tests: which tests run, in which order; the shards of a lane have each of its tests once."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.lanes import long_but, longest_first, numbers_of, part, scope_of

ROOT = Path(__file__).parents[1]
CONFTEST = """
from tests.harness import lanes
from tests.harness.lanes import *
from pathlib import Path
lanes.RECORD = Path(__file__).with_name("durations.json")
"""
FILES = {
    "test_a.py": "import pytest\ndef test_1(): pass\n@pytest.mark.long\ndef test_2(): pass\n",
    "test_b.py": "import pytest\n@pytest.mark.xdist_group('engine')\ndef test_3(): pass\ndef test_4(): pass\n",
    "test_c.py": "import pytest\npytestmark = pytest.mark.xdist_group('engine')\ndef test_5(): pass\n"
    "@pytest.mark.gpu\ndef test_6(): pass\n@pytest.mark.long\ndef test_7(): pass\n",
    "durations.json": json.dumps({"fast": {"test_b.py": 30, "engine": 50, "test_a.py": 2}, "long": {"engine": 9}}),
    "pytest.ini": "[pytest]\nmarkers =\n    long: x\n    gpu: x\n",
}


def run(folder: Path, *flags: str) -> list[str]:
    """Names of the tests that ran, in their order."""
    for name, text in FILES.items():
        (folder / name).write_text(text)
    (folder / "conftest.py").write_text(CONFTEST)
    line = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", f"--rootdir={folder}", *flags, str(folder)]
    done = subprocess.run(line, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode in (0, 5), done.stdout + done.stderr
    return [line.split("::")[1].split()[0].split("@")[0] for line in done.stdout.splitlines() if "PASSED" in line]


def test_a_lane_has_its_tests_the_longest_scope_first(tmp_path: Path) -> None:
    assert run(tmp_path, "--lane=fast") == ["test_3", "test_5", "test_4", "test_1"]


def test_each_test_of_a_lane_is_in_one_shard_and_a_group_is_not_split(tmp_path: Path) -> None:
    shards = [run(tmp_path, "--lane=fast", f"--shard={k}/2") for k in (1, 2)]
    assert shards == [["test_3", "test_5"], ["test_4", "test_1"]]


def test_workers_record_the_seconds_of_each_scope(tmp_path: Path) -> None:
    run(tmp_path, "--lane=long", "--record", "-n1", "--dist=loadgroup", "--no-loadscope-reorder")
    record = json.loads((tmp_path / "durations.json").read_text())
    assert record["fast"] == json.loads(FILES["durations.json"])["fast"]
    assert set(record["long"]) == {"engine", "test_a.py"} and record["long"]["engine"] < 9


def test_parts_are_balanced_and_hold_every_scope_once() -> None:
    seconds = {f"s{i}": float(i * i % 17) for i in range(40)}
    parts = [part(seconds, seconds.__getitem__, k, 5) for k in range(1, 6)]
    assert sorted(scope for one in parts for scope in one) == sorted(seconds)
    loads = [sum(seconds[scope] for scope in one) for one in parts]
    assert max(loads) - min(loads) <= max(seconds.values())


def test_the_longest_scope_is_first_and_its_tests_stay_in_order() -> None:
    tests = ["a::1", "b::1", "a::2", "b::2", "c::1"]
    seconds = {"a": 1.0, "b": 2.0, "c": 2.0}.__getitem__
    assert longest_first(tests, scope_of, seconds) == ["b::1", "b::2", "c::1", "a::1", "a::2"]


@pytest.mark.parametrize(
    ("nodeid", "scope"),
    [
        ("tests/a.py::test_x", "tests/a.py"),
        ("tests/a.py::test_x[1@2]", "tests/a.py"),
        ("tests/a.py::test_x[1@2]@engine", "engine"),
        ("tests/a.py::test_x@engine", "engine"),
    ],
)
def test_a_scope_is_a_group_or_a_file(nodeid: str, scope: str) -> None:
    assert scope_of(nodeid) == scope


@pytest.mark.parametrize("text", ["a" * 10**6, b"\xff" * 10**6, "short"])
def test_a_long_parameter_makes_no_long_id(text: str | bytes, request: pytest.FixtureRequest) -> None:
    """Ids of 18 MB once took seconds of the fast lane."""
    assert len(request.node.name) < 500 and ("short]" in request.node.name) == (text == "short")


@pytest.mark.parametrize("shard", ["", "3", "0/5", "6/5", "a/b", "1/2/3", "-1/5"])
def test_a_wrong_shard_is_refused(shard: str) -> None:
    with pytest.raises(pytest.UsageError, match="such as 2/5"):
        numbers_of(shard)


def test_all_cases_are_long_but_those_that_are_named() -> None:
    listed = long_but([(1, 2), pytest.param(3, 4, id="b"), pytest.param(5, 6, id="c", marks=pytest.mark.vllm)], 0)
    assert [(*case.values, case.id) for case in listed] == [(1, 2, None), (3, 4, "b"), (5, 6, "c")]
    assert [[mark.name for mark in case.marks] for case in listed] == [[], ["long"], ["vllm", "long"]]
    with pytest.raises(AssertionError, match="there are 2 cases, not 3"):
        long_but(["a", "b"], 2)
