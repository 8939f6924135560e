"""Finds out why vLLM's engine process did not start, so that no server is restarted in vain.

A handler of vLLM's logger writes the exception to a file named by a variable; spawned processes add it when they import
the worker's extension.
"""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from configs.load import ConfigError
from rollout.engine.door.leant_on import LOGGER

FILE = "HEADRACE_START_FAILURE"
FINAL = (NotImplementedError, ValueError, AttributeError, ImportError, KeyError, TypeError)
"""AttributeError: a config lacks a key that vLLM reads."""


@contextmanager
def final_failures() -> Iterator[None]:
    """Raise ConfigError in place of RuntimeError if the engine process wrote a final reason."""
    with tempfile.NamedTemporaryFile("r", prefix="headrace-", encoding="utf-8") as file:
        handler, logger = ReasonFile(file.name), logging.getLogger(LOGGER)
        logger.addHandler(handler)
        os.environ[FILE] = file.name
        try:
            yield
        except RuntimeError as error:
            if reason := file.read():
                remedy = "take another model or other keys of rollout.engine"
                raise ConfigError([f"model.path: vLLM cannot serve this model here: {reason}; {remedy}"]) from error
            raise
        finally:
            logger.removeHandler(handler)
            os.environ.pop(FILE, None)


def report_final_failures() -> None:
    name, logger = os.environ.get(FILE), logging.getLogger(LOGGER)
    if name and not any(isinstance(handler, ReasonFile) for handler in logger.handlers):
        logger.addHandler(ReasonFile(name))


class ReasonFile(logging.Handler):
    """Writes the first logged exception that is final to a file."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._name, self._written = name, False

    def emit(self, record: logging.LogRecord) -> None:
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_final(error) and not self._written:
            self._written = True
            with open(self._name, "a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def is_final(error: BaseException) -> bool:
    """Lack of memory is not final: another process may end."""
    return isinstance(error, FINAL) and "memory" not in str(error).lower()
