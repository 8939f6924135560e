"""Why vLLM's engine process did not start, where no other start can mend it: so that the server is not started again.

The process logs the exception and ends; the front process learns only that it ended. A handler of vLLM's logger, which
a forked process inherits, as servers on a CPU have it, leaves what was raised in a file. Of a process that is spawned,
as with GPUs, nothing is known. Used by `vllm_engine.py`; waits for nothing.
"""

import logging
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from configs.load import ConfigError

LOGGER = "vllm"


@contextmanager
def final_failures() -> Iterator[None]:
    """Raise ConfigError in place of what the body raises if the engine's process left a reason that is final."""
    with tempfile.NamedTemporaryFile("r", prefix="headrace-", encoding="utf-8") as file:
        handler, logger = ReasonFile(file.name), logging.getLogger(LOGGER)
        logger.addHandler(handler)
        try:
            yield
        except RuntimeError as error:
            if reason := file.read():
                remedy = "take another model or other keys of rollout.engine"
                raise ConfigError([f"model.path: vLLM cannot serve this model here: {reason}; {remedy}"]) from error
            raise
        finally:
            logger.removeHandler(handler)


class ReasonFile(logging.Handler):
    """Writes the first exception logged that is final to a file."""

    def __init__(self, name: str) -> None:
        super().__init__(logging.ERROR)
        self._name, self._written = name, False

    def emit(self, record: logging.LogRecord) -> None:
        """Of a process's own logger: called in that process."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and is_final(error) and not self._written:
            self._written = True
            with open(self._name, "a", encoding="utf-8") as file:
                file.write(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def is_final(error: BaseException) -> bool:
    """Whether each start would end with `error`: vLLM does not know the model's shape or a key's value. What is said of
    memory may be another process's, which ends."""
    return isinstance(error, NotImplementedError | ValueError) and "memory" not in str(error).lower()
