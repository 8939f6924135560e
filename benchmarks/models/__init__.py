"""Certificates of all families of text models that transformers builds, and their pages in docs/reference."""
