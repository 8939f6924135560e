"""Starts of the learner one after another, with other numbers of ranks: those of an earlier one are forgotten."""

from buffer.wire.protocol import Ack, NotRegistered, Part, State, Status, Take, Welcome
from tests.buffer.wire.test_many import Clients, hello
from tests.harness.buffer_process import make_requests


class Learners(Clients):
    """Ranks that are named as the learner names them, and an observer."""

    def __init__(self) -> None:
        super().__init__(make_requests(groups=1), ranks=0)
        self.say("o", hello("o", "observer"))

    def start(self, which: str, world: int) -> None:
        """A start of the learner says Hello."""
        for rank in range(world):
            self.say(
                f"{which}{rank}", hello(f"learner-{rank}", "learner").model_copy(update={"token": f"{which}{rank}"})
            )

    def take(self, which: str, rank: int, world: int, number: int | None = None) -> int:
        return self.say(f"{which}{rank}", Take(version=0, rank=rank, world=world), number)

    def state(self) -> State:
        self.turn()
        self.say("o", Status())
        (state,) = [message for *_, message in self.turn() if isinstance(message, State)]
        return state

    def waiting(self) -> list[str]:
        return [waiter.who for waiter in self.state().waiters if waiter.kind == "Take"]


def test_ranks_that_a_smaller_start_has_no_more_wait_for_nothing() -> None:
    clients = Learners()
    clients.start("old", 4)
    for rank in range(4):
        clients.take("old", rank, 4)
    assert clients.waiting() == [f"learner-{rank}" for rank in range(4)]
    for rank in range(4):
        clients.requests.handlers.peers.on_disconnect(f"old{rank}".encode(), 0.0)
    assert clients.state().learner_gone_s is not None
    clients.start("new", 2)
    assert clients.waiting() == [] and clients.state().learner_gone_s is None
    for rank in range(2):
        clients.take("new", rank, 2)
    assert clients.waiting() == ["learner-0", "learner-1"]


def test_ranks_that_were_cut_off_unnoticed_are_forgotten_once_a_newer_one_takes() -> None:
    clients = Learners()
    clients.start("old", 4)
    for rank in range(4):
        clients.take("old", rank, 4)
    clients.start("new", 2)
    clients.take("new", 0, 2)
    assert clients.waiting() == ["learner-0"]
    clients.take("old", 3, 4)
    assert [(who, type(message)) for who, _, message in clients.turn()] == [("old3", NotRegistered)]


def test_a_late_take_of_a_smaller_start_drops_no_rank_of_a_newer_one() -> None:
    clients = Learners()
    clients.start("old", 2)
    clients.take("old", 1, 2)
    for rank in (2, 3):  # the others of the new start, which would replace them, are still to come
        clients.say(f"new{rank}", hello(f"learner-{rank}", "learner").model_copy(update={"token": f"new{rank}"}))
    clients.take("old", 0, 2)
    clients.take("new", 3, 4)
    clients.take("old", 0, 2)
    assert "learner-3" in clients.waiting()
    clients.take("new", 2, 4)
    clients.turn()
    clients.take("old", 1, 2)
    assert [type(message) for *_, message in clients.turn()] == [NotRegistered]
    assert clients.waiting() == ["learner-3", "learner-2"]


def test_a_rank_that_was_forgotten_and_comes_back_is_still_the_older_one() -> None:
    clients = Learners()
    clients.start("old", 4)
    clients.take("old", 3, 4)
    clients.requests.handlers.peers.on_disconnect(b"old3", 0.0)
    clients.start("new", 2)
    for rank in range(2):
        clients.take("new", rank, 2)
    clients.say("old3", hello("learner-3", "learner").model_copy(update={"token": "old3"}))
    clients.take("old", 3, 4)
    assert Welcome in [type(message) for *_, message in clients.turn()]
    assert {"learner-0", "learner-1"} <= set(clients.waiting()), "the newer ranks are not dropped"


def test_a_rank_that_connects_again_keeps_its_place_beside_the_others() -> None:
    clients = Learners()
    clients.start("one", 2)
    numbers = [clients.take("one", rank, 2) for rank in range(2)]
    clients.requests.handlers.peers.on_disconnect(b"one0", 0.0)
    clients.say("one0", hello("learner-0", "learner").model_copy(update={"token": "one0"}))
    clients.take("one", 1, 2, numbers[1])
    assert sorted(clients.waiting()) == ["learner-0", "learner-1"]
    assert not any(isinstance(message, Ack | Part) for *_, message in clients.turn())
