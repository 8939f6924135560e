"""The process group of a broadcast: a learner rank and all workers of some servers.

`connect` and `broadcast` wait at most `timeout_s` and raise ChannelError; `abort`, from another thread, ends them early
over NCCL. A channel that failed is useless: the next one has a new epoch. Why its kernels cannot deadlock with training
and generation: docs/design/weights-wire.md.
"""

import asyncio
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")
c10d: Any = dist  # torch exports no types of these classes
AHEAD = 3
"""Broadcasts queued beyond the one waited for, between CPUs. Between GPUs all are queued at once: calls from Python
contend for the GIL."""
NCCL_SETTINGS = {
    "TORCH_NCCL_BLOCKING_WAIT": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
}
"""A wait ends with an error at its timeout, and torch does not end the process."""


class ChannelError(RuntimeError):
    """The group did not form, broke or timed out. `absent`: missing ranks."""

    def __init__(self, what: str, absent: Sequence[int] = ()) -> None:
        super().__init__(what)
        self.absent = absent


class Rendezvous:
    """The TCPStore at which a group's ranks meet."""

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
    """Rank `rank` of `world`. Rank 0 sends: learner rank `root`."""

    def __init__(
        self,
        host: str,
        port: int,
        epoch: int,
        rank: int,
        world: int,
        device: torch.device,
        timeout_s: float,
        root: int = 0,
    ) -> None:
        self.root = root
        self.epoch, self.rank, self.world, self.device = epoch, rank, world, device
        self._host, self._port, self.timeout = host, port, timedelta(seconds=timeout_s)
        self.span_s = 0.0
        self._group: dist.ProcessGroup | None = None
        self.aborted = False

    def open_store(self) -> Any:
        try:
            return c10d.TCPStore(self._host, self._port, is_master=False, wait_for_workers=False, timeout=self.timeout)
        except RuntimeError as error:
            raise ChannelError(f"group {self.epoch} of {self.world} ranks did not form: {error}") from None

    def connect(self, store: Any = None) -> None:
        if self._group is not None:
            return
        store = store or self.open_store()
        try:
            prefixed = c10d.PrefixStore(f"weights/{self.epoch}/{self.root}", store)
            prefixed.set(f"here/{self.rank}", "")  # NCCL would wait for ever for an absent rank
            self._meet(prefixed)
            make = self._nccl if self.device.type == "cuda" else self._gloo
            self._group = make(prefixed)
        except ChannelError:
            raise
        except RuntimeError as error:
            raise ChannelError(f"group {self.epoch} of {self.world} ranks did not form: {error}") from None
        if self.aborted:
            self.abort()

    def _meet(self, store: Any) -> None:
        keys = [f"here/{rank}" for rank in range(self.world)]
        try:
            store.wait(keys, self.timeout)
        except RuntimeError as error:
            absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
            raise ChannelError(f"group {self.epoch} of {self.world} ranks did not form: {error}", absent) from None

    def broadcast(self, buckets: Sequence[torch.Tensor], ahead: int | None = None) -> Iterator[int]:
        return broadcast_in_turn([(self, bucket) for bucket in buckets], ahead)

    def group(self) -> Any:
        if self._group is None or self.aborted:
            raise ChannelError(f"group {self.epoch} was given up")
        return self._group

    def abort(self) -> None:
        self.aborted = True
        group, self._group = self._group, None
        if group is None:
            return
        if self.device.type == "cuda":  # may take seconds
            threading.Thread(target=_end, args=(group,), name="weights-abort", daemon=True).start()
        else:
            _end(group)

    def _gloo(self, store: Any) -> Any:
        options = c10d.ProcessGroupGloo._Options()
        options._timeout = self.timeout
        options._devices = [c10d.ProcessGroupGloo.create_device(hostname=own_address(self._host, self._port))]
        return c10d.ProcessGroupGloo(store, self.rank, self.world, options)

    def _nccl(self, store: Any) -> Any:
        options = c10d.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = self.timeout
        with _environment(NCCL_SETTINGS):
            group = c10d.ProcessGroupNCCL(store, self.rank, self.world, options)
        try:
            group.eager_connect_single_device(self.device)
        except RuntimeError:
            _end(group)
            del group  # the exception keeps this frame
            raise
        return group


