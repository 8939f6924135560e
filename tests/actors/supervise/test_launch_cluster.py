"""A launch on Ray's own test cluster: nodes that are killed, join and leave, with processes of fake commands."""

import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
import pytest

from tests.harness.ports import free_port
from tests.harness.ray_nodes import add, ray_nodes

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
SCRIPT = """
import os, sys
from dataclasses import replace
from pathlib import Path
from actors.__main__ import guarded
from actors.watch.display import Display
from actors.process import Process, Restarts
from actors.supervise.launch import keep, prepare
from configs.schema import Config

CODE = '''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
if "NODE_RANK" in os.environ:
    from datetime import timedelta
    from torch.distributed import TCPStore
    where = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = TCPStore(*where, is_master=False, timeout=timedelta(seconds=120))
    store.set("node" + os.environ["NODE_RANK"], str(os.getpid()))
    print("met", *(store.get(f"node{rank}").decode() for rank in range(2)), flush=True)
print("ready", os.getpid(), os.environ.get("HANDED"), os.environ.get("NOT_HANDED"), flush=True)
signal.sigwait({signal.SIGTERM})
print("drained", flush=True)
'''

def main():
    run = Path(sys.argv[1])
    config = Config(run={"folder": run.parent, "name": run.name}, model={"path": "m"}, data={"train": "d"},
                    reward={"function": "r"}, buffer={"address": sys.argv[2]}, weights={"host": "192.0.2.1"},
                    learner={"device": "cpu", "ranks": 4, "nodes": 2}, rollout={"device": "cpu", "servers": 2},
                    cluster={"address": sys.argv[3], "env": ["HANDED"]})
    from actors.supervise.launch import processes
    quick = Restarts(first_s=0.1, most_s=0.2)
    gpus = {"learner": 4, "rollout-1": 1}
    made = [replace(process, argv=(sys.executable, "-c", CODE), gpus=gpus.get(process.name, 0), restarts=quick)
            for process in processes(config)]
    return keep(made, Display(config), lambda: prepare(config))

if __name__ == "__main__":
    sys.exit(main() if sys.argv[4:] else guarded([sys.executable, __file__, *sys.argv[1:], "inner"]))
"""
BUFFER = "tcp://192.0.2.1:5600"
"""Nobody is there: only the launcher's display would ask it."""


@pytest.fixture
def cluster() -> Iterator["Cluster"]:
    """The head, with two GPUs."""
    with ray_nodes(gpus=2) as made:
        yield made


class Launched:
    """A launcher on a cluster, what it printed, and what its processes logged."""

    def __init__(self, folder: Path, cluster: str, buffer: str = BUFFER) -> None:
        self.run, self.terminal, self.mark = folder / "run", folder / "terminal", uuid.uuid4().hex
        (folder / "script.py").write_text(SCRIPT)
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "HANDED": self.mark}
        argv = [sys.executable, str(folder / "script.py"), str(self.run), buffer, cluster]
        with self.terminal.open("wb") as sink:
            env["NOT_HANDED"] = "1"
            self.front = subprocess.Popen(argv, stdout=sink, stderr=sink, env=env, process_group=0)

    def said(self, words: str) -> int:
        """How often a line of the terminal has matched."""
        return len(re.findall(words, self.terminal.read_text()))

    def ready(self, name: str) -> list[int]:
        """Pids of the starts of a process, as it printed them; of one node for the learner."""
        log = self.run / "logs" / f"{name}.log"
        text = log.read_text() if log.exists() else ""
        return [int(pid) for pid in re.findall(rf"^ready (\d+) {self.mark} None$", text, re.MULTILINE)]

    def refused(self, words: str) -> None:
        """It ends with these words, and nothing was started."""
        assert self.front.wait(240) == 2, self.terminal.read_text()
        assert self.said(words) and not self.ready("buffer"), self.terminal.read_text()

    def until(self, happened: Callable[[], object], limit_s: float = 180.0) -> None:
        deadline = time.monotonic() + limit_s
        while not happened():
            assert time.monotonic() < deadline and self.front.poll() is None, self.terminal.read_text()
            time.sleep(0.1)

    def again(self, name: str, act: Callable[[], object]) -> None:
        """Do something after which process `name` is started once more."""
        before = len(self.ready(name))
        act()
        self.until(lambda: len(self.ready(name)) > before)


