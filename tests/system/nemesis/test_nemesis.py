"""The nemesis itself: which faults it plans, what a fault costs, the table; and short runs, in the long lane."""

import json
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.system.chaos_faults import why_no_disk
from tests.system.nemesis.__main__ import main, results
from tests.system.nemesis.checker import Violation
from tests.system.nemesis.faults import EVERY, KINDS, Kind, RunLost, chosen
from tests.system.nemesis.history import INITIAL, Event, Restored, Trained
from tests.system.nemesis.nemesis import Nemesis, Outcome, cost, table


def learned(*times: tuple[float, int]) -> list[Event]:
    """Versions that were trained at these times."""
    return [Trained(at, "learner#1", version, [], "") for at, version in times]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (learned((1, 0), (2, 1), (13, 2), (14, 3)), 9.0),
        (learned((1, 0), (2, 1), (3.5, 2), (14, 3)), 9.5),
        ([*learned((1, 0), (2, 1)), Restored(8, "learner#2", 1, INITIAL), *learned((9, 1), (10, 2))], 6.0),
        (learned((1, 0), (2, 1), (3.2, 2), (4, 3)), 0.0),
        (learned((1, 0), (2, 1)), 16.0),
        (learned((1, 0), (2, 1), (4, 2), (30, 3)), 0.0),
    ],
    ids=["one gap", "after a batch in flight", "a version again is no news", "none", "never", "only until all is well"],
)
def test_the_cost_is_the_longest_time_without_a_new_version(events: list[Event], expected: float) -> None:
    assert cost(events, began=3.0, ended=20.0, usual_s=1.0) == pytest.approx(expected)


def test_each_kind_comes_as_often_as_the_others(tmp_path: Path) -> None:
    nemesis = Nemesis(tmp_path, EVERY, 2 * len(EVERY) + 3, seed=1)
    first, second = nemesis.plan[: len(EVERY)], nemesis.plan[len(EVERY) : 2 * len(EVERY)]
    assert {kind.name for kind in first} == {kind.name for kind in second} == KINDS.keys()
    assert first != second and len(nemesis.plan) == 2 * len(EVERY) + 3
    assert Nemesis(tmp_path, EVERY, 9, seed=1).plan == first[:9] != Nemesis(tmp_path, EVERY, 9, seed=2).plan


def test_kinds_are_chosen_by_name_and_family() -> None:
    assert len(KINDS) == len(EVERY), "a name twice"
    assert [kind.name for kind in chosen("kill-learner,kill,disk")][:2] == ["kill-learner", "kill-buffer"]
    assert {kind.family for kind in chosen("flip,peer")} == {"flip", "peer"}


def test_an_unknown_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--kinds", "kill,flood"])
    assert refused.value.code == 2
    assert "--kinds: 'flood' is no kind of fault; choose from nothing,kill,drain,pause" in capsys.readouterr().err


def test_the_table_counts_what_was_clean() -> None:
    outcomes = [Outcome("kill", 3.0), Outcome("kill", 5.0), Outcome("disk", None, ["lost"]), Outcome("kill", 1.0)]
    assert table(outcomes) == [("disk", 1, 0, None, None), ("kill", 3, 3, 3.0, 5.0)]
    rows = json.loads(json.dumps(results(outcomes, "python -m tests.system.nemesis")))["rows"]
    assert [row["what"] for row in rows] == ["disk: faults", "kill: faults", "kill: median cost"]
    assert (rows[0]["value"], rows[0]["against_value"]) == (1, 0) and rows[2]["against_value"] == 5.0


