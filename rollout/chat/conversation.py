"""The exact tokens of one episode of chat: a forest of turns, and the trajectory that is trained on. Pure Python.

A turn is one answer of the policy: what was given since the turn before it, and what was sampled. A request continues
the turn whose messages are its longest prefix, and whatever else it may be, it begins anew: a root. Held tokens are
never encoded again and never mended. A path from a root to a leaf is a segment; a turn that lies on two paths is
trained in the first, and is context in the other. Used by `session.py`, which asks the engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from rollout.chat.messages import Message
from rollout.tasks.trajectory import Completion, Trajectory


@dataclass(eq=False)
class RecordedTurn:
    """One answer. `given` are the tokens between the turn before it, `parent`, and the sampled ones: its prompt, for
    a turn without `parent`. `request` and `answered` are digests of the messages before and with the answer."""

    parent: "RecordedTurn | None"
    given: list[int]
    completion: Completion
    messages: list[Message]
    """Messages of the request and the answer, as they are rendered again."""
    request: bytes
    answered: bytes
    cut: bool = False
    """Whether a limit of the run ended the answer."""
    withdrawn: bool = False
    """It never reached who asked for it: it is not trained on."""
    length: int = field(init=False)
    """Tokens from the root to the end of this turn."""

    def __post_init__(self) -> None:
        before = self.parent.length if self.parent else 0
        self.length = before + len(self.given) + len(self.completion.tokens)

    def path(self) -> "list[RecordedTurn]":
        """The turns from the root to this one."""
        turns = [self]
        while (parent := turns[-1].parent) is not None:
            turns.append(parent)
        return turns[::-1]

    def tokens(self) -> list[int]:
        """All tokens from the root to the end of this turn, as the engine saw and sampled them."""
        return [token for turn in self.path() for token in (*turn.given, *turn.completion.tokens)]


class Conversation:
    """The turns of one episode."""

    def __init__(self) -> None:
        self._turns: list[RecordedTurn] = []
        self._undelivered: list[bytes] = []
        """Requests whose answer is known not to have arrived, and which were not repeated yet."""

    @property
    def turns(self) -> list[RecordedTurn]:
        """Those that count, in the order in which they ended."""
        return [turn for turn in self._turns if not turn.withdrawn]

    def held(self, prefixes: Sequence[bytes]) -> tuple[RecordedTurn | None, int]:
        """The turn whose messages are the longest prefix of a request, and their number. Among equal turns it
        is the last one that no turn continues yet: agents that run at once and send the same keep to their own."""
        leaves = self.leaves()
        by_digest = {turn.answered: turn for turn in sorted(self.turns, key=leaves.__contains__)}
        for number in range(len(prefixes) - 1, 0, -1):
            if found := by_digest.get(prefixes[number]):
                return found, number
        return None, 0

    def add(self, turn: RecordedTurn) -> None:
        """Record an answer."""
        self._turns.append(turn)

    def withdraw(self, turn: RecordedTurn) -> None:
        """The answer was never delivered."""
        if not turn.withdrawn:
            turn.withdrawn = True
            self.lose(turn.request)

    def lose(self, request: bytes) -> None:
        """The request will have no answer; one repetition of it is expected."""
        self._undelivered.append(request)

    def repeat(self, request: bytes) -> None:
        """A client asks again since no answer to this request arrived: the last one that nothing continues is
        withdrawn, unless it is known already which answer was lost."""
        if request not in self._undelivered:
            leaves = self.leaves()
            for turn in [turn for turn in self.turns if turn.request == request and turn in leaves][-1:]:
                self.withdraw(turn)
        if request in self._undelivered:
            self._undelivered.remove(request)

    def leaves(self) -> set[RecordedTurn]:
        """The turns that count and that none which counts continues: each ends a segment."""
        inner = {turn for counted in self.turns for turn in counted.path()[:-1]}
        return set(self.turns) - inner

    def num_tokens(self) -> int:
        """Tokens of all segments."""
        return sum(leaf.length for leaf in self.leaves())

    def segments(self) -> Iterator[list[RecordedTurn]]:
        """Paths that between them hold every turn that counts, each ending in one; in the order in which they began,
        what continues a path before what branches off it later."""
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
        """The turns that count, in the order in which the trajectory has them."""
        return list(dict.fromkeys(turn for path in self.segments() for turn in path if not turn.withdrawn))

    def trajectory(self) -> Trajectory:
        """All segments, one after another: each sampled token of a turn that counts is trained exactly once."""
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
