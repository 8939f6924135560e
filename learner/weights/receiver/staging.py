"""A vLLM worker's end of the weights wire: receives buckets in a thread, on its own CUDA stream.

The mode is `weights.staging` (docs/design/weights-wire.md): `full` receives into a copy of all weights, `slices` into a
copy of what this worker loads, both while generation goes on; `bucket` loads each bucket as it arrives, while the
engine is paused. The thread waits at most Go's timeout, and reports when it ends (`Staged`).

Only `prepare` allocates: a round waits until the buckets of a broken one are free, so recovery needs no memory.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

import torch
import zmq

from configs.publishing import GROUP_BYTES
from learner.weights.buckets import Buckets, checksum
from learner.weights.channel import Channel, ChannelError, WorkerChannels, own_stream
from learner.weights.plan import Plan, Spec, dtype_of
from learner.weights.protocol import TO_SERVER, Go, ServerWelcome, Staged, pack, unpack
from learner.weights.rows import receive, scratch_bytes
from learner.weights.sender import files
from learner.weights.slices import Region, Regions, SlicedCopy, arrival_bytes, staged_bytes

log = logging.getLogger(__name__)
GIB = 1 << 30
SPARE = GIB
Load = Callable[[Iterator[tuple[str, torch.Tensor]]], None]
FindRegions = Callable[[Sequence[Spec], Collection[str]], Regions]


def whole_tensors(specs: Sequence[Spec], frozen: Collection[str]) -> Regions:
    """For a worker that loads whole tensors only."""
    return Regions(problem="its loader takes whole tensors")


class Receipt:
    """One round, received over `channel` or, without one, from files."""

    def __init__(self, go: Go, weights: Buckets, channel: WorkerChannels | None) -> None:
        self.go, self.channel = go, channel
        self.over = threading.Event()
        """The thread no longer uses buckets or group."""
        self._weights: Buckets | None = weights
        self._begun, self._given_up, self._lock = False, False, threading.Lock()

    def begin(self) -> Buckets:
        if self.channel:
            self.channel.connect()
        with self._lock:
            if self._given_up or self._weights is None:
                raise ChannelError(f"round {self.go.round} was given up")
            self._begun = True
            return self._weights

    def end(self) -> None:
        self._weights = None
        self.over.set()

    def give_up(self) -> None:
        """A thread that has not begun never fills the buckets."""
        with self._lock:
            self._given_up = True
            if not self._begun:
                self._weights = None  # a waiting thread must not keep them

    @property
    def writes(self) -> bool:
        return not self.over.is_set() and (self._begun or not self._given_up)


class Staging:
    """The buckets of one worker. `find_regions` returns the parts of the weights that `load` takes."""

    def __init__(
        self, device: torch.device, worker: int, load: Load, find_regions: FindRegions = whole_tensors
    ) -> None:
        self.device, self.worker, self._load, self._find_regions = device, worker, load, find_regions
        self._buckets: Buckets | None = None
        self._slices: SlicedCopy | None = None
        self._channel: WorkerChannels | None = None
        self._receipts: list[Receipt] = []
        self._version: int | None = None
        self._first = 0
        self._read: torch.cuda.Event | None = None

    def prepare(self, welcome: bytes, wanted: str) -> tuple[str, str, str]:
        """Allocate room for the plan in `welcome`, a packed ServerWelcome. Returns the digests of all and of trained
        weights, and the mode. Raises ValueError."""
        message = unpack(welcome, TO_SERVER)
        assert isinstance(message, ServerWelcome)
        specs = [Spec(tensor.name, tuple(tensor.shape), dtype_of(tensor.dtype)) for tensor in message.tensors]
        plan = Plan.of(specs, message.bucket_bytes, frozenset(message.frozen), message.ranks, message.replicated)
        if self._buckets is None or self._buckets.plan != plan or wanted not in ("auto", self.mode):
            assert self.free, "the front process waits until the buckets are free"
            self._buckets = self._slices = self._version = None  # free first, then allocate
            self._allocate(plan, wanted)
        return plan.digest, plan.trained.digest, self.mode

    @property
    def mode(self) -> str:
        if self._buckets is None or self._slices is not None:
            return "slices" if self._slices else ""
        return "bucket" if self._buckets.rotating else "full"

    @property
    def frozen(self) -> frozenset[str]:
        return self._buckets.plan.frozen_names if self._buckets else frozenset()

    def receive(self, go: bytes, notify: str) -> None:
        message = unpack(go, TO_SERVER)
        assert isinstance(message, Go) and self._buckets is not None
        self._version = None
        if not self.free:  # a thread hangs in a group given up
            self.abort()
        before = [receipt for receipt in self._receipts if receipt.writes]
        if self.mode == "bucket" and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the last step before the pause has read the weights
        receipt = Receipt(message, self._buckets, self._channel_for(message))
        self._receipts = [*before, receipt]
        threading.Thread(target=self._run, args=(receipt, before, notify), name="weights", daemon=True).start()

    @property
    def free(self) -> bool:
        return not any(receipt.writes for receipt in self._receipts)

    def abort(self) -> bool:
        """Returns whether the buckets are free; else the thread's report frees them."""
        for receipt in self._receipts:
            receipt.give_up()
        self._leave_group()
        return self.free

    def weights(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        self._check_staged(version)
        assert self._buckets is not None and not self._buckets.rotating
        return self._buckets.views(first=self._first)

    def slices(self, version: int) -> list[tuple[Region, torch.Tensor]]:
        self._check_staged(version)
        assert self._slices is not None
        return list(self._slices.staged(self._first))

    def _check_staged(self, version: int) -> None:
        if self._version != version:
            raise ValueError(f"version {version} is not staged; {self._version} is")

    def read_until(self, event: torch.cuda.Event) -> None:
        """The GPU reads the staged version until `event`; the next one waits for it."""
        self._read = event

    def _allocate(self, plan: Plan, wanted: str) -> None:
        scratch, regions = scratch_bytes(plan), self._regions_for(plan, wanted)
        staged = plan.total_bytes if regions is None else staged_bytes(plan, regions) + arrival_bytes(plan, scratch)
        if self._rotating(plan, wanted, staged + (2 * scratch if regions is None else 0)):
            self._buckets = Buckets(plan, self.device, True, scratch=scratch)
        elif regions is None:
            self._buckets = Buckets(plan, self.device, scratch=scratch)
        else:
            self._slices = SlicedCopy(plan, self.device, regions, scratch)
            self._buckets = self._slices.weights
        if self.device.type == "cuda":
            self.read_until(torch.cuda.current_stream(self.device).record_event())

    def _regions_for(self, plan: Plan, wanted: str) -> tuple[Region, ...] | None:
        if wanted not in ("auto", "slices"):
            return None
        regions = self._find_regions([slot.spec for slot in plan.slots], plan.frozen_names)
        if wanted == "slices" and regions.problem:
            raise ValueError(f"weights.staging: slices cannot be: {regions.problem}; set auto")
        if regions.problem:
            log.info("weights: whole tensors are staged: %s", regions.problem)
            return None
        scratch = scratch_bytes(plan)
        smaller = staged_bytes(plan, regions.found) + arrival_bytes(plan, scratch) < plan.total_bytes + 2 * scratch
        return regions.found if smaller or wanted == "slices" else None

    def _rotating(self, plan: Plan, wanted: str, staged: int) -> bool:
        if wanted == "bucket" or self.device.type != "cuda":
            return wanted == "bucket"
        torch.cuda.empty_cache()
        free = torch.cuda.mem_get_info(self.device)[0]
        needed = staged + (plan.ranks - 1) * GROUP_BYTES
        fits = needed + SPARE <= free
        if not fits and wanted != "auto":
            raise ValueError(
                f"weights.staging: {wanted} takes {needed / GIB:.1f} GiB beside vLLM, {free / GIB:.1f} GiB are "
                "free; lower rollout.engine.gpu_memory_utilization, or set bucket"
            )
        return not fits

    def _channel_for(self, go: Go) -> WorkerChannels | None:
        group = go.source
        if isinstance(group, str):
            return None
        if not self._channel or self._channel.epoch != group.epoch:
            self._leave_group()
            rank = group.offset + self.worker
            where = group.host, group.port, group.epoch, rank, group.world, self.device, go.timeout_s
            self._channel = WorkerChannels([Channel(*where, root) for root in range(group.roots)])
        return self._channel

    def _leave_group(self) -> None:
        if self._channel:
            self._channel.abort()
            self._channel = None

    def _run(self, receipt: Receipt, before: Sequence[Receipt], notify: str) -> None:
        go, sums, reason, fatal = receipt.go, list[int](), "", False
        try:
            sums = self._receive(receipt, before)
        except ChannelError as error:
            reason = str(error)
        except BaseException as error:  # the front process then ends the server
            log.exception("weights: version %d", go.version)
            reason, fatal = f"{type(error).__name__}: {error}", True
        span_s = receipt.channel.span_s if receipt.channel else 0.0
        receipt.end()
        tell(notify, Staged(round=go.round, checksums=sums, span_s=span_s, reason=reason, fatal=fatal))

    def _receive(self, receipt: Receipt, before: Sequence[Receipt]) -> list[int]:
        go, end = receipt.go, time.monotonic() + receipt.go.timeout_s
        for other in before:
            if not other.over.wait(max(end - time.monotonic(), 0.0)):
                raise ChannelError(f"round {other.go.round}, which was given up, still holds the buckets")
        with own_stream(self.device):
            weights = receipt.begin()
            if self._read:
                torch.cuda.current_stream(self.device).wait_event(self._read)
            try:
                sums = self._take(go, weights, receipt.channel)
            except ChannelError:  # kernels may write until the group is aborted
                if self.device.type == "cuda":
                    self.read_until(torch.cuda.current_stream(self.device).record_event())
                raise
        if self.mode != "bucket" and receipt is self._receipts[-1]:
            self._version, self._first = go.version, weights.plan.first(go.plan)
        return sums

    def _take(self, go: Go, weights: Buckets, channel: WorkerChannels | None) -> list[int]:
        if self._slices is not None:
            kept = [self._slices.keep(bucket) for bucket in arrivals(go, weights, channel)]
            return self._slices.checksums(kept)
        if not weights.rotating:
            last, computed = len(weights.buckets) - 1, torch.empty(0)
            for bucket in arrivals(go, weights, channel):
                if bucket == last:  # queued before anything waits
                    computed = weights.checksums(weights.plan.first(go.plan))
            return [int(value) for value in computed.tolist()]
        sums: list[torch.Tensor] = []

        def arriving() -> Iterator[tuple[str, torch.Tensor]]:
            for bucket in arrivals(go, weights, channel):
                sums.append(checksum(weights.buckets[bucket]))
                yield from weights.views(bucket)

        self._load(arriving())
        return [int(value) for value in torch.stack(sums).tolist()]


def arrivals(go: Go, weights: Buckets, channel: WorkerChannels | None) -> Iterator[int]:
    """Fill the buckets; yields the index of each complete one."""
    first = weights.plan.first(go.plan)
    if isinstance(go.source, str):
        yield from files.read(Path(go.source), weights, first)
    elif channel is not None and weights.plan.ranks > 1:
        yield from receive(weights, channel, first)
    elif channel is not None:
        for number in channel.broadcast(weights.buckets[first:], 1 if weights.rotating else None):
            yield first + number


def tell(notify: str, message: Staged) -> None:
    """Send one message to the front process."""
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.setsockopt(zmq.LINGER, 5000)
        socket.connect(notify)
        socket.send(pack(message))
