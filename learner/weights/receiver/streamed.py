"""A version that is received straight into place while the engine is paused, for workers without room for a copy.

Made by `follow.Receiver`, used by the rollout loop in place of `staged.StagedPolicy`. `load` waits for the broadcast; one
that breaks leaves weights of two versions in place, so it waits on, for the next round and the next learner if need be.
"""

import time
from collections.abc import Awaitable, Callable

from buffer.wire.message import Message
from learner.weights.protocol import Go
from learner.weights.receiver.staged import PauseTimings, ReceivingEngine, confirm


class StreamedPolicy:
    """`receive` returns once a whole version is in place, `say` sends to the learner, `release` accepts new offers."""

    def __init__(
        self,
        go: Go,
        engine: ReceivingEngine,
        say: Callable[[Message], None],
        release: Callable[[], None],
        receive: Callable[[], Awaitable[Go]],
    ) -> None:
        self._go, self._engine, self._say, self._release, self._receive = go, engine, say, release, receive
        self._load_s = 0.0

    @property
    def version(self) -> int:
        """The version announced; after `load`, the version in place, which may be a later one."""
        return self._go.version

    async def load(self) -> None:
        """Receive the version into place. Call it while the engine is paused."""
        started = time.perf_counter()
        self._go = await self._receive()
        self._load_s = time.perf_counter() - started

    async def loaded(self, timings: PauseTimings) -> None:
        """Call it once generation goes on: verifies the version and tells the learner. Raises WeightsError."""
        await confirm(self._go, self._engine, self._say, self._load_s, timings)
        self._release()
