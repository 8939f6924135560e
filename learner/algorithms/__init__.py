"""The learner's mathematics, as pure functions of tensors (docs/algorithms.md, docs/design/learner.md)."""
