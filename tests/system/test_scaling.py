"""Servers are added and drained while a run goes on: real processes, and the ledger's exact accounting after it."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from actors.watch.run_state import ask
from buffer.store.past import history
from buffer.store.sqlite import reading
from buffer.wire.protocol import State
from tests.harness.toy import ROOT, Toy, python
from tests.system.chaos_audit import LOST, audit
from tests.system.chaos_run import Run, Variant

pytestmark = pytest.mark.timeout(600)
ENDLESS = Variant("scaled", 4, 2, 4, epochs=None)
LEASE_S = 600.0
"""Leases must not end by the clock here: a machine that is busy would count attempts that no server has lost."""


def change(run: Run, values: dict[str, Any]) -> None:
    """Write these values, by key, into the run file."""
    whole = json.loads(run.file.read_text())
    for key, value in values.items():
        section, _, name = key.partition(".")
        whole.setdefault(section, {})[name] = value
    run.file.write_text(json.dumps(whole))


@contextmanager
def launched(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    with run.log("terminal").open("ab") as sink:
        words = [sys.executable, "-m", "tests.system.scaled", str(run.folder)]
        launcher = subprocess.Popen(words, cwd=ROOT, stdout=sink, stderr=sink, process_group=0)
    try:
        yield launcher
    finally:
        if launcher.poll() is None:
            launcher.kill()
        launcher.wait()


def until(run: Run, launcher: subprocess.Popen[bytes], holds: Callable[[State], object], what: str) -> State:
    """The buffer's first answer for which `holds`."""
    deadline = time.monotonic() + 240
    while True:
        state = asyncio.run(ask(run.config(), 30.0))
        if state and holds(state):
            return state
        assert launcher.poll() is None and time.monotonic() < deadline, f"no {what}: {run.log('terminal').read_text()}"
        time.sleep(0.2)


def lives(state: State) -> dict[str, str]:
    """What the launcher keeps."""
    return dict[str, str](state.kept.servers) if state.kept else {}


def life(state: State, name: str) -> str:
    return lives(state).get(name, "")


def works(state: State, *names: str) -> bool:
    """Whether these servers are the kept ones, and each makes groups."""
    return set(lives(state)) == set(names) and all(state.servers.get(name, {}).get("leases") for name in names)


def known(state: State, *names: str) -> bool:
    """Whether these servers are the kept ones, and each has said which version it runs."""
    return set(lives(state)) == set(names) and all(
        state.servers.get(name, {}).get("version") is not None for name in names
    )


