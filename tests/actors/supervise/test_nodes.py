"""Nodes of a cluster: what is said of them, what fits on them, what reaches them. Without Ray."""

import asyncio
import re
import shutil
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest

from actors.doctor.run_file import without_place
from actors.process import Event, Process
from actors.supervise.cluster.addresses import INTERFACES, interface_hints, on_cluster
from actors.supervise.cluster.arrival import Delivery, UnfitNode, handed_over, settle
from actors.supervise.cluster.node_keeper import Whereabouts
from actors.supervise.cluster.remote import RemoteKeeper, log_lines
from actors.supervise.launch import prepare
from actors.supervise.nodes import ClusterNode, NodeNews, NodeWatch, Patience, needs, news
from buffer.keys import ADMITTED, READS, load_client_keys, load_server_keys, load_token, write_key
from configs.load import load
from configs.schema import Config
from configs.writing import draft_of

ONE, TWO = ClusterNode("10.0.0.1", 0, True, None), ClusterNode("10.0.0.2", 8, True, None)


def run_of(folder: Path, *more: str) -> Config:
    given = ["model.path=m", "data.train=d", "reward.function=math", f"run.folder={folder}", *more]
    return load([f"--{each}" for each in given])


def test_news_are_what_has_changed() -> None:
    joined = NodeNews("joined", "b", "10.0.0.2", 8)
    assert list(news({"a": ONE}, {"a": ONE, "b": TWO}, 100.0)) == [joined]
    assert list(news({"a": ONE, "b": TWO}, {"a": ONE, "b": TWO}, 100.0)) == []
    for later in ({"a": ONE}, {"a": ONE, "b": TWO._replace(alive=False)}):
        assert list(news({"a": ONE, "b": TWO}, later, 100.0)) == [NodeNews("lost", "b", "10.0.0.2", 8)]
    leaves = {"b": TWO._replace(leaves_at=128.5)}
    assert list(news({"b": TWO}, leaves, 100.0)) == [NodeNews("leaving", "b", "10.0.0.2", 8, 28.5)]
    assert list(news(leaves, leaves, 101.0)) == []
    assert next(iter(news({"b": TWO}, {"b": TWO._replace(leaves_at=0.0)}, 100.0))).deadline_s == 30.0


class Somewhere:
    """A keeper on the nodes `nodes`."""

    def __init__(self, name: str, nodes: list[str], gpus: int = 0, problem: str = "") -> None:
        self.problem = problem
        self.process = Process(name, "rollout", (), Path("log"), gpus=gpus)
        self.nodes, self.left = nodes, asyncio.Event()
        self.asked: tuple[str, float] | None = None

    async def leave(self, node: str, within_s: float) -> None:
        self.asked = node, within_s
        self.left.set()
        if self.problem:
            raise RuntimeError(self.problem)


def test_a_node_that_leaves_is_left_in_time_and_one_that_is_lost_is_waited_for() -> None:
    async def go() -> None:
        nodes: dict[str, ClusterNode] = {"a": ONE, "b": TWO}
        said: list[str] = []
        heard = asyncio.Condition()

        async def look() -> Mapping[str, ClusterNode]:
            async with heard:
                heard.notify_all()
            return dict(nodes)

        async def until(words: str) -> None:
            async with asyncio.timeout(120), heard:
                await heard.wait_for(lambda: any(re.search(words, line) for line in said))

        keeper, lost = Somewhere("rollout-0", ["b"], gpus=4), Somewhere("rollout-1", ["b"], problem="a lost call")
        keepers = [keeper, Somewhere("buffer", ["a"]), lost]
        watch = NodeWatch(look, lambda: keepers, said.append)  # type: ignore[arg-type, return-value]
        watching = asyncio.create_task(watch.watch())
        async with asyncio.timeout(60), heard:
            await heard.wait()
        nodes["b"] = TWO._replace(leaves_at=1.0)
        await until(r"node 10.0.0.2 \(8 GPUs\) leaves in 0 s; rollout-0, rollout-1 drained and placed elsewhere")
        async with asyncio.timeout(60):
            await keeper.left.wait()
        assert keeper.asked == ("b", 0.0)
        await until("rollout-1 could not be drained and ends with its node: RuntimeError: a lost call")
        keepers.remove(lost)
        gone = asyncio.create_task(watch.gone("b", 60.0))
        nodes["b"] = TWO._replace(alive=False)
        await until(r"node 10.0.0.2 \(8 GPUs\) is lost, and with it rollout-0")
        async with asyncio.timeout(60):
            await gone
        await until(r"rollout-0 waits for a node with 4 free GPUs, since \d+ s")
        nodes["c"] = TWO
        await until(r"node 10.0.0.2 \(8 GPUs\) has joined; rollout-0 may start there")
        keeper.nodes = ["c"]
        await until(r"rollout-0 is on a node again, after \d+ s")
        watching.cancel()

    asyncio.run(go())


