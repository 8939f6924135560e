"""The mathematics of the learner: advantages, losses, corrections, diagnostics. Pure functions of tensors.

docs/algorithms.md has the table, docs/design/learner.md the order within a batch.
"""
