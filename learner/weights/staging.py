"""A vLLM worker's part of the weights wire: receives buckets into a staging copy, in a thread, while generation goes
on.

Held by the worker extension of `rollout/worker.py`, driven by the front process's `receiver.Receiver`. The thread
waits for the learner's broadcast, at most the deadline; when it ends, either way, it tells the front process
(`Staged`, over ZeroMQ).
"""

import logging
import threading
import time
from collections.abc import Iterator

import torch
import zmq

from learner.weights.channel import Channel, ChannelError, own_stream
from learner.weights.plan import Plan, Spec, dtype_of
from learner.weights.protocol import TO_SERVER, Go, Staged, Welcome, pack, unpack
from learner.weights.snapshot import Snapshot, checksum

log = logging.getLogger(__name__)


class Staging:
    """The staging copy of worker `worker` on `device`."""

    def __init__(self, device: torch.device, worker: int) -> None:
        self.device, self.worker = device, worker
        self._snapshot: Snapshot | None = None
        self._channel: Channel | None = None
        self._thread: threading.Thread | None = None
        self._version: int | None = None

    def prepare(self, welcome: bytes) -> str:
        """Make room for what the learner announces; returns the digest of the plan."""
        message = unpack(welcome, TO_SERVER)
        assert isinstance(message, Welcome)
        specs = [Spec(tensor.name, tuple(tensor.shape), dtype_of(tensor.dtype)) for tensor in message.tensors]
        plan = Plan.of(specs, message.bucket_bytes)
        if self._snapshot is None or self._snapshot.plan.digest != plan.digest:
            self._snapshot, self._version = None, None  # first free, then take
            self._snapshot = Snapshot(plan, self.device)
        return plan.digest

    def receive(self, go: bytes, notify: str) -> None:
        """Start to receive; returns at once. Word of the end goes to the socket at `notify`."""
        message = unpack(go, TO_SERVER)
        assert isinstance(message, Go) and self._snapshot is not None
        if self._thread and self._thread.is_alive():  # stuck in a group given up: it keeps the old buckets to itself
            self.abort()
            self._snapshot = Snapshot(self._snapshot.plan, self.device)
        self._version = None
        args = (message, self._snapshot, self._channel_for(message), notify)
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

    def _channel_for(self, go: Go) -> Channel:
        if not self._channel or self._channel.epoch != go.epoch:
            self.abort()
            rank = go.offset + self.worker
            self._channel = Channel(go.host, go.port, go.epoch, rank, go.world, self.device, go.timeout_s)
        return self._channel

    def _run(self, go: Go, snapshot: Snapshot, channel: Channel, notify: str) -> None:
        started, reason, fatal = time.perf_counter(), "", False
        try:
            with own_stream(self.device):
                channel.connect()
                sums = [checksum(snapshot.buckets[index]) for index in channel.broadcast(snapshot.buckets)]
                got = torch.stack(sums).tolist()
        except ChannelError as error:
            reason = str(error)
        else:
            reason = disagreement(go, got)
            fatal = bool(reason)
            if not reason and snapshot is self._snapshot:
                self._version = go.version
        seconds = time.perf_counter() - started
        tell(notify, Staged(round=go.round, worker=self.worker, receive_s=seconds, reason=reason, fatal=fatal))


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