def test_ray_may_be_silent_for_a_while_and_the_last_answer_holds() -> None:
    said: list[str] = []
    clock = [100.0]
    patience = Patience(said.append, lambda: clock[0])

    async def silence() -> str:
        raise RuntimeError("far away:\n  no answer")

    async def answer() -> str:
        return "new"

    def ask(question: Callable[[], Awaitable[str]], after_s: float) -> str:
        clock[0] += after_s
        return asyncio.run(patience.ask(question, "last"))

    assert [ask(silence, after_s) for after_s in (0.0, 59.0)] == ["last", "last"]
    assert said == ["Ray does not answer; the launcher asks again for 60 s: RuntimeError: no answer"]
    assert ask(answer, 0.5) == "new" and ask(silence, 100.0) == "last" and len(said) == 2
    with pytest.raises(RuntimeError, match="no answer"):
        ask(silence, 60.0)


def test_the_watch_outlives_a_look_that_fails() -> None:
    async def go() -> None:
        looks = iter([RuntimeError("busy"), {"a": ONE}, RuntimeError("busy"), {"a": ONE, "b": TWO}])
        said: list[str] = []

        async def look() -> Mapping[str, ClusterNode]:
            if isinstance(found := next(looks, None), Exception):
                raise found
            return found or await asyncio.Event().wait()  # type: ignore[return-value]

        heard = asyncio.Event()
        watching = asyncio.create_task(NodeWatch(look, list, said.append, lambda news: heard.set()).watch())
        waiting = asyncio.create_task(heard.wait())
        async with asyncio.timeout(120):
            await asyncio.wait({watching, waiting}, return_when="FIRST_COMPLETED")
        assert not watching.done() and said[-1] == "node 10.0.0.2 (8 GPUs) has joined", said
        watching.cancel()

    asyncio.run(go())


class Call:
    """Stands for a method of a Ray actor: answers at once, and notes its arguments."""

    def __init__(self, value: object = None) -> None:
        self.value, self.asked = value, list[tuple[object, ...]]()

    def options(self, **options: object) -> "Call":
        return self

    def remote(self, *arguments: object) -> "Call":
        self.asked.append(arguments)
        return self

    def future(self) -> Future[object]:
        answer: Future[object] = Future()
        answer.set_result(self.value)
        return answer


class FarKeeper:
    """Stands for a `NodeKeeper` behind Ray whose process has just ended."""

    def __init__(self) -> None:
        place = Whereabouts("life", "b", "10.0.0.2", True)
        self.place, self.drain, self.kill = Call(place), Call(), Call()
        self.events = Call((place, [Event(1, "ended", "exit code 0", 0)]))


@pytest.mark.parametrize("first", ["leave", "drain"])
def test_what_is_drained_for_good_moves_to_no_other_node(first: str) -> None:
    async def go() -> None:
        made = [FarKeeper()]  # one more would be an error
        keeper = RemoteKeeper(Process("rollout-0", "rollout", (), Path("log")), made.pop, lambda node: True)
        await keeper.started()
        if first == "leave":
            await keeper.leave("b", 10.0)
        await keeper.drain(60.0)
        if first == "drain":
            await keeper.leave("b", 10.0)
            assert keeper._actor.drain.asked == [(60.0,)], "a second SIGTERM would force it"
        (event,) = await keeper.events(0)
        assert event.kind == "ended"

    asyncio.run(go())


