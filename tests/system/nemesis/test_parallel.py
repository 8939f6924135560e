"""Several seeds at once: the plan is cut without loss, runs share no port, and a run that breaks off is a finding."""

import math
import time
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ports
from tests.system.nemesis import nemesis
from tests.system.nemesis.__main__ import main
from tests.system.nemesis.faults import EVERY, KINDS
from tests.system.nemesis.nemesis import PER_RUN, Nemesis
from tests.system.nemesis.parallel import BROKEN, Stretch, stretches, strike


@pytest.mark.parametrize("kinds", [EVERY, [kind for kind in EVERY if not kind.last]], ids=["all", "without flips"])
def test_a_plan_is_cut_where_a_run_has_to_end(kinds: list[Any]) -> None:
    parts = list(stretches(5, kinds, 210))
    assert [name for part in parts for name in part.kinds] == [
        kind.name for kind in Nemesis(Path(), kinds, 210, 5).plan
    ]
    for part in parts:
        assert not any(KINDS[name].last for name in part.kinds[:-1]) and len(part.kinds) <= PER_RUN
    assert [part.number for part in parts] == list(range(len(parts)))


def test_processes_with_other_shares_never_pick_the_same_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "_candidates", ports._candidates)
    picked = list[int]()
    for share in range(3):
        ports.keep_to_share(share, 3)
        picked += [ports.free_port() for _ in range(50)]
    assert len(set(picked)) == 150 and min(picked) >= ports.FIRST and max(picked) < ports.LAST


def test_processes_that_start_together_begin_far_apart() -> None:
    share = range(ports.FIRST, ports.LAST)
    first = sorted(next(ports.in_turn(share, 4000 + process)) for process in range(13))
    assert min(later - one for one, later in pairwise(first)) > 600
    assert len({*islice(ports.in_turn(share, 4000), len(share))}) == len(share)


def test_what_ends_the_run_of_a_worker_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*words: object) -> None:
        raise TimeoutError("no answer")

    monkeypatch.setattr(nemesis, "Session", broken)
    (outcome,) = strike(Stretch(1, 0, ["nothing"]), tmp_path, math.inf)
    assert (outcome.kind, list(outcome.findings)) == (BROKEN, ["TimeoutError: no answer"])


def test_no_fault_begins_after_the_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nemesis, "Session", None)  # calling it would be an error
    assert strike(Stretch(1, 0, ["nothing"]), tmp_path, time.monotonic() - 1.0) == []


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_seeds_side_by_side(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--faults", "2", "--seed", "1,2", "--parallel", "2", "--kinds", "nothing"]) == 0
    said = capfd.readouterr().out
    assert "seed 1: 2 faults of 1 kinds, 2 clean" in said and "seed 2: 2 faults of 1 kinds, 2 clean" in said
