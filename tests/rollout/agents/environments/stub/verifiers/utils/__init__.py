"""Stub of `verifiers.utils`."""
