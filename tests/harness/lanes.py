"""Two lanes of tests, and the order in which they run: a pytest plugin that tests/conftest.py loads.

`--lane fast` is `make test`; `--lane long` holds the tests marked `long` (`make test-long`), and `--shard 2/5` takes
the second of five parts of what was selected, of about equal duration. Without `--lane` both lanes are selected.

The tests of a file run in one process, because they share slow fixtures. Tests marked `xdist_group("name")` run
in one process whatever file they are in. Such a set of tests is called a scope here. The longest scope starts first, so
that no worker is left alone with it at the end; `tests/durations.json` has the seconds of each scope, as `--record`
wrote them. A scope without a record counts as one second. The file only orders the tests.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from _pytest.mark import ParameterSet
from xdist.remote import Producer
from xdist.scheduler import LoadGroupScheduling

RECORD = Path(__file__).parents[1] / "durations.json"
UNKNOWN_S = 1.0
LONGEST_IN_ID = 100
T = TypeVar("T")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("lanes")
    group.addoption("--lane", choices=("fast", "long"), help="fast: make test; long: tests marked long")
    group.addoption("--shard", metavar="K/N", help="part K of N of the selected tests, such as 2/5")
    group.addoption("--record", action="store_true", help="write the seconds of each scope to tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    if (shard := config.getoption("--shard")) is not None:
        numbers_of(shard)
    if config.getoption("--record"):
        if config.getoption("--lane") is None:
            raise pytest.UsageError("--record writes the seconds of one lane: give --lane fast or --lane long too")
        if not hasattr(config, "workerinput"):
            config.pluginmanager.register(Recorder(config.getoption("--lane")))


def numbers_of(shard: str) -> tuple[int, int]:
    """`2/5` -> (2, 5)"""
    words = shard.split("/")
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise pytest.UsageError(f"--shard {shard}: give two numbers K/N with 1 <= K <= N, such as 2/5")
    return int(words[0]), int(words[1])


def scope_of(nodeid: str) -> str:
    """Return the group of a test, which xdist appends to its id after an @; else its file."""
    group = nodeid.rpartition("@")[2] if nodeid.rfind("@") > nodeid.rfind("]") else ""
    return group or nodeid.partition("::")[0]


def scope_of_item(item: pytest.Item) -> str:
    """The same from the marks of a test, before xdist has seen it."""
    groups = sorted({str(mark.args[0]) for mark in item.iter_markers("xdist_group")})
    return "_".join(groups) or item.nodeid.partition("::")[0]


def long_but(cases: Iterable[Any], *fast: int) -> list[Any]:
    """Return cases for `parametrize`: those at the indices `fast`, one for each kind of fault, are in the fast lane and
    the others in the long lane. A case of several arguments is a tuple or `pytest.param`."""
    listed = [
        case if isinstance(case, ParameterSet) else pytest.param(*case if isinstance(case, tuple) else (case,))
        for case in cases
    ]
    assert {*fast} <= {*range(len(listed))}, f"there are {len(listed)} cases, not {max(fast) + 1}"
    return [
        case if index in fast else pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.long])
        for index, case in enumerate(listed)
    ]


def part(scopes: Iterable[str], seconds: Callable[[str], float], k: int, n: int) -> set[str]:
    """Scopes of part k of n: each scope, the longest first, goes to the part that has the fewest seconds so far."""
    loads, parts = [0.0] * n, [set[str]() for _ in range(n)]
    for scope in sorted(set(scopes), key=lambda name: (-seconds(name), name)):
        least = loads.index(min(loads))
        loads[least] += seconds(scope)
        parts[least].add(scope)
    return parts[k - 1]


def longest_first(tests: Iterable[T], scope: Callable[[T], str], seconds: Callable[[str], float]) -> list[T]:
    """The same tests, the longest scope first; within a scope their order stays."""
    return sorted(tests, key=lambda test: (-seconds(scope(test)), scope(test)))


def recorded(lane: str | None) -> dict[str, float]:
    """Seconds of each scope of `lane`, or of both lanes."""
    records: dict[str, dict[str, float]] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    total: dict[str, float] = defaultdict(float)
    for name, scopes in records.items():
        if lane in (None, name):
            for scope, seconds in scopes.items():
                total[scope] += seconds
    return dict(total)


def in_lane(item: pytest.Item, lane: str | None) -> bool:
    is_long = item.get_closest_marker("long") is not None
    return lane is None or (item.get_closest_marker("gpu") is None and is_long == (lane == "long"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Shorten a long text in a test's id: each id is sent about ten times between the workers and the first process."""
    long = isinstance(val, str | bytes) and len(val) > LONGEST_IN_ID
    return f"{val[:LONGEST_IN_ID]!a} of {len(val)}" if long else None


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> Iterator[None]:
    """Select and order, after `-m` and `-k` have selected."""
    scopes = {id(item): scope_of_item(item) for item in items}  # xdist changes the ids next
    yield
    lane, shard = config.getoption("--lane"), config.getoption("--shard")
    if lane is None and shard is None:
        return
    known = recorded(lane)

    def seconds(scope: str) -> float:
        return known.get(scope, UNKNOWN_S)

    chosen = [item for item in items if in_lane(item, lane)]
    if shard is not None:
        mine = part((scopes[id(item)] for item in chosen), seconds, *numbers_of(shard))
        chosen = [item for item in chosen if scopes[id(item)] in mine]
    kept = {id(item) for item in chosen}
    config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
    items[:] = longest_first(chosen, lambda item: scopes[id(item)], seconds)


class ByScope(LoadGroupScheduling):
    """xdist's schedule by group, where a file is the group of tests that name none."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByScope | None:
    return ByScope(config, log) if config.getvalue("dist") == "loadgroup" else None


class Recorder:
    """Adds up the seconds of each scope and writes them when all tests have ended."""

    def __init__(self, lane: str) -> None:
        self._lane = lane
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[scope_of(report.nodeid)] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Scopes that did not run keep what was recorded of them, so that shards can be recorded one by one."""
        records = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
        merged = records.get(self._lane, {}) | {scope: round(s, 1) for scope, s in self._seconds.items()}
        records[self._lane] = dict(sorted(merged.items()))
        RECORD.write_text(json.dumps(records, indent=1, sort_keys=True) + "\n", encoding="utf-8")
