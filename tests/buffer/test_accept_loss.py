"""A buffer whose ledger lacks commits: refused, then accepted; and one whose ledger is deleted while it serves."""

import os
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import pytest

from buffer.store import witness
from buffer.store.faults import ACCEPT, LostCommits, StoreError
from buffer.store.past import accept_loss
from buffer.store.sqlite import Store
from buffer.store.witness import Commits, Witness, file_of
from configs.load import load
from configs.schema import Config
from tests.buffer.store.test_sqlite import accept, ledger_of
from tests.harness.buffer_process import Process, committed, make_requests


def started(it: Process, *flags: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(it.arguments(*flags), stderr=subprocess.PIPE, text=True)


def test_a_loss_is_refused_until_it_is_accepted_and_a_deleted_ledger_ends_the_buffer(tmp_path: Path) -> None:
    it = Process(tmp_path)
    path = it.run / "buffer.sqlite"
    requests = make_requests(path)
    for number in range(6):
        requests.handlers.ledger.wanted.scale(number + 1, by_person=True)
        committed(requests)
    requests.handlers.store.close()
    name, number, *_ = file_of(path).read_text().split()
    Witness(path, Commits(name, int(number) + 3))  # as a buffer that was killed, and whose log was cut, leaves it
    refused = started(it)
    errors = refused.communicate(timeout=120)[1]
    assert refused.returncode == 2, errors
    (line,) = [one for one in errors.splitlines() if "python -m buffer:" in one]
    assert "lacks its last 3 commits of" in line and ACCEPT in line
    with started(it, ACCEPT) as running:
        assert running.stderr
        for line in running.stderr:
            if "run test: " in line:
                break
        os.unlink(path)
        rest = running.stderr.read()
        assert running.wait(60) == 1
    last = rest.splitlines()[-1]
    assert "buffer.sqlite was deleted or replaced while the buffer ran" in last and "room" not in last, rest


def config_of(folder: Path) -> Config:
    words = {"run.folder": folder, "run.name": "r", "model.path": "m", "data.train": "d", "reward.function": "math"}
    return load([f"--{key}={value}" for key, value in words.items()])


def test_a_loss_is_not_accepted_while_another_buffer_holds_the_ledger(tmp_path: Path) -> None:
    """The two may listen at different addresses. The second would overwrite the checksums that the first notes."""
    config = config_of(tmp_path)
    path = config.run.path / "buffer.sqlite"
    with Store(path):
        before = witness.sums_of(path).stat().st_ino, witness.sums_of(path).read_bytes()
        with pytest.raises(StoreError, match="in use by process"):
            accept_loss(config)
        assert (witness.sums_of(path).stat().st_ino, witness.sums_of(path).read_bytes()) == before
    accept_loss(config)


@pytest.mark.parametrize("how", ["VACUUM INTO '{copy}'", "PRAGMA journal_mode = DELETE"])
def test_a_ledger_without_a_log_goes_on_once_it_is_accepted(tmp_path: Path, how: str) -> None:
    """SQLite writes the change to a log into page 1 itself, which must not look like damage."""
    config = config_of(tmp_path)
    path, copy = config.run.path / "buffer.sqlite", tmp_path / "copy.sqlite"
    with Store(path) as store:
        accept(store, ledger := ledger_of(store), 3)
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute(how.format(copy=copy))
    if copy.exists():
        copy.replace(path)
    with pytest.raises(LostCommits, match="page 1 has not the checksum"):
        Store(path)
    accept_loss(config)
    with Store(path) as store:
        for number in range(60):
            store.record_settings({"number": number, "text": "x" * 5000 * number}, [])
    with Store(path) as store:
        assert ledger_of(store).state.next_item == ledger.state.next_item
