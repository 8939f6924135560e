"""Checks that vLLM can read its environment variables, before a server starts.

vLLM reads a variable only when it needs it, so a wrong value ends a server minutes after its start. Used by
`setup.check_server` and `actors/doctor/run_file.py`. Runs vLLM's `envs.py` alone, a tenth of a second: importing the
package would take ten.
"""

import importlib.util
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path


def unreadable_variables(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield a line for each variable whose value the installed vLLM cannot read; nothing without vLLM."""
    given = [name for name in environment if name.startswith("VLLM_")]
    readers = vllm_readers() if given else {}
    for name in sorted(readers.keys() & set(given)):
        try:
            readers[name]()
        except (ValueError, TypeError, AssertionError, OSError) as error:
            why = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
            yield f"{name}: vLLM cannot read {environment[name]!r} ({why}); unset it, or correct it"


def vllm_readers() -> dict[str, Callable[[], object]]:
    """Return vLLM's reader of each variable, by the variable's name."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return {}
    spec = importlib.util.spec_from_file_location("vllm_envs_alone", Path(vllm.origin).with_name("envs.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    readers: dict[str, Callable[[], object]] = module.environment_variables
    return readers
