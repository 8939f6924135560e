"""What the parts of a rollout server expect of each other, so that each runs against stand-ins too. Nothing here runs.

The real ones: `buffer.client.RolloutClient`, `rollout.engine.Engine`, `learner.weights.receiver.Receiver`,
`rollout.prompts.Prompts`, `rollout.rewards.pool.RewardPool`.
"""

from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TYPE_CHECKING, Any, Protocol

from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample
from rollout.rewards import Answer, Score

if TYPE_CHECKING:
    from rollout.episodes.episode import Completion


class Samples(Protocol):
    """The buffer, as a server sees it."""

    async def ask(self, room: int) -> list[WorkItem] | None:
        """Items to make groups of; None when there will be no more."""

    async def put(self, item: WorkItem, samples: list[Sample]) -> Any:
        """Hand over a finished group; waits while the buffer is full."""

    async def fail(self, item: WorkItem, reason: str, permanent: bool = False, returned: bool = False) -> None:
        """The item could not become a group; `returned`: through no attempt at it."""


class Outcome(Protocol):
    """A group or a failure: `rollout.episode.Group`, `rollout.episode.Failure`."""

    async def deliver(self, samples: Samples, item: WorkItem) -> None:
        """Put it, or report it."""


class Episodes(Protocol):
    """Makes groups of items: `rollout.episode.Episodes`."""

    async def run(self, item: WorkItem) -> Outcome:
        """Waits for the engine and the reward workers."""

    def abandon(self, leases: Iterable[int], reason: str) -> None:
        """End the episodes of these leases with a failure."""

    def abandon_all(self, reason: str) -> None:
        """End all of them."""


class Engine(Protocol):
    """What the follow loop needs of vLLM."""

    version: int

    def paused(self) -> AbstractAsyncContextManager[Any]:
        """Generation stands still inside; unfinished sequences keep their place."""


class Sampler(Protocol):
    """What tasks need of vLLM, beneath `generate`."""

    async def generate(
        self, prompt: list[int], max_tokens: int, temperature: float, stop_token_ids: list[int]
    ) -> "Completion":
        """Sample on from `prompt`."""


class Policy(Protocol):
    """A policy that has been published."""

    version: int

    async def load(self) -> Any:
        """Bring it into the engine, which is paused."""

    async def loaded(self) -> Any:
        """Tell the learner, and whoever waits for a first policy."""


class Weights(Protocol):
    """The learner, as a server sees it."""

    def policies(self) -> AsyncGenerator[Any, None]:
        """Each new `Policy` as it is published; a slow server skips to the newest."""


class Prompts(Protocol):
    """Rows to tokens, and tokens to text."""

    def tokens(self, row: dict[str, Any]) -> list[int]:
        """Tokens of a row's prompt; raises EpisodeError for one that cannot be sampled."""

    def text(self, tokens: list[int]) -> str:
        """What these tokens say."""


class Rewards(Protocol):
    """Scores answers."""

    async def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score for each answer; raises RewardError."""
