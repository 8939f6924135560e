"""Compares a server's log-probabilities of the probe with the learner's."""

import asyncio
import logging
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from buffer.data.images import ImageFormat
from learner.weights.probe import images_of
from learner.weights.protocol import Probe, ProbeText

log = logging.getLogger(__name__)
ADVICE = (
    "vLLM and the learner compute this model differently, or read different files: give both ends the same model.path, "
    "take another model, or raise weights.probe_tolerance if it is rounding"
)


class ProbedEngine(Protocol):
    """An engine that scores a text."""

    async def probe(self, tokens: list[int], images: Sequence[Any]) -> list[float]: ...


class Scored(NamedTuple):
    """A text's log-probabilities here, `ours`, and the learner's."""

    text: ProbeText
    ours: list[float]

    @property
    def difference(self) -> float:
        """Mean absolute difference, in nats."""
        return sum(map(abs, self._differences())) / len(self.ours)

    @property
    def shift(self) -> float:
        """Mean difference, in nats: rounding has both signs, and a softcap that one end leaves out has one."""
        return sum(self._differences()) / len(self.ours)

    def _differences(self) -> list[float]:
        return [a - b for a, b in zip(self.ours, self.text.logprobs, strict=True)]

    def problem(self) -> str:
        """Say how the text differs, with both ends' values; empty if it agrees."""
        text, theirs = self.text, self.text.logprobs
        if math.isfinite(self.difference) and self.difference <= text.tolerance and abs(self.shift) <= text.shift:
            return ""
        how, limit = f"{self.difference:.4g} nat on average", text.tolerance
        if self.difference <= text.tolerance:
            how, limit = f"{abs(self.shift):.4g} nat on average, mostly with one sign,", text.shift
        most = max(range(len(theirs)), key=lambda i: abs(self.ours[i] - theirs[i]))
        return (
            f"the probe's log-probabilities differ by {how} on {text.name} (weights.probe_tolerance {limit:.3g} for "
            f"this text): {_few(self.ours)} here, {_few(theirs)} at the learner, most at position {most} "
            f"({self.ours[most]:.3f} here, {theirs[most]:.3f} at the learner)"
        )


class Comparison:
    """Compares all texts, in one batch, until they have agreed once; then the first alone. `form`: of the model's
    images."""

    def __init__(self, engine: ProbedEngine, form: ImageFormat | None = None) -> None:
        self._engine, self._form = engine, form
        self._agreed = False

    async def compare(self, probe: Probe) -> tuple[float, str]:
        """Return the mean absolute difference of the first text, and how a text differs; empty if all agree.

        Raises ValueError for a picture that cannot be drawn here.
        """
        texts = probe.texts[:1] if self._agreed else probe.texts
        scored = await asyncio.gather(*(self._score(text) for text in texts))
        problem = next(filter(None, (each.problem() for each in scored)), "")
        if not problem and not self._agreed:
            found = (f"{each.text.name} {each.difference:.2g} of {each.text.tolerance:.2g}" for each in scored)
            log.info("weights: the probe agrees with the learner: %s nat", ", ".join(found))
            self._agreed = True
        return scored[0].difference, problem

    async def _score(self, text: ProbeText) -> Scored:
        found = await self._engine.probe(text.tokens, images_of(text, self._form))
        return Scored(text, found[-len(text.logprobs) :])


def _few(values: list[float]) -> str:
    return "[" + ", ".join(f"{value:.3f}" for value in values[:4]) + ", ...]"
