"""A version complete in the staging copies: `load` it, with nothing paused, then `loaded`."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol

from buffer.wire.message import Message
from learner.weights.probe import images_of
from learner.weights.protocol import Failed, Loaded
from learner.weights.receiver.reception import Reception

log = logging.getLogger(__name__)


class ReceivingEngine(Protocol):
    """A vLLM engine whose workers receive weights (`rollout/engine/worker.py`)."""

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...
    async def probe(self, tokens: list[int], images: Sequence[Any]) -> list[float]: ...
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
        await confirm(self._reception, self._engine, self._say, self._load_s, pause_s=0.0)
        self._release()


async def confirm(
    reception: Reception, engine: ReceivingEngine, say: Callable[[Message], None], load_s: float, pause_s: float
) -> None:
    """Compare the probe, if one is due; say Loaded. Raises WeightsError."""
    go, difference, started = reception.go, None, time.perf_counter()
    probe = await reception.probe if go.probe else None
    if probe is not None:
        theirs = probe.logprobs
        try:
            ours = (await engine.probe(probe.tokens, images_of(probe, reception.form)))[-len(theirs) :]
        except ValueError as error:
            say(Failed(round=go.round, reason=str(error), fatal=True))
            raise WeightsError(str(error)) from None
        difference = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
        if not (math.isfinite(difference) and difference <= probe.tolerance):
            reason = (
                f"version {go.version}: the probe's log-probabilities differ by {difference:.4g} nat on average "
                f"(weights.probe_tolerance {probe.tolerance:.3g}): {_few(ours)} here, {_few(theirs)} at the learner"
            )
            if go.version == 0:
                reason += _advice(ours, theirs)
            say(Failed(round=go.round, reason=reason, fatal=True))
            raise WeightsError(reason, final=go.version == 0)
    elif go.probe:
        log.warning("weights: version %d is not probed: the learner went on without sending the probe", go.version)
    verify_s = time.perf_counter() - started
    say(Loaded(round=go.round, load_s=load_s, pause_s=pause_s, verify_s=verify_s, probe=difference))


def _advice(ours: list[float], theirs: list[float]) -> str:
    most = max(range(len(ours)), key=lambda i: abs(ours[i] - theirs[i]))
    worst = f"most at position {most} ({ours[most]:.3f} here, {theirs[most]:.3f} at the learner)"
    cause = "vLLM and the learner compute this model differently, or read different files"
    remedy = (
        "give both ends the same model.path, take another model, or raise weights.probe_tolerance if it is rounding"
    )
    return f", {worst}. {cause}: {remedy}"


def _few(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values[:4]) + ", ...]"
