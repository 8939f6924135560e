"""A rank that misses a collective: one line says which, where and for how long, and all ranks exit."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from configs.entrypoint import BAD_INPUT
from learner.watchdog import verdict
from tests.harness.pace import paced
from tests.harness.world import FORKS, outcome


@pytest.mark.xdist_group("ranks")
def test_a_rank_that_sleeps_is_named(tmp_path: Path) -> None:
    started = time.monotonic()
    limit_s = paced(2.0)
    ended = outcome("late", 3, tmp_path, timeout_s=limit_s)
    assert time.monotonic() - started < 90, "the sleeper itself would have ended after 110 s"
    assert [code for code, _ in ended] == [1, 1, 1]
    lines = [line for _, errors in ended for line in errors.splitlines() if "learner: timeout:" in line]
    assert len(lines) == 1, lines
    assert "gloo:all_reduce" in lines[0] and "for rank 1, which has begun" in lines[0]
    assert "rank.py" in lines[0] and "sleep_in_here" in lines[0] and f"learner.timeout_s is {limit_s:g}" in lines[0]
    accounts = list((tmp_path / "logs").glob("flight-*.json"))
    assert accounts and json.loads(accounts[0].read_text())["entries"]


@pytest.mark.xdist_group("ranks")
def test_ranks_end_though_their_accounts_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file where the folder should be")
    started = time.monotonic()
    ended = outcome("late", 2, tmp_path, timeout_s=paced(2.0))
    assert time.monotonic() - started < 90, "the sleeper itself would have ended after 110 s"
    assert [code for code, _ in ended] == [1, 1]
    errors = "".join(errors for _, errors in ended)
    assert "cannot be written: " in errors and "learner: timeout:" in errors and "for rank 1" in errors


@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(900)
def test_ranks_end_though_their_store_hangs(tmp_path: Path) -> None:
    """As where the network to the first node is cut: calls to the store that it holds would last for ever."""
    ours, theirs = FORKS.Pipe(duplex=False)
    holder = FORKS.Process(target=hold_a_store, args=(theirs,))
    holder.start()
    try:
        ended = outcome("cut", 2, tmp_path, port=ours.recv(), timeout_s=paced(2.0), holder=holder.pid)
    finally:
        holder.kill()
        holder.join()
        for end in (ours, theirs):
            end.close()
    assert [code for code, _ in ended] == [1, 1]
    lines = [line for _, errors in ended for line in errors.splitlines() if "learner: timeout:" in line]
    assert len(lines) == 2 and all("their store at the first node does not answer" in line for line in lines), ended


def hold_a_store(pipe: Any) -> None:
    """A process that holds the ranks' store, whose port it sends."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    threading.Event().wait()


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("lives", [True, False])
def test_the_others_end_as_a_rank_that_is_refused_something_alone(tmp_path: Path, lives: bool) -> None:
    """Whether they wait in a collective, or it has failed because that rank's connections are closed."""
    (code, errors), _ = outcome("refusing", 2, tmp_path, lives=lives)
    assert code == BAD_INPUT, errors
    assert "learner: rank 1 has failed: learner.ranks: rank 1 alone finds this; correct it\n" in errors


def note(begun: int, age: float = 0.0) -> dict:
    return {"begun": {"00": begun, "01": 7}, "where": "learner/train/step.py:80 backward", "at": time.time() - age}


def test_verdicts() -> None:
    entry = {"profiling_name": "nccl:all_gather", "group": "00", "process_group": ["none that this process has", ""]}

    def said(*notes: dict | None) -> str:
        return verdict(entry, 12.34, dict(enumerate(notes)), 0, 10.0, Path("f.json"))

    assert "has waited 12.3 s in nccl:all_gather (learner/train/step.py:80 backward) for rank 2" in said(
        note(9), note(9), note(8)
    )
    assert "silent for 30" in said(note(9), note(8, age=30))
    assert "rank 1, which never reported" in said(note(9), None)
    assert "begun as many collectives" in said(note(9), note(9))
    assert "their store at the first node does not answer" in said(note(9))


@pytest.mark.xdist_group("ranks")
@pytest.mark.timeout(900)  # starts of several ranks
def test_a_rank_of_another_group_is_not_blamed(tmp_path: Path) -> None:
    """As between copies of the model, of which the first alone gathers weights: rank 1 is missing, rank 2 is behind."""
    ended = outcome("absent", 3, tmp_path, timeout_s=paced(2.0))
    assert [code for code, _ in ended] == [1] * 3
    lines = [line for _, errors in ended for line in errors.splitlines() if "learner: timeout: rank 0" in line]
    assert len(lines) == 1 and "for rank 1, which has begun" in lines[0], ended
