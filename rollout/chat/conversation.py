"""The exact tokens of one chat episode: a forest of turns, and the trajectory made of it.

A request continues the turn whose messages are its longest prefix, or begins a root. Held tokens are never encoded
again. A path from root to leaf is a segment; a turn on two paths is trained only in the first.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollout.chat.messages import Message
from rollout.tasks.trajectory import Completion, Trajectory


@dataclass(eq=False)
class RecordedTurn:
    """One answer. `given`: tokens between `parent` and the sampled ones. `request`, `answered`: digests of messages
    before and with the answer."""

    parent: "RecordedTurn | None"
    given: list[int]
    completion: Completion
    messages: list[Message]
    request: bytes
    answered: bytes
    cut: bool = False
    withdrawn: bool = False
    """The client never got it: it is not trained on."""
    length: int = field(init=False)
    """Tokens from the root to the end of this turn."""

    def __post_init__(self) -> None:
        before = self.parent.length if self.parent else 0
        self.length = before + len(self.given) + len(self.completion.tokens)

    def path(self) -> "list[RecordedTurn]":
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def tokens(self) -> list[int]:
        return [token for turn in self.path() for token in (*turn.given, *turn.completion.tokens)]


class Conversation:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._turns: list[RecordedTurn] = []
        self._undelivered: list[bytes] = []

    @property
    def turns(self) -> list[RecordedTurn]:
        """Turns that are not withdrawn, in order of their ends."""
        return [turn for turn in self._turns if not turn.withdrawn]

    def held(self, prefixes: Sequence[bytes]) -> tuple[RecordedTurn | None, int]:
        """Find the turn whose messages are a request's longest prefix, and their number. The last leaf wins among equal
        turns: parallel agents that send the same keep to their own."""
        leaves = self.leaves()
        by_digest = {turn.answered: turn for turn in sorted(self.turns, key=leaves.__contains__)}
        for number in range(len(prefixes) - 1, 0, -1):
            if found := by_digest.get(prefixes[number]):
                return found, number
        return None, 0

    def add(self, turn: RecordedTurn) -> None:
        self._turns.append(turn)

    def withdraw(self, turn: RecordedTurn) -> None:
        if not turn.withdrawn:
            turn.withdrawn = True
            self.lose(turn.request)

    def lose(self, request: bytes) -> None:
        """Expect one repetition of the request."""
        self._undelivered.append(request)

    def repeat(self, request: bytes) -> None:
        """Withdraw the request's last leaf, unless the lost answer is known."""
        if request not in self._undelivered:
            leaves = self.leaves()
            for turn in [turn for turn in self.turns if turn.request == request and turn in leaves][-1:]:
                self.withdraw(turn)
        if request in self._undelivered:
            self._undelivered.remove(request)

    def leaves(self) -> set[RecordedTurn]:
        inner = {turn for counted in self.turns for turn in counted.path()[:-1]}
        return set(self.turns) - inner

    def num_tokens(self) -> int:
        return sum(leaf.length for leaf in self.leaves())

    def segments(self) -> Iterator[list[RecordedTurn]]:
        """Yield paths that hold every turn, in order of their beginnings."""
        needed = {turn for counted in self.turns for turn in counted.path()}
        children: dict[RecordedTurn | None, list[RecordedTurn]] = {}
        for turn in self._turns:
            if turn in needed:
                children.setdefault(turn.parent, []).append(turn)
        stack = children.get(None, [])[::-1]
        while stack:
            turn = stack.pop()
            below = children.get(turn, [])
            stack += below[::-1]
            if not below:
                yield turn.path()

    def trained(self) -> list[RecordedTurn]:
        return list(dict.fromkeys(turn for path in self.segments() for turn in path if not turn.withdrawn))

    def trajectory(self) -> Trajectory:
        """All segments; each sampled token is trained exactly once."""
        made, trained = Trajectory([]), set[RecordedTurn]()
        for number, path in enumerate(self.segments()):
            if number:
                made.starts.append(len(made.tokens))
            for turn in path:
                made.give(turn.given)
                if turn.withdrawn or turn in trained:
                    made.give(turn.completion.tokens)
                else:
                    made.take(turn.completion)
                    trained.add(turn)
        made.start = made.sampled.index(1) if trained else len(made.tokens)
        made.finish = "length" if self.turns and self.turns[-1].cut else "stop"
        return made