class WorkerChannels:
    """A worker's groups with all sending ranks. One thread issues all broadcasts in the same order on every worker:
    NCCL allows no other use of several groups."""

    def __init__(self, channels: Sequence[Channel]) -> None:
        self._channels, self.epoch, self._formed = channels, channels[0].epoch, False

    def connect(self) -> None:
        store = None if self._formed else self._channels[0].open_store()
        for channel in self._channels:
            channel.connect(store)
            if channel.aborted:
                raise ChannelError(f"group {self.epoch} was given up")
        self._formed = True

    def broadcast(
        self, buckets: Sequence[torch.Tensor], ahead: int | None = None, roots: Sequence[int] | None = None
    ) -> Iterator[int]:
        of = [self._channels[root] for root in roots or [0] * len(buckets)]
        return broadcast_in_turn(list(zip(of, buckets, strict=True)), ahead)

    def abort(self) -> None:
        """Over NCCL each in a thread of its own: an abort waits for kernels that may wait for another group."""
        for channel in self._channels:
            channel.abort()

    @property
    def span_s(self) -> float:
        return self._channels[0].span_s


def broadcast_in_turn(messages: Sequence[tuple[Channel, torch.Tensor]], ahead: int | None = None) -> Iterator[int]:
    """Send (rank 0) or fill (other ranks) the buckets in `messages`, each over its channel, at most `ahead` beyond the
    one yielded.

    Yields the index of each complete bucket; on a GPU it is complete for what this thread's stream does next, and for
    everybody at the end. The next step may fill its memory again: with `ahead` 1 two buffers are enough.
    """
    if not messages:  # a rank without rows, for which no worker waits
        return
    channels = list(dict.fromkeys(channel for channel, _ in messages))
    # so that this thread destroys them, which takes a while
    groups = [channel.group() for channel in channels]
    device, timeout, (epoch, world) = channels[0].device, channels[0].timeout, (channels[0].epoch, channels[0].world)
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor, options.timeout = 0, 0, timeout
    on_gpu = device.type == "cuda"
    ahead = (len(messages) if on_gpu else AHEAD) if ahead is None else ahead
    works: deque[dist.Work] = deque()
    last: dict[int, dist.Work] = {}
    work: dist.Work | None = None
    group: Any = None
    try:
        for group in groups:
            group.allreduce([torch.zeros(1, device=device)]).wait(timeout)
        started = time.perf_counter()
        for index, (channel, bucket) in enumerate(messages):
            at = channels.index(channel)
            last[at] = groups[at].broadcast([bucket], options)
            works.append(last[at])
            if len(works) > ahead:
                work = works.popleft()
                work.block_current_stream() if on_gpu else work.wait(timeout)
                yield index - ahead
        for work in last.values() if on_gpu else works:  # a group's stream keeps the order of its works
            work.block_current_stream() if on_gpu else work.wait(timeout)
        for channel in channels:
            channel.span_s = time.perf_counter() - started
        yield from range(len(messages) - len(works), len(messages))
        for work in last.values() if on_gpu else ():  # once, after the caller has queued its use of them
            work.wait(timeout)
        for channel in channels if on_gpu else ():
            channel.span_s = time.perf_counter() - started
    except RuntimeError as error:
        raise ChannelError(f"group {epoch} of {world} ranks broke: {error}") from None
    finally:  # an exception keeps this frame alive, perhaps in another thread
        group = work = None
        groups.clear()
        works.clear()
        last.clear()
    if any(channel.aborted for channel in channels):  # an abort ends kernels, which looks like success
        raise ChannelError(f"group {epoch} was given up")


def _end(group: Any) -> None:
    with suppress(RuntimeError):
        group.abort()


def backend_of(device: torch.device) -> str:
    """`nccl` for a GPU, `gloo` for a CPU."""
    return "nccl" if device.type == "cuda" else "gloo"


@contextmanager
def own_stream(device: torch.device) -> Iterator[None]:
    """Run this thread's GPU work on its own stream, complete at the end."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_device(device)
    stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        yield
    stream.synchronize()


def in_thread(work: Callable[[], T], name: str) -> asyncio.Future[T]:
    """Run `work` in a daemon thread: one stuck in a collective does not block the exit."""

    def run(future: Future[T]) -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)
        # avoids a cycle: the error refers to this frame
        del future

    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    threading.Thread(target=run, args=(future,), name=name, daemon=True).start()
    return asyncio.wrap_future(future)


def own_address(host: str, port: int) -> str:
    """This machine's address on the route to `host`."""
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
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
