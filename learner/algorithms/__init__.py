"""The mathematics of the learner: advantages, losses, corrections, diagnostics. Pure functions of tensors;
docs/algorithms.md has the table.

A batch, on each rank:
    1. `soft_overlong`, `ADVANTAGES[name]`, `mask_overlong` of the whole batch.
    2. For `m2po`: `m2_squares` of all microbatches without gradient, gathered from all ranks, then `m2_limit`.
    3. Per microbatch: `LOSSES[name](inputs, config)` and `backward()`, or `of_tokens` chunk by chunk if `is_tokenwise`.
    4. `combine` over microbatches, all-reduce (sum; max for `is_max` keys), `summary`.
"""