@contextmanager
def launching(folder: Path, cluster: str, buffer: str = BUFFER) -> Iterator[Launched]:
    started = Launched(folder, cluster, buffer)
    try:
        yield started
    finally:
        started.front.kill()
        started.front.wait()


LEARNER = ("learner", "learner-node1")


def test_a_cluster_that_does_not_answer_is_refused_in_words(tmp_path: Path) -> None:
    with launching(tmp_path, f"127.0.0.1:{free_port()}") as launched:
        launched.refused(r"cluster.address: 127.0.0.1:\d+: cannot connect: .*refused")


def kill(launched: Launched, name: str) -> None:
    os.kill(launched.ready(name)[-1], signal.SIGKILL)


def generation(launched: Launched) -> bool:
    """Whether the newest starts of the learner on both nodes have met each other."""
    pids = [launched.ready(name) for name in LEARNER]
    return all(pids) and bool(launched.said(rf"met {pids[0][-1]} {pids[1][-1]}"))


def test_nodes_are_lost_join_and_leave_and_every_process_comes_back(tmp_path: Path, cluster: "Cluster") -> None:
    with launching(tmp_path, cluster.address) as launched:
        launched.refused("learner.nodes: 2 with learner.ranks 4 take 2 nodes; the nodes have 2 GPUs")
    second = add(cluster, 2, gpus=2)
    with launching(tmp_path, cluster.address, "tcp://127.0.0.1:5601") as launched:
        launched.refused(
            "buffer.address: tcp://127.0.0.1:5601 is reached from this machine only, but the cluster has 2"
        )
    third = add(cluster, 3, gpus=1).node_id
    with launching(tmp_path, cluster.address) as launched:
        go_through_it(launched, cluster, second, third)


def go_through_it(launched: Launched, cluster: "Cluster", second: Any, third: str) -> None:
    names = ("buffer", "rollout-0", "rollout-1", *LEARNER)
    launched.until(lambda: all(launched.ready(name) for name in names))
    launched.until(lambda: generation(launched) and launched.said(r"\[rollout-1\] started: pid \d+ on 127.0.0.3"))

    for name in ("buffer", "rollout-0"):
        launched.again(name, lambda name=name: kill(launched, name))  # type: ignore[misc]
    first = [launched.ready(name)[-1] for name in LEARNER]
    launched.again("learner", lambda: kill(launched, "learner-node1"))
    launched.until(lambda: generation(launched))
    assert not {launched.ready(name)[-1] for name in LEARNER} & {*first}, "one generation: all ranks are new"
    assert not any(map(psutil.pid_exists, first))

    cluster.remove_node(second, allow_graceful=False)
    launched.until(lambda: launched.said(r"node 127.0.0.2 \(2 GPUs\) is lost, and with it .*learner"))
    launched.until(lambda: launched.said(r"learner waits for 2 nodes with 2 free GPUs each, since \d+ s"))
    launched.again("learner", lambda: add(cluster, 4, gpus=3))
    launched.until(lambda: generation(launched))
    launched.until(lambda: launched.said("node 127.0.0.4 .3 GPUs. has joined; .*learner may start there"))
    launched.until(lambda: launched.said("learner is on a node again, after"))

    launched.again("rollout-1", lambda: take_away(cluster, third))
    assert launched.said(r"\[rollout-1\] drained") and launched.said(r"node 127.0.0.3 .1 GPUs. leaves in \d+ s")
    launched.until(lambda: launched.said(r"\[rollout-1\] started: pid \d+ on 127.0.0.4"))  # after its own words
    assert "(raylet)" not in launched.terminal.read_text(), "words of Ray on the terminal"

    last = [launched.ready(name)[-1] for name in names]
    os.killpg(launched.front.pid, signal.SIGINT)
    assert launched.front.wait(180) == 130, launched.terminal.read_text()
    assert all(launched.said(rf"\[{name}\] (node \d \S+: )?drained") for name in ("buffer", "rollout-0", "learner"))
    assert not any(map(psutil.pid_exists, last))


def take_away(cluster: "Cluster", node: str) -> None:
    """Give notice to a node, as a spot machine gets it."""
    notice = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    command = [
        Path(sys.executable).with_name("ray"),
        "drain-node",
        "--address",
        cluster.address,
        "--node-id",
        node,
        *notice,
    ]
    subprocess.run([*command, "--deadline-remaining-seconds", "600"], check=True)
