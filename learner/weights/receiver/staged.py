"""A version of the weights as a rollout server has it in hand: `load` while the engine is paused, then `loaded`.

Made by `receiver.Receiver`, used by the rollout loop. `load` waits for the workers, `loaded` for the probe, if
one came.
"""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from learner.weights.protocol import Failed, Go, Loaded

if TYPE_CHECKING:
    from learner.weights.receiver.follow import Receiver


@dataclass
class PauseTimings:
    """Seconds of one pause of the engine: `paused_s` in all, of which `stop_s` until it stood still and `resume_s` until
    it went on; `settle_s`, while the weights are loaded, until its last tokens had arrived."""

    stop_s: float = 0.0
    settle_s: float = 0.0
    resume_s: float = 0.0
    paused_s: float = 0.0


class ReceivingEngine(Protocol):
    """What receives: a vLLM engine with the worker extension of `rollout/engine/worker.py`."""

    async def collective(self, method: str, *args: Any, timeout_s: float) -> list[Any]: ...
    async def probe(self, tokens: list[int]) -> list[float]: ...


class WeightsError(RuntimeError):
    """The weights that came are wrong, or the learner refuses this server. The process ends with the text."""


class StagedPolicy:
    """A version that lies in the staging copies of all workers, or, `streams`, is about to be sent."""

    def __init__(self, receiver: "Receiver", go: Go, streams: bool) -> None:
        self.version, self._receiver, self._go, self._streams = go.version, receiver, go, streams
        self._load_s = 0.0

    async def load(self) -> None:
        """Put it in place. Call it while the engine is paused. Streaming, `version` may be a later one afterwards."""
        started = time.perf_counter()
        if self._streams:
            self._go = await self._receiver.stream()
            self.version = self._go.version
        else:
            try:
                await self._receiver.engine.collective("rl_load", self.version, timeout_s=self._receiver.timeout_s)
            except RuntimeError as error:
                self._receiver.say(Failed(round=self._go.round, reason=f"load: {error}", fatal=True))
                raise
        self._load_s = time.perf_counter() - started

    async def loaded(self, timings: PauseTimings) -> None:
        """Call it once generation goes on: checks the probe if one came, and tells the learner. Raises WeightsError."""
        difference, probe, started = None, self._go.probe, time.perf_counter()
        if probe is not None:
            ours = await self._receiver.engine.probe(probe.tokens)
            difference = sum(abs(a - b) for a, b in zip(ours, probe.logprobs, strict=True)) / len(ours)
            if not difference <= probe.tolerance:
                reason = f"version {self.version}: the probe's log-probabilities differ by {difference:.4g} nat on "
                reason += f"average (weights.probe_tolerance {probe.tolerance:g}): {_few(ours)} here, "
                reason += f"{_few(probe.logprobs)} at the learner"
                self._receiver.say(Failed(round=self._go.round, reason=reason, fatal=True))
                raise WeightsError(reason)
        self._receiver.say(
            Loaded(
                round=self._go.round,
                stop_s=timings.stop_s,
                settle_s=timings.settle_s,
                load_s=self._load_s,
                resume_s=timings.resume_s,
                pause_s=timings.paused_s,
                verify_s=time.perf_counter() - started,
                probe=difference,
            )
        )
        self._receiver.free()


def _few(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values[:4]) + ", ...]"
