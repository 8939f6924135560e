"""Short forms of `make chaos`: a few kills, then the whole audit. `make chaos` has 200 kills over all variants."""

import json
import random
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.chaos import chaos
from tests.system.chaos_audit import Finding, audit
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
