"""Stand-ins for the slow parts of Headrace, shared by the tests: each has the methods of the class it stands for."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np

from buffer.data.images import Picture
from buffer.wire.client import MessageTooLarge
from buffer.wire.protocol import FailureKind, Stored, WorkItem
from buffer.wire.sample import Sample
from configs.schema import Config
from rollout.concurrency import Places, SparePlaces
from rollout.episodes.episode import Episodes
from rollout.episodes.prompts import Prompts
from rollout.episodes.sampler import Sampler
from rollout.errors import PromptError, RewardError
from rollout.evaluation.evaluator import Evaluator
from rollout.evaluation.players import ProblemSet
from rollout.rewards.convention import Answer, Score
from rollout.tasks import Completion
from rollout.tasks.trajectory import PlacedImage, single_turn


async def until(true: Callable[[], object], limit_s: float = 120.0) -> None:
    """Wait until it is so, however slow the machine is. After `limit_s` the assertions that follow say what is not."""
    with suppress(TimeoutError):
        async with asyncio.timeout(limit_s):
            while not true():
                await asyncio.sleep(0.002)


# a rollout server's surroundings (tests/rollout)


VOCABULARY = 0x110000


class FakeEngine:
    """Stands for `Engine` of vllm_engine.py: answers each prompt with `answer(prompt)`, stamped with its version.

    Generation waits for `gate`; `aborted` counts generations that were cancelled.
    """

    def __init__(self, answer: Callable[[list[int]], list[int]]) -> None:
        self.answer, self.version, self.vocabulary = answer, 0, VOCABULARY
        self.gate = asyncio.Event()
        self.gate.set()
        self.running = self.aborted = 0
        self.temperatures: set[float] = set()
        self.asked_tokens: list[int] = []
        self.shown: list[list[PlacedImage]] = []
        self.loaded: list[Path] = []
        self.salts: list[str | None] = []
        self.routes = False
        """Completions bring routes: a row is [[number of the call, token]]."""

    @property
    def salt(self) -> str:
        return f"v{self.version}"

    async def generate(
        self,
        prompt: list[int],
        max_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int] = (),
        images: Sequence[PlacedImage] = (),
        salt: str | None = None,
        routed: int = 0,
    ) -> Completion:
        self.running += 1
        self.salts.append(salt)
        self.temperatures.add(temperature)
        self.asked_tokens.append(max_tokens)
        self.shown.append(list(images))
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        tokens = self.answer(prompt)[:max_tokens]
        ends = [place for place, token in enumerate(tokens) if token in stop_token_ids]
        tokens = tokens[: ends[0] + 1] if ends else tokens
        finish: Literal["stop", "length"] = "stop" if tokens[-1] in stop_token_ids else "length"
        call, read = len(self.asked_tokens), [*prompt, *tokens][routed:-1]
        routes = np.array([[[call, token % 256]] for token in read], np.uint8) if self.routes else None
        return Completion(tokens, [-0.5] * len(tokens), [self.version] * len(tokens), finish, routes)

    async def load_folder(self, path: Path) -> None:
        self.loaded.append(path)


class FakeBuffer:
    """Stands for `RolloutClient`: gives out `items`, at most `room` per call, then waits for more until `end` is
    called."""

    def __init__(self, items: Iterable[WorkItem] = ()) -> None:
        self.items, self.rooms = list(items), list[int]()
        self.put_groups: dict[int, list[Sample]] = {}
        self.failures: dict[int, tuple[FailureKind, str, bool]] = {}
        """Kind, reason and whether permanent, by item."""
        self.returned: set[int] = set()
        self.changed = asyncio.Event()
        self.ended = False

    def add(self, *items: WorkItem) -> None:
        self.items += items
        self.changed.set()

    def end(self) -> None:
        self.ended = True
        self.changed.set()

    async def ask(self, room: int) -> list[WorkItem] | None:
        self.rooms.append(room)
        while not self.items:
            if self.ended:
                return None
            self.changed.clear()
            await self.changed.wait()
        given, self.items = self.items[:room], self.items[room:]
        return given

    async def put(self, item: WorkItem, samples: list[Sample]) -> Stored:
        self.put_groups[item.item] = samples
        return Stored(accepted=True)

    async def fail(
        self,
        item: WorkItem,
        reason: str,
        permanent: bool = False,
        returned: bool = False,
        kind: FailureKind = "infrastructure",
    ) -> None:
        self.failures[item.item] = (kind, reason, permanent)
        self.returned |= {item.item} if returned else set()


class FakePolicy:
    """A published policy that writes to `trail` what happens to it."""

    def __init__(self, version: int, trail: list[str]) -> None:
        self.version, self.trail = version, trail

    async def load(self) -> None:
        self.trail.append(f"load {self.version}")

    async def loaded(self) -> None:
        self.trail.append(f"loaded {self.version}")


class FakeWeights:
    """Stands for `Receiver` of learner/weights/receiver: yields these versions, then waits."""

    def __init__(self, versions: Iterable[int]) -> None:
        self.versions, self.trail = list(versions), list[str]()

    async def policies(self) -> AsyncGenerator[FakePolicy, None]:
        for version in self.versions:
            yield FakePolicy(version, self.trail)
        await asyncio.Event().wait()


class FakeEvaluations:
    """Stands for what `RolloutClient` says of evaluations, and for `Receiver.hold` and `release`: there is one to make
    of each version in `due`. Keeps the results by version, and in `trail` what was called."""

    def __init__(self, due: Iterable[int] = (), busy: bool = False) -> None:
        self.due, self.busy, self.accepted = set(due), busy, True
        self.results: dict[int, Any] = {}
        self.trail: list[str] = []
        self.evaluating: int | None = None
        self.evaluation_due, self.evaluation_over = asyncio.Event(), asyncio.Event()
        self.answers = asyncio.Event()
        """Cleared: claims wait, as while the buffer is being restarted."""
        self.answers.set()
        self.most_examples: int | None = None
        """Answers of a set that a message has room for."""

    async def claim(self, version: int) -> int | None:
        self.trail.append(f"claim {version}")
        await self.answers.wait()
        self.evaluating = version if version in self.due else None
        return self.evaluating

    async def evaluated(self, due: int, version: int, sets: Any) -> Stored:
        if self.most_examples is not None and any(len(one.examples) > self.most_examples for one in sets.values()):
            raise MessageTooLarge("Evaluated of 9.0 MiB exceeds buffer.max_message_mib (8)")
        self.trail.append(f"evaluated {due} at {version}")
        self.results[version], self.evaluating = sets, None
        return Stored(accepted=self.accepted, reason="" if self.accepted else "it is done")

    def hold(self, loading: bool = False) -> bool:
        self.trail.append("hold")
        return loading or not self.busy

    def release(self) -> None:
        self.trail.append("release")


def fake_evaluator(
    engine: Any,
    buffer: FakeEvaluations | None = None,
    sets: Iterable[ProblemSet] = (),
    places: Places | None = None,
    timeout_s: float = 600.0,
) -> Evaluator:
    """An evaluator whose sets are played with FakePrompts and FakeRewards; without sets it evaluates nothing.
    `timeout_s`: `weights.timeout_s`."""
    buffer = buffer or FakeEvaluations()

    class Setup:
        def episodes(
            self, config: Any, engine: Any, temperature: float, samples: int, max_tokens: int | None = None
        ) -> Episodes:
            sampler = fake_sampler(engine, temperature, max_tokens or 8)
            return Episodes(FakePrompts(), single_turn, sampler, FakeRewards(), samples)  # type: ignore[arg-type]

    needed = {"model": {"path": "m"}, "data": {"train": "t"}, "reward": {"function": "math"}}
    config = Config.model_validate(needed | {"weights": {"timeout_s": timeout_s}})
    spare = SparePlaces(places or Places(8, 1), 0.5)
    return Evaluator(config, Setup(), engine, buffer, buffer, spare, list(sets))  # type: ignore[arg-type]


class FakePrompts:
    """Stands for `Prompts`, and for its tokenizer: a token is the code of a character, and a prompt of more than 20 is
    too long. A full stop ends an answer."""

    def __init__(self) -> None:
        self.tokenizer, self.ends, self.stops, self.form = self, [ord(".")], [ord(".")], None

    def close(self) -> None:
        """Nothing renders templates here."""

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        return [ord(character) for character in text]

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        return self.text(tokens)

    def stop_tokens(self, texts: Sequence[str], name: str) -> list[int]:
        return [*Prompts._single_tokens(self, texts, name), *self.ends]  # type: ignore[arg-type]

    def tokens(self, row: dict[str, Any], pictures: Sequence[Picture] = ()) -> list[int]:
        if len(row["problem"]) > 20:
            raise PromptError(f"prompt of {len(row['problem'])} tokens")
        return [ord(character) for character in row["problem"]]

    def text(self, tokens: list[int], special: bool = False) -> str:
        return "".join(map(chr, tokens)) if special else "".join(map(chr, tokens)).replace("|", "")


def fake_sampler(engine: Any, temperature: float = 1.0, max_tokens: int = 8, longest: int = 40) -> Sampler:
    """A sampler for `engine`, with the tokens of FakePrompts."""
    return Sampler(engine, FakePrompts(), temperature, max_tokens, longest)  # type: ignore[arg-type]


class FakeRewards:
    """Stands for `RewardPool`: 1 for the row's answer, an error for the answer `crash`. Keeps the `answers` it got."""

    def __init__(self, asks: Collection[str] = ()) -> None:
        self.answers: list[Answer] = []
        self.asks = asks

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        self.answers += answers
        if any(answer.text == "crash" for answer in answers):
            raise RewardError("fake took longer than reward.timeout_s (1 s); its process was killed")
        return [Score(float(answer.text == answer.row["answer"]), {"formed": 1.0}) for answer in answers]