class CalmSession:
    """Stands for a `Session` in which all goes well, but for what a test changes."""

    def __init__(self) -> None:
        self.ended: int | None = None
        self.failed: list[tuple[str, str]] = []
        self.wrong: list[Violation] = []
        self.bytes, self.back = 0, True

    def version_s(self) -> float:
        return 0.5

    def failures(self) -> list[tuple[str, str]]:
        return list(self.failed)

    def violations(self) -> list[Violation]:
        return self.wrong

    def log_bytes(self) -> int:
        return self.bytes

    def find(self, name: str) -> list[psutil.Process]:
        return [psutil.Process()]

    def until(self, holds: object, within_s: float) -> bool:
        return self.back

    def events(self) -> list[Event]:
        return []

    def trained(self, since: float) -> list[Trained]:
        return []

    def state(self) -> None:
        return None

    def last_lines(self) -> str:
        return "its last lines"


def lose_a_group(session: CalmSession) -> None:
    session.wrong = [Violation("once", "item 9 was acknowledged, and is lost", 1.0)]


def end_a_learner(session: CalmSession) -> None:
    session.failed.append(("learner", "learner failed: exit code 134"))


def end_a_buffer(session: CalmSession) -> None:
    session.failed.append(("buffer", "buffer failed: exit code 137"))


def end_the_run(session: CalmSession) -> None:
    session.ended, session.back = 1, False


def stay_away(session: CalmSession) -> None:
    session.back = False


def fill_a_log(session: CalmSession) -> None:
    session.bytes = 9 << 20


def break_off(session: CalmSession) -> None:
    raise AssertionError("the file is not named")


def lose_the_run(session: CalmSession) -> None:
    raise RunLost("bit 3 of byte 9")


STRIKES = {
    "nothing": (lambda session: None, []),
    "the kill of a buffer": (end_a_buffer, []),
    "a run that is lost": (lose_the_run, []),
    "a broken promise": (lose_a_group, ["once: item 9 was acknowledged, and is lost"]),
    "the end of another process": (end_a_learner, ["learner failed: exit code 134: kill-buffer may not end it"]),
    "the end of the run": (end_the_run, ["the run ended with exit code 1: its last lines"]),
    "no recovery": (stay_away, ["not all was well 150 s later: 0 versions trained; not there: nobody"]),
    "a log that grows": (fill_a_log, ["the logs grew by 9.0 MiB"]),
    "a fault that finds something itself": (break_off, ["the file is not named"]),
}


@pytest.mark.parametrize(("strike", "expected"), STRIKES.values(), ids=STRIKES)
def test_what_became_of_a_fault_is_judged(
    strike: Callable[[CalmSession], None], expected: list[str], tmp_path: Path
) -> None:
    kind = Kind("kill-buffer", lambda session, draw: strike(session), ("buffer",), bounded=True)  # type: ignore[arg-type]
    session = CalmSession()
    session.failed.append(("learner", "learner failed: exit code 1"))  # before the fault
    outcome = Nemesis(tmp_path, [kind], 1, 0).strike(session, kind)  # type: ignore[arg-type]
    assert len(outcome.findings) == len(expected)
    assert all(found.startswith(text) for found, text in zip(outcome.findings, expected, strict=True))
    assert (outcome.cost_s is None) == (strike in (lose_the_run, end_the_run, stay_away))


SHORT = {
    "processes": "kill-buffer,kill-learner,kill-server,kill-launcher,pause-buffer,pause-learner",
    "network": "partition,delay",
    "machine": "clock-buffer,clock-learner,clock-server,files-server,memory-server",
    "peers": "peer-foreign-buffer,peer-half-buffer,peer-flood-buffer,peer-foreign-weights,peer-flood-weights",
    "disk": "disk",
}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("kinds", SHORT.values(), ids=SHORT)
def test_a_run_survives_each_kind_of_fault(kinds: str, tmp_path: Path) -> None:
    some = chosen(kinds)
    if kinds == "disk" and (why := why_no_disk()):
        pytest.skip(f"a disk of our own: {why}")
    outcomes = Nemesis(tmp_path, some, len(some), random.Random(kinds).randrange(100), print).go()
    assert {outcome.kind: list(outcome.findings) for outcome in outcomes} == {kind.name: [] for kind in some}
