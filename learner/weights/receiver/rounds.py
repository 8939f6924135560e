"""The rounds at a server, one at a time.

    PLEDGED    Ready was said, Go has not come
    RECEIVING  the workers receive, or have and are not verified yet
    LOADING    verified: the rollout loop loads it
    CLEARING   given up, but workers may still write to their buckets

The newest offer in LOADING or CLEARING waits until the buckets are free.
"""

from collections.abc import Callable
from enum import Enum, auto

from buffer.wire.message import Message
from learner.weights.protocol import Failed, Go, Hold, Offer, Ready, Release, Staged
from learner.weights.receiver.reception import Reception


class State(Enum):
    """The state of the present round."""

    IDLE = auto()
    PLEDGED = auto()
    RECEIVING = auto()
    LOADING = auto()
    CLEARING = auto()


TRANSITIONS = {
    (State.IDLE, "ready"): State.PLEDGED,
    (State.PLEDGED, "ready"): State.PLEDGED,
    (State.PLEDGED, "left"): State.IDLE,
    (State.PLEDGED, "go"): State.RECEIVING,
    (State.RECEIVING, "verified"): State.LOADING,
    (State.RECEIVING, "failed"): State.IDLE,
    (State.RECEIVING, "given up"): State.CLEARING,
    (State.LOADING, "loaded"): State.IDLE,
    (State.CLEARING, "cleared"): State.IDLE,
}


class IllegalTransition(RuntimeError):
    """A fault of this program."""


class Rounds:
    """The present round. `say` sends to the learner."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self.state = State.IDLE
        self.reception: Reception | None = None
        self._offer: Offer | None = None
        self.held = False

    def hold(self, loading: bool) -> bool:
        """Accept no offer until `release`. Returns False where a version is on its way. `loading`: the version in
        LOADING is in place."""
        if self.state in (State.PLEDGED, State.RECEIVING) or (self.state is State.LOADING and not loading):
            return False
        self.held = True
        if self.state is not State.LOADING:  # else Hold is said once it is loaded
            self._say(Hold(round=0))
        return True

    def release(self) -> None:
        self.held = False
        self._say(Release())

    def offer(self, offer: Offer) -> None:
        """Answer with Ready or Hold, once the buckets are free."""
        if self.state is State.RECEIVING:
            raise IllegalTransition("an offer in RECEIVING")
        self._offer = offer
        if self.state is not State.LOADING:
            self._answer()

    def joined(self) -> None:
        """The learner admitted this server anew and knows nothing of its round or hold."""
        if self.reception:
            self.reception.take_probe(None)
        if self.held and self.state is not State.LOADING:
            self._say(Hold(round=0))

    def leave(self) -> None:
        self._offer = None
        if self.state is State.PLEDGED:
            self._enter("left")

    def go(self, reception: Reception) -> bool:
        if self.state is not State.PLEDGED or self._offer is None or self._offer.round != reception.go.round:
            return False
        self._enter("go")
        self._offer, self.reception = None, reception
        return True

    def is_present(self, round: int) -> bool:
        return self.reception is not None and self.reception.go.round == round

    def report(self, staged: Staged) -> None:
        if self.reception and self.is_present(staged.round):
            self.reception.reports.append(staged)
            if self.state is State.CLEARING and self.reception.complete:
                self.clear()

    def verify(self) -> Go:
        self._enter("verified")
        assert self.reception
        return self.reception.go

    def fail(self, failed: Failed) -> None:
        self._say(failed)
        self._enter("failed")
        self.reception = None

    def give_up(self, now: float) -> Reception:
        self._enter("given up")
        assert self.reception
        self.reception.given_up_at = now
        return self.reception

    def aborted(self, free: bool) -> bool:
        """Returns whether the buckets are free. `free`: no worker writes."""
        if self.state is State.CLEARING and self.reception and (free or self.reception.complete):
            self.clear()
        return self.state is not State.CLEARING

    def clear(self) -> None:
        self._free("cleared")

    def loaded(self) -> None:
        self._free("loaded")

    def _free(self, event: str) -> None:
        self._enter(event)
        self.reception = None
        self._answer()

    def _answer(self) -> None:
        if self.held:
            self._say(Hold(round=self._offer.round if self._offer else 0))
            self._offer = None
        elif self._offer and self.state is not State.CLEARING:
            self._enter("ready")
            self._say(Ready(round=self._offer.round))

    def _enter(self, event: str) -> None:
        if (self.state, event) not in TRANSITIONS:
            raise IllegalTransition(f"{event!r} in {self.state.name}")
        self.state = TRANSITIONS[self.state, event]
