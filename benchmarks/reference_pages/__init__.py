"""Pages that are written from the code: docs/reference/keys-*.md and docs/reference/metrics*.md."""
