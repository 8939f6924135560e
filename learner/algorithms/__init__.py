"""The mathematics of the learner: advantages, losses, corrections, and the diagnostics that show when staleness hurts.

Pure functions of tensors, one per paper; docs/algorithms.md has the table. Consumes packed one-dimensional tensors;
waits for nothing; `learner/train/step.py` calls it. Imports torch and configs.schema only.

A batch, on each rank:
    1. Once per batch: `soft_overlong`, `ADVANTAGES[name](rewards, groups, lengths)`, `mask_overlong` of the whole
    batch. 2. Once per batch, for `m2po`: log-probabilities of all microbatches without gradient, `m2_squares` of each,
    gathered
       from all ranks, `m2_limit` of all of them.
    3. Per microbatch: `LOSSES[name](inputs, config)` and `backward()`; if `is_tokenwise`, the gradient comes from
       `LOSSES[name].of_tokens` chunk by chunk instead.
    4. Once per batch: `combine` over microbatches, all-reduce (sum; max for `is_max` keys), `summary`, `alerts`.
"""
