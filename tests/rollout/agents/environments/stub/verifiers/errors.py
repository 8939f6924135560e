"""Stands for `verifiers.errors`."""


class EmptyModelResponseError(Exception):
    """An answer without a word."""
