"""The learner's part of the probe: when it is due, what the policy says, and how far a server may be off."""

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from configs.schema import Config, WeightsConfig
from learner.weights.plan import Spec
from learner.weights.probe import LIKELY, PROBE_TOKENS, PolicyText, ProbeRow
from learner.weights.protocol import Probe, ProbeImage, ProbeText

LOGITS = 16.0
"""Size of the logits whose rounding an uncertain text has, however probable its tokens are. In SmolLM2-135M bfloat16
alone changed random tokens by 0.04 to 0.07 nat (-14 in the mean), repeated ones by 0.06 to 0.08 (-3 to -5)."""
FP8_ROUNDING = 2.0**-4
"""Relative error that FP8 may cause: it changed random tokens by 0.36 to 0.48 nat, repeated ones by 0.46 to 0.82."""
ONE_SIGN = 0.5
"""Part of the tolerance that the mean difference may have. Rounding has both signs, so its mean is a small part of its
size; what one end leaves out of the logits has one sign."""


class ProbedPolicy(Protocol):
    """A policy as the sender sees it."""

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]: ...
    def logprobs_of(self, tokens: Any) -> list[float]: ...


class Prober:
    """Decides when a probe is due, equally on every rank, since its forward pass is collective: at the first version
    published and at multiples of `weights.probe_every`."""

    def __init__(
        self, specs: Sequence[Spec], config: WeightsConfig, seed: int, probe: ProbeRow | Sequence[int] | None
    ) -> None:
        if probe is None:
            rows = next(spec.shape[0] for spec in specs if len(spec.shape) == 2)
            draw = random.Random(seed)
            probe = [draw.randrange(rows) for _ in range(PROBE_TOKENS)]
        if not isinstance(probe, ProbeRow):
            probe = ProbeRow([PolicyText(LIKELY, list(probe), len(probe) - 1, likely=True)], list(probe))
        self._probe, self._every, self._config = probe, config.probe_every, config
        self._first = True

    def due(self, version: int) -> bool:
        first, self._first = self._first, False
        return self._every > 0 and (first or version % self._every == 0)

    def ask(self, policy: ProbedPolicy) -> Probe:
        """Compute all texts in one pass."""
        logprobs, begins, texts = policy.logprobs_of(self._probe.row), 0, []
        for text in self._probe.texts:
            ends = begins + len(text.tokens) - 1
            texts.append(self._with_limits(text, logprobs[begins:ends][-text.compared :]))
            begins = ends + 1  # nothing predicts the first token of a text
        return Probe(texts=texts)

    def _with_limits(self, text: PolicyText, logprobs: list[float]) -> ProbeText:
        limits = limits_of(self._config, logprobs, self._probe.rounding, text.likely)
        drawn = [
            ProbeImage(start=start, height=each.pixels.shape[0], width=each.pixels.shape[1], digest=each.digest)
            for start, each in text.images
        ]
        return ProbeText(
            name=text.name,
            tokens=text.tokens,
            image=drawn[0] if drawn else None,
            logprobs=logprobs,
            tolerance=limits.tolerance,
            shift=limits.shift,
        )


def rounding_of(config: Config) -> float:
    """Relative error of correct log-probabilities, by the coarsest number format of both ends."""
    engine = config.rollout.engine
    formats = config.learner.matmul, engine.get("quantization"), engine.get("kv_cache_dtype")
    if any("fp8" in str(each) for each in formats):
        return FP8_ROUNDING
    return 2 * torch.finfo(getattr(torch, config.model.dtype)).eps


class Limits(NamedTuple):
    """In nats: the largest mean absolute difference, and the largest absolute mean difference."""

    tolerance: float
    shift: float


def limits_of(config: WeightsConfig, logprobs: Sequence[float], rounding: float, likely: bool) -> Limits:
    """`rounding`: relative error of correct weights. What the run file says holds for a text that the policy predicts
    well, and widens the limits of the others."""
    if likely and config.probe_tolerance is not None:
        return Limits(config.probe_tolerance, config.probe_tolerance)
    size = sum(map(abs, logprobs)) / len(logprobs)
    if likely:
        tolerance = config.tolerance + rounding * size
        return Limits(tolerance, tolerance)
    tolerance = config.tolerance + rounding * (LOGITS + size)
    return Limits(tolerance, ONE_SIGN * tolerance)