def freeze_with_leases(run: Run, name: str) -> psutil.Process:
    """Stop a server that has groups in flight: it can neither finish them nor give them back."""
    words = [str(run.folder), name]
    (server,) = [one for one in psutil.process_iter() if command_of(one)[-2:] == words]
    while True:
        server.suspend()
        state = asyncio.run(ask(run.config(), 30.0))
        if state and state.servers[name]["leases"]:
            return server
        server.resume()
        time.sleep(0.1)


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def scale(run: Run, *words: str) -> list[str]:
    """What `python -m actors scale` said."""
    done = python("actors", "scale", run.file, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


def failed_by_loss(run: Run) -> list[Any]:
    """Reasons of failed attempts that blame a server's loss."""
    with closing(reading(run.ledger)) as db:
        reasons = [which for (which,) in db.execute("SELECT which FROM totals WHERE what IN ('failed', 'dropped')")]
    return [reason for reason in reasons if any(words in reason for words in (*LOST, "drain"))]


@pytest.mark.long
def test_one_three_one_and_a_kill_in_the_middle_of_a_drain_and_nothing_is_lost(tmp_path: Path) -> None:
    run = Run.make(tmp_path / "run", ENDLESS, groups=4000, seed=0)
    change(run, {"rollout.heartbeat_s": LEASE_S / 5, "rollout.drain_s": 60.0, "run.versions": 10**6})
    with launched(run) as launcher:
        until(run, launcher, lambda state: works(state, "rollout-0"), "first server at work")
        said = scale(run, "--servers=3")
        assert said[0].startswith("servers: 1 -> 3; 2 to be placed") and said[-1].endswith("generates")
        until(run, launcher, lambda state: works(state, "rollout-0", "rollout-1", "rollout-2"), "third server at work")

        frozen = freeze_with_leases(run, "rollout-2")
        (said, *_) = scale(run, "--servers=1", "--no-wait")
        assert said.startswith("servers: 3 -> 1; drained: rollout-1, rollout-2; their groups are finished within 60 s")
        until(run, launcher, lambda state: life(state, "rollout-2") == "draining", "drain of the frozen server")
        frozen.kill()
        now = until(run, launcher, lambda state: list(lives(state)) == ["rollout-0"], "end of both drains")
        assert now.kept and sorted(now.kept.left) == ["rollout-1", "rollout-2"] and list(now.servers) == ["rollout-0"]
        until(run, launcher, lambda state: state.trained > now.trained + 2, "version after it")
        assert scale(run, "--servers=2")[-1] == "rollout-3 generates"
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(200) == 130, run.log("terminal").read_text()
    assert "draining (once more to force quit)" in run.log("rollout-1").read_text()
    assert failed_by_loss(run) == []

    trained = len({json.loads(line)["version"] for line in run.journal.read_text().splitlines()})
    change(run, {"run.versions": trained + 12})
    run.calm.touch()
    (hold := run.folder / "hold").touch()  # the run must not end before its second server has started
    with launched(run) as launcher:
        until(run, launcher, lambda state: known(state, "rollout-0", "rollout-1"), "both servers of the last launch")
        hold.unlink()
        assert launcher.wait(300) == 0, run.log("terminal").read_text()
    assert audit(run).batches == trained + 12 and failed_by_loss(run) == []
    with closing(reading(run.ledger)) as db:
        assert [change for _, change in history(db) if change.key == "rollout.servers"][
            -1
        ].new == "2 (asked for by hand)"


@pytest.mark.long
@pytest.mark.vllm
@pytest.mark.timeout(1200)
def test_with_vllm_one_two_one(toy: Toy) -> None:
    """The second server gets the policy, makes groups and gives back what it cannot finish."""
    run = toy.run("scaled")
    engine = "--rollout.engine={max_model_len: 64, max_num_seqs: 32, kv_cache_memory_bytes: 67108864}"
    settings = toy.settings("scaled", "--run.versions=100000", "--no-report", engine)
    settings.append("--rollout.heartbeat_s=8")  # a busy machine: no lease may end by the clock
    with (run.path.parent / "scaled.log").open("wb") as sink:
        command = [sys.executable, "-m", "actors", "launch", *settings]
        launcher = subprocess.Popen(command, cwd=ROOT, stdout=sink, stderr=sink, process_group=0)
    try:
        seen(launcher, lambda: len(run.metrics()) >= 2, "second version", Path(sink.name))
        up = python("actors", "scale", run.path, "--servers=2", timeout_s=600.0)
        assert up.returncode == 0 and "rollout-1 generates" in up.stdout, up.stdout + up.stderr
        by_second = "SELECT COUNT(*) FROM items WHERE server LIKE 'rollout-1#%' AND state = 'trained'"
        seen(launcher, lambda: run.query(by_second)[0][0] >= 4, "batch by the second server", Path(sink.name))
        down = python("actors", "scale", run.path, "--servers=1", timeout_s=600.0)
        assert down.returncode == 0 and "rollout-1 has left" in down.stdout, down.stdout + down.stderr
        before = len(run.metrics())
        seen(launcher, lambda: len(run.metrics()) >= before + 3, "version by the first server", Path(sink.name))
        status = python("actors", "status", run.path)
        assert "servers: 1 wanted by hand, 1 run" in status.stdout and "rollout-1" not in status.stdout, status.stdout
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(240) == 130
    finally:
        launcher.kill()
        launcher.wait()
    assert run.log("rollout-1").count("started: pid") == 1 and "ended: exit code 0" in run.log("rollout-1")
    assert run.query("SELECT which FROM totals WHERE what IN ('failed', 'dropped')") == []
    assert run.query("SELECT COUNT(*) FROM items WHERE state = 'leased'") == [(0,)]
    versions = [version for (version,) in run.query("SELECT version FROM batches WHERE trained ORDER BY version")]
    assert versions == list(range(len(versions))) and run.left_behind() == []


def seen(launcher: subprocess.Popen[bytes], holds: Callable[[], object], what: str, terminal: Path) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 400
    while not holds():
        assert launcher.poll() is None and time.monotonic() < deadline, f"no {what}: {terminal.read_text()[-4000:]}"
        time.sleep(0.2)
