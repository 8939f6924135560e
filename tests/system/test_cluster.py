"""A run on Ray's own test cluster of three nodes is scaled, loses a node, gets one, and loses a process of each role.

Everything but vLLM and the model is real (`scaled.py`), with a learner of 2 x 2 ranks on two nodes. While a loss lasts
`watch` names it, and after each step the ledger is audited to the byte.
"""

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from actors.watch.metrics_log import Records
from actors.watch.overview import Overview, look_over
from actors.watch.run_state import ask
from buffer.wire.protocol import State
from tests.harness.ray_nodes import add, ray_nodes
from tests.system.chaos_audit import audit
from tests.system.chaos_run import Run
from tests.system.test_scaling import ENDLESS, change, launched, scale, until, works

EVERYWHERE = "0.0.0.0"
"""The buffer's address must not be a loopback one beside other nodes; Linux leads this one to this machine."""
SETTINGS = {
    "rollout.heartbeat_s": 10.0,
    "rollout.drain_s": 60.0,
    "rollout.device": "cpu",
    "run.versions": 10**6,
    "learner.checkpoint_every": 2,
    "learner.device": "cpu",
    "learner.ranks": 4,
    "learner.nodes": 2,
    "weights.host": "192.0.2.1",  # nobody is there: the stand-ins tell versions at another address
}


@dataclass(frozen=True)
class Scene:
    """A run that goes on."""

    run: Run
    launcher: subprocess.Popen[bytes]

    def until(self, holds: Callable[[State], object], what: str) -> State:
        return until(self.run, self.launcher, holds, what)

    def said(self, words: str) -> list[str]:
        """What matches on the launcher's terminal."""
        return re.findall(words, self.run.log("terminal").read_text())

    def heard(self, words: str) -> None:
        """Wait for these words on the terminal."""
        self._wait(lambda: self.said(words), words)

    def watched(self, holds: Callable[[Overview], object], what: str) -> None:
        """Wait until what `watch` shows names a loss."""
        self._wait(lambda: holds(self.overview()), what)

    def _wait(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 240
        while not holds():
            assert self.launcher.poll() is None and time.monotonic() < deadline, (
                f"no {what}: {self.run.log('terminal').read_text()}"
            )
            time.sleep(0.2)

    def overview(self) -> Overview:
        config = self.run.config()
        state = asyncio.run(ask(config, 10.0))
        records = Records(config.run.path / "metrics.jsonl")
        return look_over(config, records, state, time.time(), answers=state is not None)

    def goes_on(self, *servers: str) -> None:
        """It trains again, with these servers at work; then the audit of all there is."""
        now = self.until(lambda state: works(state, *servers), f"work of {servers}")
        self.until(lambda state: state.trained > now.trained + 2, "further versions")
        self.run.held.unlink(missing_ok=True)
        self.run.hold.touch()
        self.until(lambda state: self.run.held.exists() and self._told_all(state), "learner that is held")
        trained = audit(self.run, held=True).batches
        self.run.hold.unlink()
        self.until(lambda state: state.trained > trained, "version after the audit")

    def _told_all(self, state: State) -> bool:
        """Whether the ledger knows everything that was trained before the batch that is held."""
        *_, last = self.run.journal.read_text().splitlines()
        trained = json.loads(last)["version"]
        return bool(state.trained == trained and state.version == trained + 2)

    @contextmanager
    def lost(self, name: str, process: psutil.Process) -> Iterator[None]:
        """SIGKILL, and no other start until the `with` ends."""
        self.run.gate(name).touch()
        process.kill()
        yield
        self.run.gate(name).unlink()

    def processes(self, *words: str) -> list[psutil.Process]:
        """Those whose command ends with `words`. What one of them forks has its command for a moment."""
        every = psutil.process_iter(["cmdline", "ppid"])
        found = [process for process in every if (process.info["cmdline"] or [])[-len(words) :] == [*words]]
        return [process for process in found if process.info["ppid"] not in [other.pid for other in found]]

    def rank(self, number: int) -> psutil.Process:
        """A rank of the learner's second node."""
        nodes = self.processes("tests.system.scaled_learner", str(self.run.folder))
        (node,) = [process for process in nodes if process.environ()["NODE_RANK"] == "1"]
        return node.children()[number]


def ended(overview: Overview, server: str) -> bool:
    return any(alert.level == "bad" and f"{server} is lost: it ended" in alert.text for alert in overview.alerts)


def learner_ended(overview: Overview) -> bool:
    return any(whom.startswith("the learner, which ended") for _, whom, *_ in overview.waits)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_nodes_and_processes_are_lost_and_nothing_else_is(tmp_path: Path) -> None:
    with ray_nodes(gpus=2) as cluster:
        second = add(cluster, 2, gpus=3)
        add(cluster, 3, gpus=2)
        run = Run.make(tmp_path / "run", ENDLESS, groups=4000, seed=0)
        buffer = run.config().buffer.address.replace("127.0.0.1", EVERYWHERE)
        change(run, {**SETTINGS, "buffer.address": buffer})
        change(run, {"cluster.address": cluster.address})
        with launched(run) as launcher:
            scene = Scene(run, launcher)
            scene.goes_on("rollout-0")
            assert scene.said(r"\[learner\] started: node 1 \(127.0.0.2\)")
            assert scale(run, "--servers=3")[-1].endswith("generates")
            three = "rollout-0", "rollout-1", "rollout-2"
            scene.goes_on(*three)

            with scene.lost("rollout-1", *scene.processes(str(run.folder), "rollout-1")):
                scene.watched(lambda it: ended(it, "rollout-1"), "alert of the server")
            scene.goes_on(*three)
            with scene.lost("learner", scene.rank(1)):
                scene.watched(learner_ended, "wait for the learner")
            scene.goes_on(*three)
            with scene.lost("buffer", *scene.processes("buffer", str(run.file))):
                scene.watched(lambda it: "the buffer does not answer" in it.summary, "silence of the buffer")
            scene.goes_on(*three)

            (there,) = {name for name in three if scene.said(rf"\[{name}\] started: pid \d+ on 127.0.0.2")}
            cluster.remove_node(second, allow_graceful=False)
            scene.heard(rf"node 127.0.0.2 \(3 GPUs\) is lost, and with it learner, {there}")
            scene.watched(lambda it: ended(it, there) and learner_ended(it), "loss of the node")
            add(cluster, 4, gpus=3)
            scene.goes_on(*three)
            assert scene.said(r"\[learner\] started: node 1 \(127.0.0.4\)")

            assert scale(run, "--servers=1")[-1].endswith("has left")
            scene.goes_on("rollout-0")
            os.killpg(launcher.pid, signal.SIGINT)
            assert launcher.wait(200) == 130, run.log("terminal").read_text()
