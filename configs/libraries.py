"""`python -m configs.libraries`: tries torch and transformers, and names environment variables with which they fail.

The process takes seconds, so it runs only if a variable that they read is set: in the checks before a start, and in a
learner or rollout server that somebody starts by hand.
"""

import importlib
import logging
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from configs.entrypoint import ABOVE, BAD_INPUT, DONE, run_and_exit
from configs.inner_command import inner_words
from configs.load import ConfigError
from configs.own_packages import command
from configs.plain_text import print_visible
from configs.variables import given_to_libraries, gloo_here

MODULES = ("torch", "torch.distributed", "torch._dynamo.config", "torch._inductor.config", "transformers.utils")
TRIAL_S, GROUP_S = 180.0, 30


def refuse(environment: Mapping[str, str] = os.environ) -> None:
    """Raise ConfigError if the libraries fail, except in a launched process: its launcher has tried them."""
    if ABOVE not in environment and (lines := list(unusable(environment))):
        raise ConfigError(lines)


def unusable(environment: Mapping[str, str] = os.environ) -> Iterator[str]:
    """One line if the libraries fail with the variables in `environment`, else none."""
    if not (given := given_to_libraries(environment)):
        return
    line, env, none = command("configs.libraries"), dict(environment), subprocess.DEVNULL
    with suppress(subprocess.TimeoutExpired):  # on a busy machine
        done = subprocess.run(line, stdin=none, stdout=none, stderr=subprocess.PIPE, env=env, timeout=TRIAL_S)
        said = done.stderr.decode(errors="replace").splitlines()
        if done.returncode == BAD_INPUT:
            yield said[-1]
        elif done.returncode < 0:
            aborts = f"the process that tried it was ended by signal {-done.returncode}"
            why = "it hangs" if done.returncode == -signal.SIGALRM else aborts
            yield in_words(given, f"torch or transformers cannot be used ({why})")


def use_all(modules: Sequence[str] = MODULES, environment: Mapping[str, str] = os.environ) -> None:
    """Import the libraries and form a group of one rank. Raises ConfigError if a variable is the cause."""
    if sys.flags.optimize > 1:
        problem = f"PYTHONOPTIMIZE: {sys.flags.optimize} (python -OO) leaves out docstrings, which transformers reads"
        raise ConfigError([f"{problem}; unset it, or set 1"])
    try:
        for name in modules:
            importlib.import_module(name)
        if "torch.distributed" in modules:
            distributed: Any = sys.modules["torch.distributed"]
            gloo_here()
            signal.alarm(GROUP_S)  # ends this process if C++ never returns
            distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    except Exception as error:  # a library may raise anything; without such a variable it is a broken one
        if not (given := given_to_libraries(environment)):
            raise
        trace = "".join(traceback.format_exception(error))
        names = [name for name in given if name in trace] or given
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        raise ConfigError([in_words(names, f"torch or transformers cannot be used ({why})")]) from None


def in_words(names: Sequence[str], problem: str) -> str:
    remedy = "unset it, or correct it" if len(names) == 1 else "unset them, or correct them"
    return f"{', '.join(names)}: {problem}; {remedy}"


def main(argv: Sequence[str]) -> int:
    try:
        use_all()
    except ConfigError as error:
        print_visible(str(error), sys.stderr)
        return BAD_INPUT
    return DONE


if __name__ == "__main__":
    inner_words()
    run_and_exit(main, logging.getLogger("configs"))
