"""The probe: a fixed text whose log-probabilities learner and server must agree on. Used by `sender/publish.py`; waits
for the policy's forward pass only."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from configs.schema import WeightsConfig
from learner.weights.plan import Spec
from learner.weights.protocol import Probe

PROBE_TOKENS = 64
TEXT = ", ".join(map(str, range(1, 65)))
"""A text every model predicts well. Where a token is nearly certain, rounding to bfloat16 changes its log-probability
little and wrong weights change it much; elsewhere two correct implementations differ by some hundredths. SmolLM2-135M
in bfloat16, vLLM against transformers: 0.005 nat on this text, 0.016 on names of days and months, 0.07 on sums."""


class ProbedPolicy(Protocol):
    """A policy as the sender sees it (`learner/model/policy.py`)."""

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def logprobs_of(self, tokens: list[int]) -> list[float]: ...


class Prober:
    """Decides when a probe is due, equally on every rank, since its forward pass is collective: at the first version
    published and at multiples of `weights.probe_every`, never if that is 0."""

    def __init__(self, specs: Sequence[Spec], config: WeightsConfig, seed: int, tokens: Sequence[int] | None) -> None:
        """`tokens` None: tokens drawn from `seed` among the rows of the first matrix, the embedding."""
        if tokens is None:
            rows = next(spec.shape[0] for spec in specs if len(spec.shape) == 2)
            draw = random.Random(seed)
            tokens = [draw.randrange(rows) for _ in range(PROBE_TOKENS)]
        self._tokens, self._every, self._tolerance = list(tokens), config.probe_every, config.probe_tolerance
        self._first = True

    def due(self, version: int) -> bool:
        """Whether a probe is due at `version`, the next one published."""
        first, self._first = self._first, False
        return self._every > 0 and (first or version % self._every == 0)

    def ask(self, policy: ProbedPolicy) -> Probe:
        """The probe and its log-probabilities under `policy`: a forward pass."""
        return Probe(tokens=self._tokens, logprobs=policy.logprobs_of(self._tokens), tolerance=self._tolerance)


def tokens_of(tokenizer: Any, longest: int) -> list[int]:
    """TEXT as the model's tokens, at most `longest` of them; random tokens for a tokenizer without digits.

    A server samples one token after the probe, so `longest` is one less than what every server accepts.
    """
    tokens: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)[:PROBE_TOKENS]
    if len(set(tokens)) < PROBE_TOKENS // 8:
        draw = random.Random(0)  # the same on every rank
        tokens = [draw.randrange(len(tokenizer)) for _ in range(PROBE_TOKENS)]
    return tokens[:longest]
