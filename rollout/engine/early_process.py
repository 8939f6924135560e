"""Starts vLLM's engine process early, so that its imports and the server's run in parallel.

    server                                          early process
    EarlyProcess(cpu)       -- starts ----------->  imports vLLM's engine, then waits for its task
    reads rows, imports vLLM, waits for the buffer
    vLLM starts its engine  -- the process's task, environment and files -->  becomes vLLM's engine process

It is a new program, not a fork, so it shares no CUDA state with the server. It ends with the server.
"""

import gc
import io
import json
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import popen_forkserver, popen_spawn_posix, reduction, resource_tracker, spawn
from multiprocessing.context import SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, NoReturn

from configs.entrypoint import PARENT, blocked, tied_line, without_collections
from configs.schema import Config
from rollout.engine.arguments import environment
from rollout.engine.door.leant_on import ENGINE_TARGET
from rollout.engine.start_failure import report_final_failures
from rollout.errors import EngineDead

log = logging.getLogger("rollout")
ENGINE_MODULES = ("rollout.engine.door.vllm_core", "rollout.engine.worker", "rollout.engine.scheduling.scheduler")
ON_GPU = ("rollout.engine.door.vllm_core_gpu",)
HEADER_BYTES, MOST_FILES = 8, 250
THREADS = "OMP_NUM_THREADS"
GPU_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")


class EarlyProcess:
    """Becomes the first engine process that vLLM starts inside `given_to_vllm`. `close` ends an unused one. `cpu`:
    whether the server will run on the CPU. `target`: name of the function that vLLM's process runs."""

    def __init__(self, cpu: bool, target: str = ENGINE_TARGET, modules: Sequence[str] = ENGINE_MODULES) -> None:
        self.cpu, self._target, self._taken = cpu, target, False
        self.socket, theirs = socket.socketpair()
        line = tied_line(f"from {__name__} import wait_for_task; wait_for_task({theirs.fileno()}, {modules!r})")
        # SIGTERM stays blocked, as in all processes of vLLM, and SIGINT until it is ignored
        with theirs, blocked(signal.SIGTERM, signal.SIGINT):
            given = environment(cpu) | os.environ
            self.child = subprocess.Popen(line, pass_fds=[theirs.fileno()], env=given)

    @classmethod
    def of(cls, config: Config) -> "EarlyProcess | None":
        """Return None if vLLM starts its own in another way."""
        if config.rollout.engine.get("numa_bind"):
            return None
        cpu = expects_cpu(config.rollout.device)
        return cls(cpu, modules=ENGINE_MODULES if cpu else ENGINE_MODULES + ON_GPU)

    @contextmanager
    def given_to_vllm(self, cpu: bool) -> Iterator[None]:
        """Make this process vLLM's next engine process; end it if vLLM starts none."""
        if cpu != self.cpu:
            self.close()
            yield
            return
        spawning: Any = SpawnProcess
        spawned = spawning._Popen

        def started(process: BaseProcess) -> popen_spawn_posix.Popen:
            target = getattr(getattr(process, "_target", None), "__qualname__", "")
            if target != self._target or self._taken:
                return spawned(process)  # type: ignore[no-any-return]
            handed = HandedOver(process, self)
            self._taken = True
            return handed

        spawning._Popen = staticmethod(started)
        try:
            yield
        finally:
            spawning._Popen = staticmethod(spawned)
            self.close()

    def close(self) -> None:
        """End the process, unless it is vLLM's."""
        if not self._taken:
            self._taken = True
            self.child.kill()
            self.child.wait()
            self.socket.close()

    def __enter__(self) -> "EarlyProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def expects_cpu(device: str, given: Mapping[str, str] = os.environ) -> bool:
    """Whether a server will run on the CPU, decided without torch, whose import takes seconds."""
    if device != "auto":
        return device == "cpu"
    hidden = given.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1")
    return hidden or not any(Path(file).exists() for file in GPU_FILES)


class HandedOver(popen_spawn_posix.Popen):
    """The early process, for multiprocessing."""

    DupFd: ClassVar[Any] = popen_forkserver._DupFd
    _fds: list[int]

    def __init__(self, process: BaseProcess, early: EarlyProcess) -> None:
        self._early = early
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        """Send the file too; return its index in the child's inherited files."""
        self._fds.append(fd)
        return len(self._fds) - 1

    def poll(self, flag: int = os.WNOHANG) -> int | None:
        self.returncode = self._early.child.poll() if flag == os.WNOHANG else self._early.child.wait()
        return self.returncode

    def _launch(self, process: BaseProcess) -> None:
        task, link, tracker = io.BytesIO(), self._early.socket, resource_tracker._resource_tracker.getfd()
        assert tracker is not None
        prepared = spawn.get_preparation_data(process.name)
        for key in ("init_main_from_name", "init_main_from_path"):  # vLLM needs nothing of the server's `__main__`
            prepared.pop(key, None)
        set_spawning_popen(self)
        try:
            reduction.dump(prepared, task)
            reduction.dump(process, task)
        finally:
            set_spawning_popen(None)
        variables = json.dumps(dict(os.environ)).encode()
        try:
            socket.send_fds(link, [len(variables).to_bytes(HEADER_BYTES)], [tracker, *self._fds])
            link.sendall(variables + task.getbuffer())
        except (BrokenPipeError, ConnectionResetError) as error:
            code = self._early.child.wait()
            link.close()
            reason = (
                f"vLLM's engine process ended with exit code {code} before it had work; its last log lines are above"
            )
            raise EngineDead(reason) from error
        self.pid, self.sentinel = self._early.child.pid, link.detach()
        self.finalizer = Finalize(self, os.close, (self.sentinel,))


def wait_for_task(file: int, modules: Sequence[str]) -> NoReturn:
    """Import `modules`, then become the process that arrives on `file`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server gets it too, and ends this process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])
    before = dict(os.environ)
    import_all(modules)
    with socket.socket(fileno=file) as link:
        header, files, *_ = socket.recv_fds(link, HEADER_BYTES, MOST_FILES)
        if not header:
            os._exit(0)  # the server ended
        variables = json.loads(read_exactly(link, int.from_bytes(header)))
        take_environment(variables, before)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of a start that Ctrl-C ends
        resource_tracker._resource_tracker._fd, *inherited = files  # type: ignore[attr-defined]
        popen_forkserver.forkserver._forkserver._inherited_fds = inherited  # type: ignore[attr-defined]
        report_final_failures()
        sys.exit(spawn._main(link.detach(), os.dup(file)))  # type: ignore[attr-defined]


def import_all(modules: Sequence[str]) -> None:
    """Import `modules`. Failures are only logged: vLLM imports the module again and reports the error."""
    with without_collections():
        for name in modules:
            try:
                import_module(name)
            except Exception as error:
                log.warning("%s cannot be imported early: %s: %s", name, type(error).__name__, error)
    gc.freeze()


def read_exactly(link: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            os._exit(0)  # the server ended
        data += more
    return bytes(data)


def take_environment(given: Mapping[str, str], before: Mapping[str, str]) -> None:
    """Replace the variables of `before` by the server's; keep what vLLM set here."""
    own, threads = os.environ.get(PARENT), os.environ.get(THREADS)
    for name in before.keys() - given.keys():
        os.environ.pop(name, None)
    os.environ.update(given)
    if own is not None:
        os.environ[PARENT] = own
    if given.get(THREADS, threads) != threads:  # OpenMP has read the variable
        import torch

        torch.set_num_threads(int(given[THREADS].split(",")[0]))  # one number for each level of nesting
