"""`python -m actors launch RUN.yaml [MORE.yaml ...] [--section.key=value ...]`: a whole run, from check to report.

Checks everything first (config, files, the data's columns, the buffer's port, GPUs), says what the run will do, then
places a keeper for each process (`actors/supervise/ray_cluster.py`) and waits for their news (`actors/supervise/supervisor.py`). The run ends when the
learner does. Started by `actors/__main__.py` under a guard, so that nothing outlives it.
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from actors.supervise.keeper import BAD_INPUT, Process, Role
from actors.supervise.ray_cluster import Ray
from actors.supervise.supervisor import Supervisor
from actors.watch.display import Display
from buffer.wire.curve import KeysError, is_loopback, make_keys, split
from configs.checks import check
from configs.explain import explain
from configs.load import ConfigError, read, write
from configs.schema import Config

ACCELERATORS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Ray hands these out, so a process gets them from its keeper and not from the launcher."""


def main(argv: Sequence[str]) -> int:
    """Exit code: 0 when the learner is done, 2: bad input, 1: a process cannot be kept, 128 + N: signal N."""
    with_report = "--no-report" not in argv
    argv = [word for word in argv if word != "--no-report"]
    config = read(argv, "python -m actors launch")
    problems: int | None = None
    try:
        problems, wrong = _problems(config)
        check(config, problems=problems, further=[*wrong, *_port(config.buffer.address)])
        prepare(config)
    except (ConfigError, KeysError) as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    logging.getLogger("buffer").setLevel(logging.ERROR)  # the display tells when the buffer does not answer
    display = Display(config)
    for line in explain(config, problems):
        display.say(line)
    code = keep(processes(config), display)
    if with_report and code == 0 and (config.run.path / "metrics.jsonl").exists():
        from actors.report import summary  # matplotlib, likewise at the end only

        summary.main([str(config.run.path)])
    return code


def prepare(config: Config) -> Path:
    """Make the run's folder, the keys it needs and the config file that every process reads. Returns the file."""
    file = config.run.path / "config.yaml"
    write(config, file)
    if not is_loopback(config.buffer.address):
        make_keys(config.run.path / "keys")
    return file


def processes(config: Config) -> list[Process]:
    """The processes of a run; each with the GPUs it takes if there are any."""
    run, learner, rollout = config.run.path, config.learner, config.rollout
    file = str(run / "config.yaml")
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_") and key not in ACCELERATORS}

    def process(name: str, role: Role, words: Sequence[str] = (), gpus: int = 0, drain_s: float = 30.0) -> Process:
        argv = (sys.executable, "-m", role, file, *words)
        return Process(name, role, argv, run / "logs" / f"{name}.log", os.getcwd(), env, gpus, drain_s)

    return [
        process("buffer", "buffer"),
        process("learner", "learner", gpus=0 if learner.device == "cpu" else learner.ranks, drain_s=learner.timeout_s),
        *(
            process(name, "rollout", ["--name", name], 0 if rollout.device == "cpu" else rollout.tensor_parallel)
            for name in (f"rollout-{number}" for number in range(rollout.servers))
        ),
    ]


def keep(processes: Sequence[Process], display: Display) -> int:
    """Keep `processes` until the run ends; the exit code. Tests call it with commands of their own."""
    with display.shown(), Ray() as ray:
        roles = {"learner": display.config.learner.device, "rollout": display.config.rollout.device}
        must = [role for role, device in roles.items() if device == "cuda"]
        if wrong := gpus_missing(processes, ray.gpus(), must):
            print(wrong, file=sys.stderr)
            return BAD_INPUT
        return asyncio.run(_keep([_on(process, ray.gpus()) for process in processes], display, ray))


async def _keep(processes: Sequence[Process], display: Display, ray: Ray) -> int:
    watching = asyncio.create_task(display.watch())
    try:
        return await Supervisor(processes, ray.place, display.tell, display.say).go()
    finally:
        watching.cancel()
        display.refresh()


def _problems(config: Config) -> tuple[int | None, list[str]]:
    """How many problems data.train has, and what is wrong with it; a missing file is `check`'s to tell."""
    if not config.data.train.is_file():
        return None, []
    from buffer.problems import load_problems  # pyarrow: slow to import, and wanted here only

    try:
        return len(load_problems(config.data.train, config.data)), []
    except ConfigError as error:
        return None, list(error.problems)


def _on(process: Process, gpus: int) -> Process:
    """Without GPUs, `auto` means CPU."""
    return process if gpus else replace(process, gpus=0)


def gpus_missing(processes: Sequence[Process], there: int, must: Sequence[str] = ()) -> str | None:
    """What is wrong with the GPUs the processes take: there are too few, or none and some role `must` have them."""
    wanted = sum(process.gpus for process in processes)
    if wanted <= there or (not there and not must):
        return None
    parts = ", ".join(f"{process.name} {process.gpus}" for process in processes if process.gpus)
    remedy = "lower learner.ranks, rollout.servers or rollout.tensor_parallel, or set their device to cpu"
    return f"the run takes {wanted} GPUs ({parts}) and Ray sees {there}: {remedy}"


def _port(address: str) -> Iterator[str]:
    """What is wrong with listening on `address`."""
    host, port = split(address)
    if port == "*":
        yield f"buffer.address: {address} leaves the port open, but all processes must know it; name one"
        return
    where = socket.getaddrinfo(None if host == "*" else host, int(port), type=socket.SOCK_STREAM)[0]
    with socket.socket(where[0]) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as ZeroMQ does
        try:
            trial.bind(where[4])
        except OSError as error:
            yield f"buffer.address: cannot listen on {address}: {error.strerror}; see `ss -ltnp`, or name another port"
