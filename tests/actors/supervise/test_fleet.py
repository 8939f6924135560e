"""The fleet: what it adds, drains and says for what the buffer answers. The supervisor is a list of names here."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.process import Process
from actors.scaling.rule import Wish
from actors.supervise.fleet import Fleet
from actors.watch.display import Display
from actors.watch.state_poll import StatePoll
from buffer.wire.protocol import LAUNCHER, Kept, ServerLife, State, Waiter
from configs.load import load
from tests.harness.buffer_process import buffer, in_loop
from tests.harness.keys import give_keys

STATE = State(version=0, trained=-1, counts={}, dropped={}, ages={}, bytes_stored=0, servers={}, waiters=[], errors=0)


class NamesOnly:
    """Stands for `Supervisor`: notes what it is asked for. What is added is placed at once, what is drained stays."""

    def __init__(self, servers: int) -> None:
        self.processes = [server(number) for number in range(servers)]
        self.lives: dict[str, ServerLife] = {process.name: "started" for process in self.processes}
        self.left: list[str] = []
        self.ending, self.placed = False, asyncio.Event()
        self.placed.set()

    def servers(self) -> dict[str, ServerLife]:
        return dict(self.lives)

    def add(self, process: Process) -> None:
        self.lives[process.name] = "placing"

    async def drain_server(self, name: str, within_s: float) -> None:
        self.lives[name] = "draining"


def server(number: int) -> Process:
    return Process(f"rollout-{number}", "rollout", ("x",), Path("log"))


class Fixture:
    """A fleet that keeps `servers`, with room for `room` more; `words` go into the run file."""

    def __init__(self, servers: int, *words: str, room: int | None = None, own: int | None = None) -> None:
        required = ["--model.path=m", "--data.train=p.jsonl", "--reward.function=math"]
        self.supervisor, self.said = NamesOnly(servers), list[str]()
        config = load([*required, *words])
        wanted = config.rollout.least_servers if own is None else own
        self.fleet = Fleet(config, self.supervisor, server, lambda: room, self.said.append, wanted)  # type: ignore[arg-type]
        self.fleet.room = room

    def adapt(self, now: float = 0.0, **changes: Any) -> dict[str, ServerLife]:
        """What is kept once the fleet has seen this state."""

        async def seen() -> None:
            self.fleet.adapt(STATE.model_copy(update=changes), now)
            await asyncio.sleep(0)  # drains begin

        asyncio.run(seen())
        return self.supervisor.servers()

    def gone(self, name: str) -> None:
        del self.supervisor.lives[name]
        self.supervisor.left.append(name)


def by_hand(servers: int) -> dict[str, Any]:
    return {"wanted_servers": servers, "wanted_by_person": True}


def test_a_person_gets_more_and_fewer_the_newest_are_drained_and_no_name_comes_twice() -> None:
    it = Fixture(1, room=8)
    assert it.adapt(**by_hand(3)) == {"rollout-0": "started", "rollout-1": "placing", "rollout-2": "placing"}
    assert it.adapt(**by_hand(3)) == it.adapt(**by_hand(3))
    assert it.said == ["servers: 1 -> 3 (asked for by hand)"]
    assert it.adapt(**by_hand(1)) == {"rollout-0": "started", "rollout-1": "draining", "rollout-2": "draining"}
    it.gone("rollout-2")
    assert it.adapt(**by_hand(2)) == {"rollout-0": "started", "rollout-1": "draining", "rollout-3": "placing"}
    assert it.fleet.kept().left == ["rollout-2"] and it.fleet.kept().wanted == 2


def test_without_a_persons_number_it_is_the_run_files() -> None:
    it = Fixture(2, "--rollout.servers=2")
    assert len(it.adapt()) == 2 and len(it.adapt(**by_hand(4))) == 4
    now = it.adapt(wanted_servers=4, wanted_by_person=False)
    assert list(now.values()) == ["started", "started", "draining", "draining"]
    assert it.said[-1] == "servers: 4 -> 2 (as the run file says)"


def test_what_there_is_no_room_for_is_placed_once_there_is() -> None:
    """A server that is being placed takes of the room before Ray has noticed."""
    it = Fixture(1, room=1)
    assert len(it.adapt(**by_hand(4))) == 2 and len(it.adapt(**by_hand(4))) == 2
    it.supervisor.lives["rollout-1"] = "started"
    assert len(it.adapt(**by_hand(4))) == 3
    assert (kept := it.fleet.kept()).wanted == 4 and kept.most == 3 and kept.bound == "there are GPUs for 3 of them"


def test_one_that_gave_up_keeps_its_place_and_nothing_is_placed_while_the_run_ends() -> None:
    it = Fixture(2)
    it.supervisor.lives["rollout-1"] = "gave_up"
    assert it.adapt(**by_hand(2)) == {"rollout-0": "started", "rollout-1": "gave_up"}
    it.supervisor.ending = True
    assert len(it.adapt(**by_hand(4))) == 2


def test_nothing_is_added_before_those_that_the_run_begins_with_are_placed() -> None:
    """The room may be theirs."""
    it = Fixture(1, room=8)
    it.supervisor.placed.clear()
    assert len(it.adapt(**by_hand(3))) == 1
    it.supervisor.placed.set()
    assert len(it.adapt(**by_hand(3))) == 3


def test_the_gpus_of_one_that_gave_up_are_counted_once() -> None:
    it = Fixture(2, room=1)
    it.supervisor.lives["rollout-1"] = "gave_up"
    assert it.fleet.kept().most == 2


def test_one_that_gave_up_is_drained_before_those_that_work() -> None:
    it = Fixture(3)
    it.supervisor.lives["rollout-0"] = "gave_up"
    it.supervisor.lives["rollout-1"] = "ended"
    assert it.adapt(**by_hand(1)) == {"rollout-0": "draining", "rollout-1": "draining", "rollout-2": "started"}


@pytest.mark.parametrize(
    ("words", "bounds", "bound"),
    [
        (["--rollout.servers={min: 2, max: 5}"], (2, 5), "rollout.servers has min 2, max 5"),
        (["--rollout.chat.port=9000"], (1, 1), "rollout.chat.port is 9000, for one server"),
        ([], (1, 4096), "more are a slip of the keyboard"),
    ],
)
def test_the_bounds_of_what_may_be_asked_for(words: list[str], bounds: tuple[int, int], bound: str) -> None:
    kept = Fixture(1, *words).fleet.kept()
    assert ((kept.least, kept.most), kept.bound) == (bounds, bound)


def watched(at: float, waits: bool, parked: float = 0.0, servers: int = 2) -> dict[str, Any]:
    """A run `at` seconds in: a version every ten seconds."""
    stats = {"version": 1, "leases": 4, "silent_s": 0.1, "stats": {"places": 10.0, "parked": parked}}
    waiters = [Waiter(who="learner", kind="Take", why="", seconds=1.0)] * waits
    return {
        "trained": int(at) // 10,
        "counts": {"leased": 8},
        "lengths": {"generated": [int(at), 0, 0, 0, 0]},
        "servers": {f"rollout-{number}": stats for number in range(servers)},
        "waiters": waiters,
    }


def test_the_rule_asks_for_more_says_why_and_looks_away_while_they_start() -> None:
    it = Fixture(2, "--rollout.servers={min: 2, max: 5}", room=8)
    for second in range(62):
        kept = it.adapt(now=float(second), **watched(second, waits=True))
    assert list(kept.values()) == ["started", "started", "placing", "placing"]
    (line,) = it.said
    assert line.startswith("servers: 2 -> 4 (the learner waited 100% of the last 60 s for a batch, 0% of the servers'")
    for second in range(62, 300):
        it.adapt(now=float(second), **watched(second, waits=True))
    assert it.fleet.wanted == 4
    it.supervisor.lives |= {"rollout-2": "started", "rollout-3": "started"}
    for second in range(300, 420):
        it.adapt(now=float(second), **watched(second, waits=True, servers=4))
    assert it.fleet.wanted == 5


def test_the_rule_goes_on_beside_one_that_gave_up_and_asks_for_more_than_that() -> None:
    it = Fixture(3, "--rollout.servers={min: 2, max: 5}", room=8, own=3)
    it.supervisor.lives["rollout-0"] = "gave_up"
    for second in range(62):
        kept = it.adapt(now=float(second), **watched(second, waits=True, servers=3))
    assert list(kept.values()) == ["gave_up", "started", "started", "placing", "placing"] and it.fleet.wanted == 5


def test_a_persons_number_holds_against_the_rule_until_auto() -> None:
    it = Fixture(2, "--rollout.servers={min: 2, max: 5}", room=8)
    for second in range(200):
        it.adapt(now=float(second), **watched(second, waits=True), **by_hand(3))
    assert it.fleet.wanted == 3
    it.supervisor.lives["rollout-2"] = "started"
    it.adapt(now=200.0, **watched(200, waits=True, servers=3))
    assert it.fleet.wanted == 3, "the rule goes on from there"
    for second in range(201, 262):
        it.adapt(now=float(second), **watched(second, waits=True, servers=3))
    assert it.fleet.wanted == 5


def test_the_number_of_the_last_launch_is_the_rules_first() -> None:
    it = Fixture(2, "--rollout.servers={min: 2, max: 5}", room=8, own=4)
    assert len(it.adapt()) == 4


def test_where_servers_do_not_help_it_says_what_does_once() -> None:
    it = Fixture(2, "--rollout.servers={min: 2, max: 5}", room=8)
    for second in range(250):
        it.adapt(now=float(second), **watched(second, waits=True, parked=5.0))
    assert len(it.said) == 1 and "raise batch.max_staleness (4)" in it.said[0] and it.fleet.wanted == 2
    assert "batch.max_staleness" in it.fleet.kept().advice


class Forgotten(Fleet):
    """Has one wish, and knows from the third message on what is kept, as if the buffer had restarted."""

    asked = told = 0

    def adapt(self, state: State, now: float) -> Wish | None:
        self.asked += 1
        return Wish(2, "as a test") if self.asked == 1 else None

    def kept(self) -> Kept:
        self.told += 1
        return super().kept() if self.told > 2 else None  # type: ignore[return-value]


@in_loop
async def test_the_rules_wish_waits_for_a_buffer_that_has_forgotten_the_launcher(tmp_path: Path) -> None:
    async with buffer() as it:
        words = ["--model.path=m", "--data.train=p.jsonl", "--reward.function=math", f"--buffer.address={it.address}"]
        words += [f"--run.folder={tmp_path}"]
        give_keys(tmp_path / "run")
        fleet = Forgotten(load(words), NamesOnly(1), server, lambda: None, print, 1)  # type: ignore[arg-type]
        poll = StatePoll(fleet.config, LAUNCHER)
        asking, following = asyncio.create_task(poll.follow()), asyncio.create_task(fleet.follow(poll))
        wanted = it.requests.handlers.ledger.wanted
        while wanted.wanted_servers != 2 and not following.done():
            await asyncio.sleep(0.05)
        assert not following.done() and not wanted.wanted_by_person
        following.cancel()
        asking.cancel()


@in_loop
async def test_display_and_fleet_look_at_the_answers_of_one_poll(tmp_path: Path) -> None:
    """The buffer has one observer."""
    async with buffer() as it:
        words = ["--model.path=m", "--data.train=p.jsonl", "--reward.function=math", f"--buffer.address={it.address}"]
        words += [f"--run.folder={tmp_path}"]
        give_keys(tmp_path / "run")
        config, supervisor = load(words), NamesOnly(2)
        fleet = Fleet(config, supervisor, server, lambda: None, print, 1)  # type: ignore[arg-type]
        poll, display = StatePoll(config, LAUNCHER), Display(config)
        watches = [poll.follow(), display.watch(poll), fleet.follow(poll)]
        tasks = [asyncio.create_task(task) for task in watches]
        while not (display.state and display.state.kept == fleet.kept()):
            assert not any(task.done() for task in tasks)
            await asyncio.sleep(0.05)
        assert [peer.hello.name for peer in it.requests.handlers.peers.known.values()] == [LAUNCHER]
        for task in tasks:
            task.cancel()