def test_a_full_disk_takes_no_lines_and_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "logs").touch()  # a file where the folder should be
    log_lines(Process("learner", "learner", (), tmp_path / "logs" / "log"), [Event(1, "line", "words")])
    log_lines(Process("learner", "learner", (), tmp_path / "log"), [Event(1, "line", "words")])
    assert (tmp_path / "log").read_text() == "words\n"


def test_what_waits_is_told_with_its_nodes() -> None:
    process = Process("learner", "learner", (), Path("log"), gpus=8, nodes=2)
    assert needs(process) == "2 nodes with 4 free GPUs each"
    assert needs(replace(process, nodes=1, gpus=1)) == "a node with 1 free GPU"
    assert needs(replace(process, nodes=1, gpus=0)) == "a node"


@pytest.mark.parametrize(
    ("more", "nodes", "words"),
    [
        (("rollout.tensor_parallel=2",), [1, 1, 1], "leave room for 0 beside the rest of the run"),
        (("rollout.tensor_parallel=2",), [1, 2], None),
        (("learner.ranks=8", "learner.nodes=2"), [8, 2], "learner.nodes: 2 with learner.ranks 8 take 2 nodes with 4"),
        (("learner.ranks=8", "learner.nodes=2"), [0, 8, 4], None),
        (("learner.ranks=8", "learner.nodes=2", "rollout.servers=2", "rollout.tensor_parallel=4"), [8, 8], None),
        (("learner.ranks=4", "learner.nodes=2", "rollout.tensor_parallel=8"), [2, 8, 2], None),
        (("learner.nodes=2", "learner.ranks=2"), [0], "take 2 nodes; the nodes have 0 GPUs"),
    ],
)
def test_gpus_are_counted_by_node(more: tuple[str, ...], nodes: list[int], words: str | None, tmp_path: Path) -> None:
    found = without_place(run_of(tmp_path, *more), nodes)
    assert (found is None) if words is None else (found is not None and words in found)


def test_defaults_become_this_machines_address_and_what_is_written_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = on_cluster(run_of(Path("runs")), "127.0.0.1:6379")
    assert config.run.folder == tmp_path / "runs" and config.buffer.address == "ipc://buffer", "this machine"
    far = on_cluster(run_of(tmp_path, "reward.servers=1", "buffer.address=tcp://10.0.0.7:5601"), "127.0.0.1:6379")
    assert far.buffer.address == "tcp://10.0.0.7:5601" and far.reward.host == "127.0.0.1"
    assert interface_hints("203.0.113.9", None) == {} and interface_hints("10.0.0.1", "ib0") == dict.fromkeys(
        INTERFACES, "ib0"
    )


def test_the_environment_is_handed_over_by_name() -> None:
    ours = {"HF_TOKEN": "t", "HOSTNAME": "h", "PATH": "p", "https_proxy": "x", "MY_KEY": "k", "SLURM_JOB_ID": "1"}
    ours |= {"WANDB_MODE": "offline", "SWANLAB_API_KEY": "s"}
    always = {"HF_TOKEN", "https_proxy", "WANDB_MODE", "SWANLAB_API_KEY"}
    assert set(handed_over(ours, [])) == always
    assert set(handed_over(ours, ["MY_*"])) == always | {"MY_KEY"}


@pytest.fixture
def delivery(tmp_path: Path) -> Delivery:
    config = run_of(tmp_path / "there", "buffer.address=tcp://10.0.0.1:5600")
    prepare(config)
    return Delivery.pack(config, "10.0.0.1", shipped=False)


def process(role: str, folder: Path) -> Process:
    return Process(role, role, ("/no/such/python", "-m", role), folder / "log", str(folder))  # type: ignore[arg-type]


def test_a_node_with_the_shared_folder_is_left_as_it_is(delivery: Delivery, tmp_path: Path) -> None:
    made, shared = settle(process("rollout", tmp_path), delivery, "10.0.0.2")
    assert shared and Path(made.argv[0]).exists() and made.argv[1:] == ("-m", "rollout")


