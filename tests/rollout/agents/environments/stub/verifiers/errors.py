"""Stub of `verifiers.errors`."""


class EmptyModelResponseError(Exception):
    """The model's response is empty."""
