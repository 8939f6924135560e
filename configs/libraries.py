"""Imports torch and transformers, and refuses environment variables with which that fails.

Learner and rollout servers import them by `import_all`. The checks before a start run it in a process of its own,
`python -m configs.libraries`.
"""

import importlib
import os
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from configs.entrypoint import BAD_INPUT
from configs.inner_command import inner_words
from configs.load import ConfigError
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.variables import given_to_libraries

MODULES = ("torch", "torch.distributed", "torch._dynamo.config", "torch._inductor.config", "transformers.utils")
IMPORT_S = 180.0


def import_all(modules: Sequence[str] = MODULES, environment: Mapping[str, str] = os.environ) -> None:
    """Raises ConfigError if the import fails and variables of the libraries are set, or if docstrings are left out."""
    if sys.flags.optimize > 1:
        problem = f"PYTHONOPTIMIZE: {sys.flags.optimize} (python -OO) leaves out docstrings, which transformers reads"
        raise ConfigError([f"{problem}; unset it, or set 1"])
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # a library may raise anything; without such a variable it is a broken one
            if not (given := given_to_libraries(environment)):
                raise
            raise ConfigError([refusal(name.partition(".")[0], given, error)]) from None


def refusal(library: str, given: Sequence[str], error: Exception) -> str:
    """Name the variables that the traceback shows, or else all that are set."""
    trace = "".join(traceback.format_exception(error))
    names = [name for name in given if name in trace] or given
    why = " ".join(str(error).split())[:200]
    remedy = f"unset {'it, or correct it' if len(names) == 1 else 'them, or correct them'}"
    return f"{', '.join(names)}: {library} cannot be imported ({type(error).__name__}: {why}); {remedy}"


def unimportable(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """The line of `import_all` in a process of its own, which takes seconds if such variables are set."""
    if not given_to_libraries(environment):
        return
    line, env, none = command("configs.libraries"), dict(environment), subprocess.DEVNULL
    with suppress(subprocess.TimeoutExpired):  # on a busy machine; the processes themselves refuse it later
        done = subprocess.run(line, stdin=none, stdout=none, stderr=subprocess.PIPE, env=env, timeout=IMPORT_S)
        if done.returncode == BAD_INPUT:
            yield done.stderr.decode(errors="replace").splitlines()[-1]


def main() -> int:
    """Import the libraries."""
    try:
        import_all()
    except ConfigError as error:
        print_visible(str(error), sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    inner_words()
    sys.exit(main())
