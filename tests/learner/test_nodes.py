"""A learner on several nodes, started by hand; in the long tests two processes of two ranks each, which share no
folder."""

import os
import random
import signal
import socket
import struct
import subprocess
import threading
import time
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
from torch.distributed import TCPStore

from buffer.wire.protocol import Hello, Rewind, Take
from configs.checkpoint_files import complete
from configs.entrypoint import FORCING, PROGRESS
from configs.load import ConfigError
from configs.schema import LearnerConfig
from configs.variables import TORCHRUN
from learner import mesh, ranks
from learner.__main__ import check_weights_host
from learner.record.metrics import read
from learner.weights.channel import Rendezvous
from tests.harness.canned import Canned
from tests.harness.keys import give_keys
from tests.harness.ports import free_port
from tests.harness.world import ROOT
from tests.learner.test_main import command

LEARNER = LearnerConfig(ranks=4, nodes=2)


class Nodes(ExitStack):
    """Both nodes' learners, with a store to meet in. Each has a run folder of its own."""

    def __init__(self, tmp_path: Path, address: str) -> None:
        super().__init__()
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.line = command(tmp_path, address, ranks=4, nodes=2, checkpoint_on="first_node")
        self.logs = [tmp_path / f"node{number}.log" for number in range(2)]
        self.processes = [self._start(number, tmp_path / f"node{number}") for number in range(2)]

    def _start(self, number: int, folder: Path) -> subprocess.Popen:
        told = {"NODE_RANK": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port)}
        log = self.enter_context(self.logs[number].open("w"))
        give_keys(folder / "run")
        environment = os.environ | told | {ranks.THERE_IS_A_STORE: "True"}
        line = [*self.line, f"--run.folder={folder}"]
        process = subprocess.Popen(line, cwd=ROOT, stderr=log, env=environment)
        self.callback(process.kill)
        return process

    def ranks(self) -> list[list[psutil.Process]]:
        return [psutil.Process(process.pid).children() for process in self.processes]

    def ended(self) -> tuple[list[int], list[str]]:
        """Exit codes and logs."""
        return [process.wait(300) for process in self.processes], [log.read_text() for log in self.logs]


@pytest.mark.long
@pytest.mark.timeout(1800)  # two starts of four ranks
def test_two_nodes_drain_die_and_resume(tmp_path: Path) -> None:
    """A signal to one node drains both, a rank killed on one ends both. The first alone has checkpoints and metrics."""
    saved = tmp_path / "node0" / "run" / "checkpoints"
    with Canned(batches=1) as buffer, Nodes(tmp_path, buffer.address) as nodes:
        assert buffer.waiting.wait(300)
        nodes.processes[1].send_signal(signal.SIGTERM)
        codes, logs = nodes.ended()
        assert codes == [0, 0], logs
        assert [log.count("SIGTERM: finishing this version") for log in logs] == [2, 2]
        assert "2 copies over 2 ranks each" in logs[0]
        assert {(take.rank, take.world) for take in buffer.requests if isinstance(take, Take)} == {
            (rank, 4) for rank in range(4)
        }
        served = [one.serves for one in buffer.requests if isinstance(one, Hello) and one.role == "learner"]
        assert len(served) == 4 and sum(bool(address) for address in served) == 1
    assert complete(saved) == [1]
    assert [record["version"] for record in read(tmp_path / "node0" / "run" / "metrics.jsonl")] == [1]
    with Canned(batches=2) as buffer, Nodes(tmp_path, buffer.address) as nodes:
        assert buffer.waiting.wait(300)
        every = nodes.ranks()
        assert [len(those) for those in every] == [2, 2]
        assert sorted(int(rank.environ()["RANK"]) for rank in every[1]) == [2, 3]
        every[1][1].kill()
        codes, logs = nodes.ended()
        # on a busy machine the first node may tell of its ranks' broken connections before the second of the kill
        assert codes[0] != 0 and codes[1] in (128 + signal.SIGKILL, codes[0]), logs
        assert "failed first on this node (exit code -9)" in logs[1]
        assert not psutil.wait_procs([rank for those in every for rank in those], 0)[1]
        assert {rewind.version for rewind in buffer.requests if isinstance(rewind, Rewind)} == {1}
    assert not (tmp_path / "node1" / "run" / "checkpoints").exists()
    assert not (tmp_path / "node1" / "run" / "metrics.jsonl").exists()


def variables(node: int, port: int, **more: str) -> dict[str, str]:
    return {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)} | more


