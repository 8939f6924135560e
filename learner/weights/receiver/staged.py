"""A version complete in the staging copies: `load` it, with nothing paused, then `loaded`."""

import logging
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from buffer.wire.message import Message
from learner.weights.protocol import Failed, Loaded
from learner.weights.receiver.comparison import ADVICE, ProbedEngine
from learner.weights.receiver.reception import Reception

log = logging.getLogger(__name__)


class ReceivingEngine(ProbedEngine, Protocol):
    """A vLLM engine whose workers receive weights (`rollout/engine/worker.py`)."""

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...
    def paused(self) -> AbstractAsyncContextManager[None]: ...


class WeightsError(RuntimeError):
    """The weights are wrong, or the learner refuses this server. `final`: restarts do not help."""

    def __init__(self, reason: str, final: bool = False) -> None:
        super().__init__(reason)
        self.final = final


class StagedPolicy:
    """A version to load. `release`: staging copies may be overwritten."""

    def __init__(
        self,
        reception: Reception,
        engine: ReceivingEngine,
        say: Callable[[Message], None],
        release: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self.version, self._reception, self._engine = reception.go.version, reception, engine
        self._say, self._release, self._timeout_s = say, release, timeout_s
        self._load_s = 0.0

    async def load(self) -> None:
        started = time.perf_counter()
        try:
            await self._engine.collective("rl_load", self.version, timeout_s=self._timeout_s)
        except RuntimeError as error:
            self._say(Failed(round=self._reception.go.round, reason=f"load: {error}", fatal=True))
            raise
        self._load_s = time.perf_counter() - started

    async def loaded(self) -> None:
        await confirm(self._reception, self._say, self._load_s, pause_s=0.0)
        self._release()


async def confirm(reception: Reception, say: Callable[[Message], None], load_s: float, pause_s: float) -> None:
    """Compare the probe, if one is due; say Loaded. Raises WeightsError."""
    go, difference, started = reception.go, None, time.perf_counter()
    probe = await reception.probe if go.probe else None
    if probe is not None:
        final = go.version == 0
        try:
            difference, problem = await reception.comparison.compare(probe)
        except ValueError as error:
            problem, final = str(error), False
        else:
            problem = problem and f"version {go.version}: {problem}{f'. {ADVICE}' if final else ''}"
        if problem:
            say(Failed(round=go.round, reason=problem, fatal=True))
            raise WeightsError(problem, final=final)
    elif go.probe:
        log.warning("weights: version %d is not probed: the learner went on without sending the probe", go.version)
    verify_s = time.perf_counter() - started
    say(Loaded(round=go.round, load_s=load_s, pause_s=pause_s, verify_s=verify_s, probe=difference))
