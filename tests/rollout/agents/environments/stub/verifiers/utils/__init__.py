"""Stands for `verifiers.utils`."""
