"""Short forms of `make chaos`: a few faults, then the whole audit. `make chaos` has 200 kills over all variants."""

import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from buffer.store.sqlite import reading
from tests.system.chaos import Chaos, chaos, main, plan_of
from tests.system.chaos_audit import Finding, audit
from tests.system.chaos_faults import JUMP_S, clocked, jump, why_no_disk
from tests.system.chaos_run import AGENTS, VARIANTS, Run, Variant

pytestmark = pytest.mark.long
KILLS, MORE_KILLS = 8, 16
AGENT_SEED = 0
"""Kills by which a server is met twice, learner and buffer at least once."""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with `KILLS` kills whose audit is clean."""
    folder = tmp_path_factory.mktemp("chaos") / VARIANTS[0].name
    kills, counts = chaos(folder, VARIANTS[0], KILLS, seed=0)
    assert kills.total() == KILLS and set(kills) == {"buffer", "learner", "rollout"}
    assert counts.trained > 100 and counts.reasons["same"] and counts.reasons["hang"]
    return folder


@pytest.mark.parametrize("variant", [one for one in VARIANTS if one is not AGENTS], ids=lambda one: one.name)
def test_more_kills(variant: Variant, tmp_path: Path) -> None:
    kills, counts = chaos(tmp_path / variant.name, variant, MORE_KILLS, seed=0)
    assert kills.total() == MORE_KILLS and counts.trained > 200


def test_kills_in_the_middle_of_agents_episodes_leave_no_zero_and_no_process(tmp_path: Path) -> None:
    """Servers, learner and buffer are killed while agents play episodes of several turns by URL, each with a daemon."""
    run = Run(tmp_path / AGENTS.name)
    kills, counts = chaos(run.folder, AGENTS, kills=4, seed=AGENT_SEED, spare=16)
    assert set(kills) == {"buffer", "learner", "rollout"} and counts.met >= kills["rollout"]
    assert counts.trained > 50 and counts.reasons["dead"]


FAULTS = {
    "stop": {"buffer stopped": 1, "learner stopped": 1, "rollout stopped": 2},
    "disk": {"disk full": 1},
    "clock": {"clock jumped": 2},
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_that_kills_nothing(kind: str, tmp_path: Path) -> None:
    """Each process is stopped, the disk is full, or clocks jump; each lasts longer than a lease, and costs no attempt
    where no server was silent (`Chaos.nothing_lost`)."""
    if kind == "disk" and (why := why_no_disk()):
        pytest.skip(f"a disk of our own: {why}")
    run = Run(tmp_path / VARIANTS[0].name)
    kills, counts = chaos(run.folder, VARIANTS[0], 2, seed=0, plan=plan_of([kind], 1), longest_s=5.0)
    assert kills.total() == 2 and counts.faults >= Counter(FAULTS[kind]) and counts.trained > 100
    with closing(reading(run.ledger)) as db:
        (latest,) = db.execute("SELECT MAX(ABS(changed_at - ?)) FROM items", [time.time()]).fetchone()
    assert (latest > 0.9 * JUMP_S) == (kind == "clock"), "the buffer's wall clock did not jump"


def test_an_attempt_that_a_stop_costs_is_found(tmp_path: Path) -> None:
    """The buffer is not stopped but a server is, in a block that may cost no attempt.

    It is stopped up to four times, since it may finish its last attempt just before it is stopped."""
    folder = tmp_path / VARIANTS[0].name
    run = Run.make(folder, VARIANTS[0], 1000, 0)
    with pytest.raises(Finding, match=r"cost attempts: .*was not heard of"):
        Chaos(run, 250, 0, 0, False, ["stop rollout-0"] * 4, 4.0).go()


def test_a_wall_clock_jumps_in_a_running_process(tmp_path: Path) -> None:
    clock = tmp_path / "clock"
    code = "import logging, sys, time; [print(time.time(), time.time_ns() / 1e9, flush=True) for _ in sys.stdin]"
    environment = clocked(dict(os.environ), clock)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", code], env=environment, text=True, bufsize=1, **pipes) as process:

        def off() -> list[int]:
            process.stdin.write("\n")
            return [round((float(word) - time.time()) / JUMP_S) for word in process.stdout.readline().split()]

        found = [off()]
        for jumps in (1, 1, -3):
            jump(clock, jumps * JUMP_S)
            found.append(off())
        process.stdin.close()
    assert found == [[0, 0], [1, 1], [2, 2], [-1, -1]]


def test_an_unknown_fault_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["--faults", "kill,flood"])
    assert refused.value.code == 2
    assert "--faults: 'flood' is no fault; choose from kill,stop,disk,clock" in capsys.readouterr().err


def test_a_disk_that_cannot_be_mounted_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit) as refused:
        main(["--faults", "disk"])
    assert refused.value.code == 2
    assert "--faults: disk takes a mounted disk: no program unshare" in capsys.readouterr().err


def in_ledger(change: str) -> Callable[[Run], None]:
    def tamper(run: Run) -> None:
        with sqlite3.connect(run.ledger) as db:
            assert db.execute(change).rowcount
        db.close()

    return tamper


def forget_a_batch(run: Run) -> None:
    lines = run.journal.read_text().splitlines()
    last = json.loads(lines[-1])["version"]
    run.journal.write_text("".join(f"{line}\n" for line in lines if json.loads(line)["version"] != last))


def train_something_else(run: Run) -> None:
    lines = [json.loads(line) for line in run.journal.read_text().splitlines()]
    random.Random(0).choice(lines)["digest"] = "0" * 64
    run.journal.write_text("".join(json.dumps(line) + "\n" for line in lines))


TRAINED = "(SELECT MAX(item) FROM items WHERE state = 'trained')"
TAMPERINGS = {
    "a lost item": in_ledger(f"DELETE FROM items WHERE item = {TRAINED}"),
    "a problem twice": in_ledger(
        f"UPDATE items SET row = (SELECT row FROM items WHERE item = 0) WHERE item = {TRAINED}"
    ),
    "a drop without a reason": in_ledger("UPDATE items SET reason = '' WHERE state = 'dropped'"),
    "a batch too late": in_ledger(f"UPDATE items SET version = version - 9 WHERE item = {TRAINED}"),
    "an item in another batch": in_ledger(f"UPDATE items SET batch = 0 WHERE item = {TRAINED}"),
    "a changed sample": in_ledger(
        "UPDATE samples SET (segment, position, bytes) = "
        f"(SELECT segment, position, bytes FROM samples WHERE item = 0 AND idx = 0) WHERE item = {TRAINED}"
    ),
    "a wrong sum": in_ledger("UPDATE totals SET sampled = sampled + 1 WHERE what = 'trained'"),
    "a lost batch": forget_a_batch,
    "other bytes": train_something_else,
}


@pytest.mark.parametrize("tamper", TAMPERINGS.values(), ids=TAMPERINGS)
def test_the_audit_finds(tamper: Callable[[Run], None], ended: Path, tmp_path: Path) -> None:
    run = Run(Path(shutil.copytree(ended, tmp_path / "run")))
    audit(run)
    tamper(run)
    with pytest.raises(Finding):
        audit(run)
