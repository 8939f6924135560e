"""The group that weights are broadcast over: learner rank 0 and every worker of some servers. gloo on CPU, NCCL on GPU.

A `Channel` is a process group of its own over the learner's `Rendezvous`; the default process group of either side is not
touched. `connect` waits until all ranks came, `broadcast` until all buckets are through, both at most `timeout_s`;
`abort`, from another thread, ends them early over NCCL (gloo runs into its timeout). After a failure a channel is of
no use: the next has a new epoch. Sender and workers run it in threads and on streams of their own, so neither training
nor generation waits. Why its kernels cannot deadlock with those of training or generation: docs/weights.md.
"""

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
c10d: Any = dist  # torch lists these classes nowhere that a type checker looks
AHEAD = 3
"""Buckets under way beyond the one waited for, between CPUs. Between GPUs all are queued at once and waited for once:
the fewer calls from Python, the less this thread contends with the one that trains or generates."""
NCCL_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""A wait returns at its deadline with an error, and a failure of this group is ours to handle: torch must not end the
process."""


class ChannelError(RuntimeError):
    """The group could not be formed, or broke, or took too long. Build another one."""


class Rendezvous:
    """The learner's end of the rendezvous: a TCPStore that listens on `host` only."""

    def __init__(self, host: str, timeout_s: float) -> None:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        with socket.create_server((host, 0), family=family) as listener:
            self.host, self.port = host, int(listener.getsockname()[1])
            listener.setblocking(False)
            self._store = c10d.TCPStore(
                host,
                self.port,
                is_master=True,
                wait_for_workers=False,
                timeout=timedelta(seconds=timeout_s),
                master_listen_fd=listener.detach(),
            )


class Channel:
    """Rank `rank` of `world` ranks around the store at `host:port`; rank 0 sends."""

    def __init__(
        self, host: str, port: int, epoch: int, rank: int, world: int, device: torch.device, timeout_s: float
    ) -> None:
        self.epoch, self.rank, self.world, self.device = epoch, rank, world, device
        self._host, self._port, self._timeout = host, port, timedelta(seconds=timeout_s)
        self.span_s = 0.0
        """Of the last broadcast, by this host's clock: from when all ranks were there until all buckets were here."""
        self._group: dist.ProcessGroup | None = None
        self._aborted = False

    def connect(self) -> None:
        """Form the group unless it stands. Raises ChannelError."""
        if self._group is not None:
            return
        try:
            store = c10d.TCPStore(
                self._host, self._port, is_master=False, wait_for_workers=False, timeout=self._timeout
            )
            prefixed = c10d.PrefixStore(f"weights/{self.epoch}", store)
            prefixed.set(f"here/{self.rank}", "")  # NCCL would wait without end for one who never comes
            prefixed.wait([f"here/{rank}" for rank in range(self.world)], self._timeout)
            make = self._nccl if self.device.type == "cuda" else self._gloo
            self._group = make(prefixed)
        except RuntimeError as error:
            raise ChannelError(f"group {self.epoch} of {self.world} ranks did not form: {error}") from None
        if self._aborted:
            self.abort()

    def broadcast(self, buckets: Sequence[torch.Tensor], ahead: int | None = None) -> Iterator[int]:
        """Send (rank 0) or fill (others) `buckets`, at most `ahead` beyond the one yielded. Raises ChannelError.

        Waits for all ranks first, so that `span_s` is of the buckets only. Yields the index of each that is through:
        on a GPU, for whatever this thread's stream does next. All are through for certain when this is exhausted.
        """
        group = self._group  # held here, so that its end, which may take a while, is this thread's affair
        if group is None or self._aborted:
            raise ChannelError(f"group {self.epoch} was given up")
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        on_gpu = self.device.type == "cuda"
        ahead = (len(buckets) if on_gpu else AHEAD) if ahead is None else ahead
        works: deque[dist.Work] = deque()
        work: dist.Work | None = None
        try:
            group.allreduce([torch.zeros(1, device=self.device)]).wait(self._timeout)
            started = time.perf_counter()
            for index, bucket in enumerate(buckets):
                works.append(group.broadcast([bucket], options))
                if len(works) > ahead:
                    work = works.popleft()
                    work.block_current_stream() if on_gpu else work.wait(self._timeout)
                    yield index - ahead
            for work in [works[-1]] if on_gpu else works:  # a GPU's stream keeps their order
                work.wait(self._timeout)
            yield from range(len(buckets) - len(works), len(buckets))
        except RuntimeError as error:
            raise ChannelError(f"group {self.epoch} of {self.world} ranks broke: {error}") from None
        finally:  # an error keeps this frame, and its last holder may be another thread
            group = work = None
            works.clear()
        if self._aborted:  # which ends the kernels too, and so looks like success
            raise ChannelError(f"group {self.epoch} was given up")
        self.span_s = time.perf_counter() - started

    def abort(self) -> None:
        """Give the group up; whoever waits in it gets a ChannelError, at the latest when the timeout is over."""
        self._aborted = True
        group, self._group = self._group, None
        if group is None:
            return
        if self.device.type == "cuda":  # it may take seconds, and the caller has an engine or an event loop to run
            threading.Thread(target=_end, args=(group,), name="weights-abort", daemon=True).start()
        else:
            _end(group)

    def _gloo(self, store: Any) -> Any:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = self._timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=_own_address(self._host, self._port))]
        return c10d.ProcessGroupGloo(store, self.rank, self.world, options)

    def _nccl(self, store: Any) -> Any:
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self._timeout
        with _environment(NCCL_SETTINGS):
            group = c10d.ProcessGroupNCCL(store, self.rank, self.world, options)
        try:
            group.eager_connect_single_device(self.device)
        except RuntimeError:
            _end(group)
            del group  # as in `broadcast`
            raise
        return group


def _end(group: Any) -> None:
    with suppress(RuntimeError):  # it may be broken already, which is why it is given up
        group.abort()


def backend_of(device: torch.device) -> str:
    """`nccl` for a GPU, `gloo` for a CPU."""
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Within it, this thread's GPU work runs beside everybody else's, and is complete at the end. Nothing on a CPU."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a daemon thread: unlike an executor's, one that is stuck in a collective does not hold up the
    exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.cancelled():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # handed on to whoever awaits, whatever it is
            error = raised
        with suppress(RuntimeError):  # the loop may be over by now
            loop.call_soon_threadsafe(settle, result, error)
        del error  # it holds this frame: what the frames hold is to go with this thread, not when garbage is collected

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def _own_address(host: str, port: int) -> str:
    """This machine's address on the way to `host`: where the others find this rank."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


@contextmanager
def _environment(settings: dict[str, str]) -> Iterator[None]:
    before = {key: os.environ.get(key) for key in settings}
    os.environ.update(settings)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value
