"""Certificates of all families of text models that transformers builds, and docs/models.md."""
