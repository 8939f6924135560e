"""The probe: a fixed text whose log-probabilities learner and server must agree on. Used by `sender.py`; waits for
nothing but the policy's forward pass."""

import random
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from configs.schema import WeightsConfig
from learner.weights.plan import Spec
from learner.weights.protocol import Probe

PROBE_TOKENS = 64
TEXT = ", ".join(map(str, range(1, 65)))
"""What every model foresees. Where a token is nearly certain, rounding to bfloat16 moves its log-probability little,
and wrong weights move it much; elsewhere two right implementations differ by some hundredths. SmolLM2-135M in bfloat16,
vLLM against transformers: 0.005 here, 0.016 over names of days and months, 0.07 over a prompt with sums."""


class Policy(Protocol):
    """What is published."""

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]: ...
    def logprobs_of(self, tokens: list[int]) -> list[float]: ...


class Prober:
    """When the probe is due and what the policy says to it: alike on every rank, for the forward pass is collective.

    Due at the first version published and at multiples of `every`; never if that is 0.
    """

    def __init__(self, tokens: Sequence[int], every: int, tolerance: float) -> None:
        self._tokens, self._every, self._tolerance = list(tokens), every, tolerance
        self._first = True

    def ask(self, policy: Policy, version: int) -> Probe | None:
        """The probe with the log-probabilities of `policy`, if due."""
        due = self._every > 0 and (self._first or version % self._every == 0)
        self._first = False
        if not due:
            return None
        return Probe(tokens=self._tokens, logprobs=policy.logprobs_of(self._tokens), tolerance=self._tolerance)

    @classmethod
    def of(cls, specs: Sequence[Spec], config: WeightsConfig, seed: int, tokens: Sequence[int] | None) -> "Prober":
        """With `tokens`, or else with tokens drawn from `seed` among the rows of the first matrix, the embedding."""
        if tokens is None:
            rows = next(spec.shape[0] for spec in specs if len(spec.shape) == 2)
            draw = random.Random(seed)
            tokens = [draw.randrange(rows) for _ in range(PROBE_TOKENS)]
        return cls(tokens, config.probe_every, config.probe_tolerance)


def tokens_of(tokenizer: Any, longest: int) -> list[int]:
    """TEXT in the model's tokens, at most `longest`; any tokens of a model that knows no figures.

    A server samples one token after the probe: `longest` is one less than what every server takes.
    """
    tokens: list[int] = tokenizer.encode(TEXT, add_special_tokens=False)[:PROBE_TOKENS]
    if len(set(tokens)) < PROBE_TOKENS // 8:
        draw = random.Random(0)  # alike on every rank
        tokens = [draw.randrange(len(tokenizer)) for _ in range(PROBE_TOKENS)]
    return tokens[:longest]