def test_nodes_tell_each_other_of_signals_and_failures() -> None:
    """Each node's ranks get a signal once, wherever it came from; a failure ends those of the other node."""
    first = ranks.Node(LEARNER, variables(0, 0))
    port = int(first.variables["MASTER_PORT"])
    second = ranks.Node(LEARNER, variables(1, port))
    assert second.variables == first.variables and (first.number, second.number, second.local) == (0, 1, 2)
    with pytest.raises(ConfigError, match=r"NODE_RANK: 1 has been at the store .* before; end the learner"):
        ranks.Node(LEARNER, variables(1, port))
    got, drained, forced = [], threading.Event(), threading.Event()

    def pass_on(number: int) -> None:
        got.append(number)
        (forced if len(got) > 1 else drained).set()

    second.follow(pass_on)
    first.tell("signal", signal.SIGTERM, 1)
    assert drained.wait(300)
    second.stop(signal.SIGTERM, 1, pass_on)  # its own, of whoever ends all nodes at once
    first.tell("signal", signal.SIGINT, 2)
    assert forced.wait(300)
    assert got == [signal.SIGTERM, FORCING]


def test_the_exit_code_of_a_node_that_failed_is_the_other_s() -> None:
    first, killed = ranks.Node(LEARNER, variables(0, 0)), threading.Event()
    second = ranks.Node(LEARNER, variables(1, int(first.variables["MASTER_PORT"])))
    second.patience_s = 0.0
    second.follow(lambda number: killed.set() if number == signal.SIGKILL else None)
    first.tell("failed", 7, 1)
    assert first.leave(7) == 7
    assert killed.wait(300)
    assert second.killed and second.why == "the ranks of node 0 have failed, where rank 1 failed first (exit code 7)"
    assert second.leave(128 + signal.SIGKILL) == 7


def test_a_node_alone_needs_nobody() -> None:
    node = ranks.Node(LearnerConfig(ranks=2), {})
    assert (node.number, node.local, node.leave(0), node.leave(3)) == (0, 2, 0, 3)
    assert node.variables["MASTER_ADDR"] == "127.0.0.1"


