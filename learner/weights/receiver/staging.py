"""A vLLM worker's part of the weights wire: receives buckets in a thread, and a stream, of its own.

Held by the worker extension of `rollout/engine/worker.py`, driven by the front process's `receiver.Receiver`. `full`: into a
staging copy, while generation goes on. `bucket`: there is room for two buckets only; each goes into place as soon as it
is here, and the front process keeps the engine paused meanwhile. The thread waits for the learner, at most the
deadline; when it ends, either way, it tells the front process (`Staged`, over ZeroMQ).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import zmq

from learner.weights.buckets import Buckets, checksum
from learner.weights.channel import Channel, ChannelError, own_stream
from learner.weights.plan import Plan, Spec, dtype_of
from learner.weights.protocol import TO_SERVER, Go, ServerWelcome, Staged, pack, unpack
from learner.weights.sender import files

log = logging.getLogger(__name__)
GIB = 1 << 30
SPARE = GIB
"""GPU memory to leave free beside a staging copy."""
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], float]


class Staging:
    """The staging copy, or pair of buckets, of worker `worker` on `device`. `load` puts what it is given in place."""

    def __init__(self, device: torch.device, worker: int, load: Load) -> None:
        self.device, self.worker, self._load = device, worker, load
        self._snapshot: Buckets | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._version: int | None = None

    def prepare(self, welcome: bytes, wanted: str) -> tuple[str, str]:
        """Make room for what the learner announces; returns the plan's digest, and `full` or `bucket`.

        Raises ValueError where `full` is wanted and does not fit.
        """
        message = unpack(welcome, TO_SERVER)
        assert isinstance(message, ServerWelcome)
        specs = [Spec(tensor.name, tuple(tensor.shape), dtype_of(tensor.dtype)) for tensor in message.tensors]
        plan = Plan.of(specs, message.bucket_bytes)
        before = self._snapshot
        if before is None or before.plan.digest != plan.digest or wanted not in ("auto", _mode(before)):
            before = self._snapshot = self._version = None  # first free, then take
            self._snapshot = Buckets(plan, self.device, rotating=self._rotating(plan, wanted))
        assert self._snapshot is not None
        return plan.digest, _mode(self._snapshot)

    def receive(self, go: bytes, notify: str) -> None:
        """Start to receive; returns at once. Word of the end goes to the socket at `notify`."""
        message = unpack(go, TO_SERVER)
        assert isinstance(message, Go) and self._snapshot is not None
        before = self._thread if self._thread and self._thread.is_alive() else None
        if before:  # it hangs in a group given up
            self.abort()
            if not self._snapshot.rotating:  # let it keep the old buckets to itself
                self._snapshot, before = Buckets(self._snapshot.plan, self.device), None
        if self._snapshot.rotating and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the last step before the pause reads the weights no more
        self._version = None
        args = (message, self._snapshot, self._channel_for(message), notify, before)
        self._thread = threading.Thread(target=self._run, args=args, name="weights", daemon=True)
        self._thread.start()

    def abort(self) -> None:
        """Give up the group, and with it what is being received."""
        if self._channel:
            self._channel.abort()
            self._channel = None

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors of `version`, as views into the staging copy. Raises ValueError unless it was received whole."""
        if self._snapshot is None or self._version != version:
            raise ValueError(f"version {version} is not staged; {self._version} is")
        return self._snapshot.views()

    def _rotating(self, plan: Plan, wanted: str) -> bool:
        if wanted == "bucket" or self.device.type != "cuda":
            return wanted == "bucket"
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        fits = plan.total_bytes + SPARE <= free
        if not fits and wanted == "full":
            raise ValueError(
                f"weights.staging: full takes {plan.total_bytes / GIB:.1f} GiB beside vLLM, {free / GIB:.1f} GiB are "
                "free; lower rollout.engine.gpu_memory_utilization, or set bucket"
            )
        return not fits

    def _channel_for(self, go: Go) -> Channel | None:
        if go.folder:
            return None
        if not self._channel or self._channel.epoch != go.epoch:
            self.abort()
            rank = go.offset + self.worker
            self._channel = Channel(go.host, go.port, go.epoch, rank, go.world, self.device, go.timeout_s)
        return self._channel

    def _run(
        self, go: Go, snapshot: Buckets, channel: Channel | None, notify: str, before: threading.Thread | None
    ) -> None:
        if before:
            before.join(go.timeout_s)
        started, reason, fatal = time.perf_counter(), "", False
        try:
            with own_stream(self.device):
                got = self._take(go, snapshot, channel)
        except ChannelError as error:
            reason = str(error)
        except BaseException as error:  # the thread's boundary: the front process ends the server with it
            log.exception("weights: version %d", go.version)
            reason, fatal = f"{type(error).__name__}: {error}", True
        else:
            reason = disagreement(go, got)
            fatal = bool(reason)
            if not reason and not snapshot.rotating and snapshot is self._snapshot:
                self._version = go.version
        seconds, span_s = time.perf_counter() - started, channel.span_s if channel else 0.0
        tell(
            notify,
            Staged(round=go.round, worker=self.worker, receive_s=seconds, span_s=span_s, reason=reason, fatal=fatal),
        )

    def _take(self, go: Go, snapshot: Buckets, channel: Channel | None) -> list[int]:
        """Receive all buckets, and load them if there is no room to keep them; returns their checksums."""
        if not snapshot.rotating:
            for _ in arrivals(go, snapshot, channel):
                pass
            return snapshot.checksums()
        sums: list[torch.Tensor] = []

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in arrivals(go, snapshot, channel):
                sums.append(checksum(snapshot.buckets[bucket]))
                yield from snapshot.views_of(bucket)

        self._load(arriving())
        return [int(value) for value in torch.stack(sums).tolist()]


def arrivals(go: Go, snapshot: Buckets, channel: Channel | None) -> Iterator[int]:
    """Fill the buckets of `snapshot`; each one's index as it is there. Raises ChannelError."""
    if channel is None:
        yield from files.read(Path(go.folder), snapshot)
    else:
        channel.connect()
        yield from channel.broadcast(snapshot.buckets, 1 if snapshot.rotating else None)


def disagreement(go: Go, sums: list[int]) -> str:
    """The first bucket whose checksum is not the learner's, in words; empty if all agree."""
    for index, (ours, theirs) in enumerate(zip(sums, go.checksums, strict=True)):
        if ours != theirs:
            return f"version {go.version}, bucket {index}: checksum {ours} here, {theirs} at the learner"
    return ""


def tell(notify: str, message: Staged) -> None:
    """Send one message to the front process."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 5000)
        socket.connect(notify)
        socket.send(pack(message))


def _mode(snapshot: Buckets) -> str:
    return "bucket" if snapshot.rotating else "full"
