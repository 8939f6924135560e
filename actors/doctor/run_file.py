"""Judges a run file on this machine: by `configs.checks`, and by rules that need the data, sockets, GPUs or vLLM.

Used by `findings.py` and by `actors/supervise/launch.py` before it starts anything. Waits for nothing.
"""

import socket
from collections.abc import Iterator

from buffer.curve import split
from configs.checks import check
from configs.load import ConfigError
from configs.schema import Config


def check_here(config: Config) -> int | None:
    """The number of problems in data.train, None without that file. Raises ConfigError with all that is wrong."""
    further: list[str] = []
    problems = None
    if config.data.train.is_file():  # if not, `check` says so
        from buffer.problems import load_problems  # imports pyarrow, which is slow

        try:
            problems = len(load_problems(config.data.train, config.data))
        except ConfigError as error:
            further += error.problems
    if config.rollout.engine:
        from rollout.engine.arguments import problems as engine_problems

        further += engine_problems(config.rollout.engine, config)
    check(config, problems=problems, further=[*further, *_port(config.buffer.address)])
    return problems


def gpus_needed(config: Config, available: int) -> dict[str, int]:
    """GPUs that the run takes if there are so many `available`: with none, the device `auto` means CPU.

    Example: `{"learner": 2, "servers": 4}`
    """
    learner, rollout = config.learner, config.rollout
    needed = {"learner": learner.ranks, "servers": rollout.servers * rollout.tensor_parallel}
    devices = {"learner": learner.device, "servers": rollout.device}
    return {
        name: gpus if devices[name] == "cuda" or (devices[name] == "auto" and available) else 0
        for name, gpus in needed.items()
    }


def gpus_missing(config: Config, available: int, where: str) -> str | None:
    """What is wrong if the run takes more GPUs than `available`; `where` introduces that number, as in `Ray sees`."""
    needed = gpus_needed(config, available)
    total = sum(needed.values())
    if total <= available:
        return None
    parts = ", ".join(f"{name} {gpus}" for name, gpus in needed.items() if gpus)
    return f"the run needs {total} GPUs ({parts}), {where} {available}"


def _port(address: str) -> Iterator[str]:
    host, port = split(address)
    if port == "*":
        yield f"buffer.address: {address} leaves the port open, but all processes must know it; name one"
        return
    try:
        family, _, _, _, here = socket.getaddrinfo(None if host == "*" else host, int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
            trial.bind(here)
    except OSError as error:
        yield f"buffer.address: cannot listen on {address}: {error.strerror}; see `ss -ltnp`, or name another port"