MEET = {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
SRUN = {"SLURM_PROCID": "9", "SLURM_LOCALID": "1", "SLURM_STEP_NUM_NODES": "2"}


@pytest.mark.parametrize(
    ("learner", "environment", "problem"),
    [
        (
            {"ranks": 4, "nodes": 2},
            {},
            r"learner.nodes: 2, and nothing says which of them this is; .* NODE_RANK 0 to 1",
        ),
        (
            {"ranks": 4, "nodes": 2},
            {"NODE_RANK": "2"} | MEET,
            r"NODE_RANK: 2 is not one of 0 to 1; .*learner.nodes \(2",
        ),
        ({"ranks": 4}, {"NODE_RANK": "1"}, r"NODE_RANK: 1 is not one of 0 to 0; .*learner.nodes \(1"),
        (
            {"ranks": 4, "nodes": 2},
            {"NODE_RANK": "1", "MASTER_PORT": "1"},
            "MASTER_ADDR: not set, .*first node's address",
        ),
        ({"ranks": 2}, {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}, "MASTER_PORT: not set, .*a free port"),
        (
            {"ranks": 2, "nodes": 2},
            {"NODE_RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "99999"},
            "MASTER_PORT: 99999 is no port",
        ),
        (
            {"ranks": 2, "nodes": 2},
            {"NODE_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "abc"},
            "MASTER_PORT: abc is no port",
        ),
        (
            {"ranks": 8},
            {"RANK": "0", "WORLD_SIZE": "4"} | MEET,
            "learner.ranks: 8, but WORLD_SIZE is 4; set .* to 4, or unset",
        ),
    ],
)
def test_a_place_that_cannot_be_is_refused(learner: dict, environment: dict, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        ranks.check_environment(LearnerConfig(**learner), environment)


def test_places_that_can_be() -> None:
    ranks.check_environment(LearnerConfig(ranks=4), {})
    ranks.check_environment(LearnerConfig(ranks=4), {"NODE_RANK": "0"})
    ranks.check_environment(LEARNER, {"NODE_RANK": "1"} | MEET)
    ranks.check_environment(
        LearnerConfig(), {"RANK": "5", "WORLD_SIZE": "16", TORCHRUN: "x"} | MEET
    )  # it knows how many
    assert mesh.ranks_of_node(LEARNER, 4, {}) == 2 and mesh.ranks_of_node(LEARNER, 16, {"LOCAL_WORLD_SIZE": "8"}) == 8


def test_srun_starts_ranks_or_nodes() -> None:
    learner, tasks = LearnerConfig(ranks=16, nodes=2), "SLURM_STEP_NUM_TASKS"
    rank = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    assert ranks.from_slurm(learner, SRUN | {tasks: "16"}) == rank
    assert ranks.from_slurm(learner, SRUN | {tasks: "2", "SLURM_PROCID": "1"}) == {"NODE_RANK": "1"}
    assert ranks.from_slurm(learner, {}) == ranks.from_slurm(learner, SRUN | {tasks: "1"}) == {}
    for known in ("RANK", "NODE_RANK", PROGRESS):  # torchrun, a person or a keeper inside of a task
        assert ranks.from_slurm(learner, SRUN | {tasks: "3", known: "0"}) == {}
    with pytest.raises(ConfigError, match=r"16 on learner.nodes 2, but srun has started 3 tasks; start 16 .* or 2"):
        ranks.from_slurm(learner, SRUN | {tasks: "3"})


def test_the_interface_is_the_one_on_the_route() -> None:
    """Here the loopback one; with network namespaces of several machines it was eth0, where gloo alone fails."""
    environment = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    mesh.choose_interface(environment)
    loopback = environment["GLOO_SOCKET_IFNAME"]
    assert any(card.address == "127.0.0.1" for card in psutil.net_if_addrs()[loopback])
    assert environment["NCCL_SOCKET_IFNAME"] == f"={loopback}"
    kept = MEET | {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "ib1"}
    mesh.choose_interface(given := dict(kept))
    assert given == kept


@pytest.mark.parametrize("master", ["127.1", "no-such-machine.invalid"])  # the first is a name to all but getaddrinfo
def test_an_address_that_others_cannot_reach_is_refused(master: str) -> None:
    with pytest.raises(ConfigError, match=f"MASTER_ADDR: {master}"):
        mesh.choose_interface({"MASTER_ADDR": master, "MASTER_PORT": "29500"})


def test_addresses_of_other_machines_are_refused_where_this_one_listens() -> None:
    taken = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(ConfigError, match=rf"MASTER_PORT: .* cannot listen on 127.0.0.1:{taken.port}.*a free one"):
        mesh.open_store("127.0.0.1", taken.port)
    with pytest.raises(ConfigError, match=r"MASTER_ADDR: .* cannot listen on 192.0.2.1:0.*an address of this machine"):
        mesh.open_store("192.0.2.1", 0)
    check_weights_host("127.0.0.1")
    with pytest.raises(ConfigError, match=r"weights.host: 192.0.2.1 is no address of .*, where learner rank 0 runs"):
        check_weights_host("192.0.2.1")


def test_a_signal_from_two_sides_at_once_counts_once() -> None:
    """All nodes get it, and each sends it to the others at the same moment; a rank must not count it as a second."""
    node, got, both = ranks.Node(LearnerConfig(ranks=2), {}), [], threading.Barrier(2)

    def from_one_side() -> None:
        both.wait()
        node.stop(signal.SIGTERM, 1, lambda number: (got.append(number), time.sleep(0.2)))

    sides = [threading.Thread(target=from_one_side) for _ in range(2)]
    for side in sides:
        side.start()
    for side in sides:
        side.join()
    assert got == [signal.SIGTERM]


@pytest.mark.parametrize("who", ["rank 0", "the weights"])
def test_a_store_listens_at_its_own_address_only(who: str) -> None:
    """A machine has all of 127.0.0.0/8; torch alone would listen at each of its addresses."""
    if who == "rank 0":
        port = free_port()
        meeting = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        held: object = mesh.meet(meeting)
    else:
        held = weights = Rendezvous("127.0.0.1", 60.0)
        port = weights.port
    socket.create_connection(("127.0.0.1", port), 60.0).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), 5.0)
    del held


@pytest.mark.parametrize("refused", range(3))
def test_every_rank_ends_with_the_line_of_the_one_that_is_refused(refused: int) -> None:
    """Before, the others named it after 300 s. Rank 0 hosts the store."""
    port, lines = str(free_port()), dict[int, str]()

    def come(rank: int) -> None:
        meeting = {"RANK": str(rank), "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        try:
            mesh.meet(meeting, ["learner.attention: no kernel"] if rank == refused else [], limit_s=60.0)
        except ConfigError as error:
            lines[rank] = str(error)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert lines == dict.fromkeys(range(3), "learner.attention: no kernel")


def test_a_store_serves_its_ranks_whatever_a_stranger_sends() -> None:
    """Random bytes, broken requests, sizes that cannot be, half a message, and many silent connections."""
    store = mesh.open_store("127.0.0.1", 0)
    hello, draw, open_ones = b"\0" + struct.pack("<I", 0x3C85F7CE), random.Random(0), list[socket.socket]()
    sent = [draw.randbytes(draw.randrange(1, 3000)) for _ in range(20)]
    for query in range(20):
        sent += [hello + bytes([query]) + draw.randbytes(200), hello + bytes([query]) + b"\xff" * 16]
    sent += [hello + b"\1" + struct.pack("<Q", 3) + b"key" + struct.pack("<Q", 2**40), hello + b"\1"] + 200 * [b""]
    for data in sent:
        stranger = socket.create_connection(("127.0.0.1", store.port), 60.0)
        with suppress(OSError):
            stranger.sendall(data)
        open_ones.append(stranger)
    rank = mesh.TCPStore("127.0.0.1", store.port, None, False, timedelta(seconds=60), False)
    rank.set("here", "1")
    assert store.get("here") == b"1" and store.num_keys() < 10
    for stranger in open_ones:
        stranger.close()
    rank.set("here", "2")
    assert store.get("here") == b"2"
