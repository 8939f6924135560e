"""How long a decode step of a rollout server takes.

    step = read / bandwidth + n (FLOPs of a token / peak + context x bytes of a token / bandwidth + sequence) + step

n sequences run at a time; `read` are the weights without the input embedding. The last two summands, of processors and
launches, were fitted to `benchmarks/results/rollout*.json`; the formula is within 6 % of each.
"""

from dataclasses import dataclass

STEP_S, SEQUENCE_S = 2.5e-3, 2.5e-6


@dataclass(frozen=True)
class ServedModel:
    """Example: Qwen2.5-7B has 7.07 G `active` and 28,672 `kv_numbers`."""

    read: int
    active: int
    """Parameters by which one token is multiplied."""
    kv_numbers: int
    """Numbers kept of one token."""
    width: int
    """Bytes of a number."""


@dataclass(frozen=True)
class StepTime:
    """Seconds: `fixed`, and `each` per sequence."""

    fixed: float
    each: float

    def tokens_per_s(self, sequences: float) -> float:
        return sequences / (self.fixed + sequences * self.each)


def step_time(model: ServedModel, peak: float, bandwidth: float, gpus: int, context: float) -> StepTime:
    """The step of sequences with `context` tokens in the mean, without what the GPUs exchange."""
    fixed = STEP_S + model.read * model.width / gpus / bandwidth
    attention = context * model.kv_numbers * model.width / gpus / bandwidth
    return StepTime(fixed, SEQUENCE_S + 2 * model.active / gpus / peak + attention)
