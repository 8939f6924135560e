"""A version received straight into place while the engine is paused. A broken broadcast leaves weights of two versions,
so `load` waits for the next round."""

import asyncio
import time
from collections.abc import Awaitable, Callable

from buffer.wire.message import Message
from learner.weights.receiver.reception import Reception
from learner.weights.receiver.staged import ReceivingEngine, confirm


class StreamedPolicy:
    """`receive` starts to receive a round, `release` accepts new offers."""

    def __init__(
        self,
        reception: Reception,
        engine: ReceivingEngine,
        say: Callable[[Message], None],
        release: Callable[[], None],
        receive: Callable[[Reception], Awaitable[None]],
        timeout_s: float,
    ) -> None:
        self._reception, self._engine, self._say, self._release = reception, engine, say, release
        self._receive = receive
        self._events: asyncio.Queue[Reception | BaseException | None] = asyncio.Queue()
        self._timeout_s, self._load_s, self._pause_s = timeout_s, 0.0, 0.0

    @property
    def version(self) -> int:
        """After `load` the version in place, perhaps later than announced."""
        return self._reception.go.version

    def begin(self, reception: Reception) -> None:
        self._events.put_nowait(reception)

    def finish(self, error: BaseException | None = None) -> None:
        self._events.put_nowait(error)

    async def load(self) -> None:
        pausing = time.perf_counter()
        async with self._engine.paused():
            started = time.perf_counter()
            while (event := await self._events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                self._reception = event
                await self._receive(event)
            await self._engine.collective("rl_stamp", self.version, timeout_s=self._timeout_s)
            self._load_s = time.perf_counter() - started
        self._pause_s = time.perf_counter() - pausing

    async def loaded(self) -> None:
        await confirm(self._reception, self._say, self._load_s, self._pause_s)
        self._release()
