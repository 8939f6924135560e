"""Whole runs: the real processes with the real vLLM, started by the launcher, killed while they work, then audited.

The fast lane has the short form of the first one only, in which vLLM starts twice.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

import psutil
import pytest

from buffer.wire.sample import Sample
from tests.harness.toy import ROOT, Run, Toy, python

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1800)]


def until(condition: Callable[[], object], what: str, timeout_s: float = 600.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout_s:g} s"
        time.sleep(0.1)


def audit(run: Run, versions: int, groups: int, staleness: int) -> None:
    """What must hold after any run, however often a process was killed."""
    metrics = run.metrics()
    assert [record["version"] for record in metrics] == list(range(1, versions + 1))
    assert max(record["age/max"] for record in metrics) <= staleness
    batches = run.query("select version, trained from batches order by version")
    assert batches == [(version, 1) for version in range(versions)]
    assert Counter(run.query("select batch from items where state = 'trained'")) == {
        (v,): groups for v in range(versions)
    }
    assert run.query("select item from items where state = 'dropped'") == []
    assert run.query("select max(batch - version) from items where state = 'trained'")[0][0] <= staleness
    assert run.left_behind() == []


@pytest.mark.parametrize(
    ("versions", "ranks", "staleness"),
    [pytest.param(12, 1, 1, id="short"), pytest.param(24, 2, 4, id="long", marks=pytest.mark.long)],
)
def test_killed_while_it_works_the_run_goes_on(versions: int, ranks: int, staleness: int, toy: Toy) -> None:
    """Probes of each version; SIGKILL to buffer, learner and server. In the long form vLLM then loads the export."""
    run = toy.run(f"kills-{versions}")
    more = (f"--learner.ranks={ranks}", f"--batch.max_staleness={staleness}", "--learner.checkpoint_every=2")
    more += ("--weights.publish=rows",) if ranks > 1 else ()
    settings = toy.settings(run.path.name, f"--run.versions={versions}", "--no-report", *more)
    command = [sys.executable, "-m", "actors", "launch", *settings]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            until(lambda: len(run.metrics()) >= 2, "second version")
            assert run.kill("buffer") == 1
            until(lambda: len(run.metrics()) >= 4, "fourth version")
            assert run.kill("learner") >= 1
            until(lambda: any("weights/probe" in record for record in run.metrics()[6:]), "probe by the new learner")
            left = versions - len(run.metrics())
            prepared = 2 * staleness
            assert left > prepared, f"{left} versions left: those prepared already may end the run without a new server"
            assert run.kill("rollout") == 1
            output, _ = launcher.communicate(timeout=900)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    check_phases(output, *((run.path / "logs" / f"{name}.log").read_text() for name in ("learner", "rollout-0")))
    audit(run, versions, groups=4, staleness=staleness)
    assert {path.stem for path in (run.path / "logs").glob("*.progress")} == {"buffer", "learner", "rollout-0"}
    served = [record for record in run.metrics() if "weights/version" in record]  # none while no server has a policy
    assert len(served) >= 3 and all(record["weights/probe_version"] == record["weights/version"] for record in served)
    assert max(record["weights/probe"] for record in served) <= 1e-3
    check_samples(run, versions)
    if versions == 24:
        check_export(run, versions)


def check_phases(output: str, learner: str, rollout: str) -> None:
    """The launcher says how long its start took, learner and both starts of the server in their logs: the launcher
    leaves routine lines out once versions come."""
    seconds = r"[\d.]+ s"
    assert re.search(rf"checked in {seconds}; the processes of the run start now", output)
    assert re.search(rf"started in {seconds}: {seconds} imports, {seconds} certificate, {seconds} model", learner)
    parts = f"{seconds} imports, {seconds} reward workers and buffer, {seconds} vLLM, {seconds} first policy"
    assert len(re.findall(f"rollout-0 has started in {seconds}: {parts}", rollout)) == 2
    assert len(re.findall(f"the first version of this launch came after {seconds}", output)) == 1


def check_export(run: Run, versions: int) -> None:
    """The real vLLM evaluates the last checkpoint."""
    final = run.path / "checkpoints" / f"v{versions:06d}" / "huggingface"
    report = run.path / "evaluation.json"
    judged = python("rollout", "evaluate", run.path / "config.yaml", "--models", final, "--out", report)
    assert judged.returncode == 0, judged.stderr[-4000:]
    assert json.loads(report.read_text())["models"][0]["failed"] == 0


def check_samples(run: Run, trained: int) -> None:
    """Each stored sample has versions where tokens were sampled, none newer than the policy that its batch trained."""
    rows = run.query(
        "select batch, version, data_of(segment, position, samples.bytes) from items join samples using (item) "
        "where state = 'trained'"
    )
    assert len(rows) == trained * 16
    for batch, dispatched, data in rows:
        sample = Sample.unpack(data)
        sampled, versions = sample.sampled.numpy() == 1, sample.versions.numpy()
        assert (versions[~sampled] == -1).all()
        stamps = versions[sampled]
        assert (stamps[1:] >= stamps[:-1]).all() and stamps[0] >= dispatched and stamps[-1] <= batch
        assert (sample.behaviour_logprobs.numpy()[sampled] <= 0).all()


@pytest.mark.long
def test_staleness_zero_is_synchronous_also_over_a_ctrl_c(toy: Toy) -> None:
    """In bfloat16: each batch is sampled under exactly the policy it trains.

    On SIGINT the learner finishes its version and saves it; the same command then continues on the same ledger.
    """
    run = toy.run("synchronous")
    settings = toy.settings("synchronous", "--run.versions=6", "--batch.max_staleness=0", "--model.dtype=bfloat16")
    command = ["actors", "launch", *settings, "--weights.probe_tolerance=0.02"]
    words = [sys.executable, "-m", *command]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            until(lambda: len(run.metrics()) >= 2, "second version")
            launcher.send_signal(signal.SIGINT)
            output, _ = launcher.communicate(timeout=600)
        finally:
            launcher.kill()
    assert launcher.returncode == 130, output[-3000:]
    assert run.left_behind() == []
    again = python(*command)
    assert again.returncode == 0, again.stdout[-3000:] + again.stderr[-3000:]
    audit(run, 6, groups=4, staleness=0)
    assert run.query("select count(*) from items where state = 'trained' and version <> batch") == [(0,)]
    probes = [record["weights/probe"] for record in run.metrics() if "weights/probe" in record]
    assert len(probes) >= 4 and max(probes) <= 0.02  # of a round that goes on, a record has none yet


@pytest.mark.long
@pytest.mark.parametrize("moment", ["the engine is being started", "the engine runs"])
def test_a_server_killed_by_hand_leaves_nothing_behind(toy: Toy, moment: str) -> None:
    """SIGKILL to `python -m rollout` without a launcher: vLLM's engine, its workers and the reward workers end too."""
    settings = toy.settings(f"by-hand-{moment[-4:]}", "--rollout.tensor_parallel=2")
    with (
        subprocess.Popen([sys.executable, "-m", "buffer", *settings], cwd=ROOT) as buffer,
        psutil.Popen(
            [sys.executable, "-m", "rollout", *settings],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"VLLM_LOGGING_LEVEL": "INFO"},
        ) as server,
    ):
        try:
            line = b"init engine" if moment == "the engine runs" else b"starts vLLM"
            assert any(line in each for each in server.stdout)
            children = server.children(recursive=True)
        finally:
            server.kill()
            buffer.terminate()
    # the engine, Python's resource tracker, the guardian of the reward worker and the worker; later vLLM's two
    assert len(children) >= (6 if moment == "the engine runs" else 4)
    assert not psutil.wait_procs(children, timeout=120)[1]
