"""Checks vLLM's environment variables at the start: vLLM reads each only when it needs it."""

import os
from collections.abc import Iterator, Mapping

from rollout.engine.door.installed import variable_readers


def unreadable_variables(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    given = [name for name in environment if name.startswith("VLLM_")]
    readers = variable_readers() if given else {}
    for name in sorted(readers.keys() & set(given)):
        try:
            readers[name]()
        except (ValueError, TypeError, AssertionError, OSError) as error:
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            yield f"{name}: vLLM cannot read {environment[name]!r} ({why}); unset it, or correct it"
