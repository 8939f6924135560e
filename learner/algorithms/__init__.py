"""The mathematics of the learner: advantages, losses, corrections, and the measures that tell when staleness hurts.

Pure functions of tensors, one per paper; docs/algorithms.md has the table. Consumes packed one-dimensional tensors;
waits for nothing; the learner's step calls it. Imports torch and configs.schema only.

A batch, on each rank:
    1. `soft_overlong`, `ADVANTAGES[name](rewards, groups, lengths)`, `mask_overlong` of the whole batch   once a batch
    2. for `m2po`: log-probabilities of all microbatches without gradient -> `m2_squares` of each ->
       gather from all ranks -> `m2_limit`                                                   once a batch
    3. `LOSSES[name](inputs, config)` and `backward()`; where `is_tokenwise`, the gradient from
       `LOSSES[name].of_tokens` chunk by chunk instead                                       each microbatch
    4. `combine` over microbatches, all-reduce (sum; max for `is_max` keys), `summary`, `alerts`   once a batch
"""

from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import ADVANTAGES, mask_overlong, soft_overlong
from learner.algorithms.corrections import m2_limit, m2_squares
from learner.algorithms.diagnostics import alerts, combine, group_sums, is_max, sample_sums, summary
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, is_tokenwise, needs_entropy_gradient, needs_first_pass, needs_reference

__all__ = [
    "ADVANTAGES",
    "LOSSES",
    "AlgorithmConfig",
    "LossInputs",
    "alerts",
    "combine",
    "group_sums",
    "is_max",
    "is_tokenwise",
    "m2_limit",
    "m2_squares",
    "mask_overlong",
    "needs_entropy_gradient",
    "needs_first_pass",
    "needs_reference",
    "sample_sums",
    "soft_overlong",
    "summary",
]
