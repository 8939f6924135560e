"""The learner's end of the weights wire. The loop calls `publish` on every rank after every optimizer step.

Rank 0 (`Sender`) copies what it sends and returns; a thread brings the copy to the servers. With
`weights.publish: rows` the other ranks of the first replica do so with their own rows (`row_rank.RowRank`), with
`gather` they take part in the gathering and the probe (`Follower`). `publish` waits for the other ranks and, rarely, up
to `weights.timeout_s` for a copy that a broken broadcast reads.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from buffer.keys import ServerKeys
from configs.schema import WeightsConfig
from learner.weights.buckets import DoubleBuffer, pending
from learner.weights.plan import Plan, Spec
from learner.weights.probe import ProbeRow
from learner.weights.prober import ProbedPolicy, Prober
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.distributor import Distributor
from learner.weights.sender.files import Files
from learner.weights.sender.mailbox import SendingRanks
from learner.weights.sender.row_broadcast import RowBroadcast
from learner.weights.sender.row_rank import row_copies

log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0


class Bystander:
    """A rank of another replica than rank 0's: does nothing."""

    def publish(self, policy: ProbedPolicy, version: int) -> None: ...

    def stats(self) -> dict[str, float]:
        return {}

    def close(self, drain_s: float = 0.0) -> None: ...


class Follower:
    """A rank of the first replica but 0: takes part in what is collective."""

    def __init__(
        self,
        specs: Sequence[Spec],
        config: WeightsConfig,
        seed: int,
        probe: ProbeRow | Sequence[int] | None = None,
        frozen: Collection[str] = (),
    ) -> None:
        self._prober = Prober(specs, config, seed, probe)
        self._frozen, self._known = frozen, frozenset[str]()

    def publish(self, policy: ProbedPolicy, version: int) -> None:
        for _ in policy.full_weights(self._known):
            pass
        self._known = frozenset(self._frozen)
        if self._prober.due(version):
            self._prober.ask(policy)

    def stats(self) -> dict[str, float]:
        return {}

    def close(self, drain_s: float = 0.0) -> None: ...


class Sender:
    """Rank 0. Servers join at `address`, which they learn from the buffer."""

    def __init__(
        self,
        specs: Iterable[Spec],
        config: WeightsConfig,
        seed: int,
        device: torch.device,
        probe: ProbeRow | Sequence[int] | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        folder: Path | None = None,
        frozen: Collection[str] = (),
        ranks: SendingRanks | None = None,
        *,
        keys: ServerKeys,
    ) -> None:
        specs = [Spec(*spec) for spec in specs]
        self._known = frozenset[str]()
        self._config, self._prober = config, Prober(specs, config, seed, probe)
        self._ranks, self._on_gpu = ranks, device.type == "cuda"
        if ranks:
            self._copies = row_copies(specs, config, device, frozen, ranks)
        else:
            self._copies = DoubleBuffer(Plan.of(specs, config.bucket_mib << 20, frozen), device)
        self._published: dict[str, float] = {"weights/bytes": float(self._copies.plan.trained.total_bytes)}
        self._ended: Future[None] = Future()
        started: Future[str] = Future()
        session = uuid.uuid4().hex
        if config.transport == "safetensors":
            assert folder is not None
            transport: BroadcastGroup | RowBroadcast | Files = Files(folder, session)
        else:
            transport = BroadcastGroup(config.host, device, config.timeout_s)
            if ranks:
                transport = RowBroadcast(transport, ranks, config.timeout_s)
        self._transport = transport
        self._distributor = Distributor(self._copies, transport, session, config, heartbeat_s, keys)

        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            await self._distributor.serve(started.set_result)

        self._thread = threading.Thread(target=_run, args=(serve, started, self._ended), name="weights", daemon=True)
        self._thread.start()
        self.address: str = started.result()

    def publish(self, policy: Any, version: int) -> None:
        """Copy `version` of the policy and return. Raises what ended the background thread. If the copying fails, the
        version is never sent."""
        if self._ended.done():
            self._ended.result()
            raise RuntimeError("the weights wire is closed")
        started = time.perf_counter()
        copy = self._copies.reserve(self._config.timeout_s)
        if self._ranks:
            self._ranks.agree(self._copies.number_of(copy))
        copy.version, copy.published_at, copy.filled, copy.checksums = version, started, pending(), {}
        copy.probe = pending() if self._prober.due(version) else None
        self._copies.offer(copy)
        self._loop.call_soon_threadsafe(self._distributor.members.changed.set)
        weights = policy.local_weights(self._known) if self._ranks else policy.full_weights(self._known)
        copy.weights.fill(weights, self._known)
        self._known = self._copies.plan.frozen_names
        copy.filled.set_result(torch.cuda.current_stream().record_event() if self._on_gpu else None)
        self._published["weights/gather_s"] = time.perf_counter() - started
        if copy.probe is not None:
            copy.probe.set_result(self._prober.ask(policy))

    def stats(self) -> dict[str, float]:
        return self._published | self._distributor.stats()

    def close(self, drain_s: float = 0.0) -> None:
        """Wait up to `drain_s` until every server has the newest version, and close the wire."""
        if drain_s and not self._ended.done():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._distributor.drained(), self._loop).result(drain_s)
        if not self._ended.done():
            with suppress(RuntimeError):  # it ended by itself meanwhile
                self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(5.0)
        if isinstance(self._transport, RowBroadcast):
            self._transport.close()

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _run(serve: Callable[[], Coroutine[Any, Any, None]], started: "Future[str]", ended: "Future[None]") -> None:
    """The next `publish` raises what ends the thread."""
    try:
        with suppress(asyncio.CancelledError):
            asyncio.run(serve())
        ended.set_result(None)
    except BaseException as error:  # outermost boundary
        log.exception("weights: the serving thread ended")
        ended.set_exception(error)
        if not started.done():
            started.set_exception(error)