def test_a_node_without_it_gets_config_and_keys(delivery: Delivery, tmp_path: Path) -> None:
    """It gets the keys of the roles that run on it, and no others."""
    run = tmp_path / "elsewhere" / "run"
    other = replace(delivery, run=run)
    _, shared = settle(process("rollout", tmp_path), other, "10.0.0.2")
    assert not shared and (run / "config.yaml").read_text() == delivery.config
    assert {key.name for key in (run / "keys").iterdir()} == {*READS["rollout"]}
    assert {key.stat().st_mode & 0o777 for key in (run / "keys").iterdir()} == {0o600}
    settle(process("learner", tmp_path), other, "10.0.0.2")
    assert {key.name for key in (run / "keys").iterdir()} == {*READS["rollout"], *READS["learner"]}
    assert (run / "keys" / "learner.secret").read_text() == delivery.keys["learner.secret"]


@pytest.mark.parametrize("name", ["config.yaml", "keys/rollout.secret"])
def test_a_node_whose_disk_is_full_says_so_and_keeps_no_part(delivery: Delivery, tmp_path: Path, name: str) -> None:
    run = tmp_path / "elsewhere" / "run"
    (run / "keys").mkdir(parents=True)
    draft_of(run / name).symlink_to("/dev/full")
    with pytest.raises(UnfitNode, match=f"{run} cannot be written here: No space left on device; share the folder"):
        settle(process("rollout", tmp_path), replace(delivery, run=run), "10.0.0.2")
    assert not (run / name).exists() and not draft_of(run / name).is_symlink()


def test_new_keys_replace_those_that_a_node_has(delivery: Delivery, tmp_path: Path) -> None:
    """Keys are rotated where the run is launched; a node has those of the launch before."""
    run = tmp_path / "elsewhere" / "run"
    settle(process("rollout", tmp_path), replace(delivery, run=run), "10.0.0.2")
    before = {name: (run / "keys" / name).read_text() for name in READS["rollout"]}
    shutil.rmtree(tmp_path / "there")
    config = run_of(tmp_path / "there", "buffer.address=tcp://10.0.0.1:5600")
    prepare(config)
    settle(process("rollout", tmp_path), replace(Delivery.pack(config, "10.0.0.1", shipped=False), run=run), "10.0.0.2")
    for name in READS["rollout"]:
        assert (run / "keys" / name).read_text() not in before.values()
        assert (run / "keys" / name).read_text() == (config.run.path / "keys" / name).read_text()


def test_a_keeper_is_sent_no_keys_but_those_of_its_process(delivery: Delivery, tmp_path: Path) -> None:
    for role, secret in (("rollout", "rollout.secret"), ("learner", "learner.secret"), ("buffer", "buffer.secret")):
        sent = delivery.to(process(role, tmp_path)).keys
        assert [name for name in sent if name.endswith(".secret")] == [secret]
        folder = tmp_path / role
        folder.mkdir(mode=0o700)
        for name, text in sent.items():
            write_key(folder / name, text.encode())
        if role in ADMITTED:
            assert load_server_keys(folder, role).clients  # type: ignore[arg-type]
        if role != "buffer":
            assert load_client_keys(folder, role)  # type: ignore[arg-type]
    assert load_client_keys(tmp_path / "rollout", "rollout", server="learner") and load_token(tmp_path / "rollout")


def test_a_node_that_does_not_fit_says_why(delivery: Delivery, tmp_path: Path) -> None:
    newer = {**delivery.versions, "torch": "9.9"}
    for changed, words in (
        (replace(delivery, versions=newer), r"torch is \S+ here and 9.9 where the run was launched; install the same"),
        (replace(delivery, fingerprint="0" * 16), "the run file means .* here and 0000000000000000"),
        (replace(delivery, run=Path("/proc/nowhere/run")), "/proc/nowhere/run cannot be written here"),
    ):
        with pytest.raises(UnfitNode, match=words):
            settle(process("rollout", tmp_path), changed, "10.0.0.2")
    with pytest.raises(UnfitNode, match=f"{tmp_path}/gone: no such folder here; share it, or set cluster.ship"):
        settle(process("rollout", tmp_path / "gone"), delivery, "10.0.0.2")
