"""Stub of `verifiers.utils.env_utils`."""

import importlib


def import_env_module(name):
    """The module of an environment."""
    return importlib.import_module(name)
