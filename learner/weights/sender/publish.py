"""The learner's end of the weights wire. `publish` is called by the learner's loop, on every rank, after every step.

All ranks gather the full tensors together. Rank 0 (`Sender`) copies them into an edition of its shelf and returns; its
background thread (`rounds.Rounds`) brings it to the servers while the learner trains on. The other ranks (`Follower`)
only gather along. `publish` waits for the gathering and, rarely, for a copy that a broken broadcast still reads, at
most the deadline.
"""

import asyncio
import logging
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from configs.schema import WeightsConfig
from learner.weights.plan import Plan, Spec
from learner.weights.probe import Policy, Prober
from learner.weights.protocol import ServingKeys
from learner.weights.sender.broadcast import BroadcastGroup
from learner.weights.sender.distributor import Distributor
from learner.weights.sender.files import Files
from learner.weights.sender.shelf import DoubleBuffer

log = logging.getLogger(__name__)
HEARTBEAT_S = 2.0


class Follower:
    """Every rank but 0: gathers along."""

    def __init__(
        self, specs: Sequence[Spec], config: WeightsConfig, seed: int, probe: Sequence[int] | None = None
    ) -> None:
        self._prober = Prober.of(specs, config, seed, probe)

    def publish(self, policy: Policy, version: int) -> None:
        """Take part in the gathering of `version`."""
        self._prober.ask(policy, version)
        for _ in policy.full_weights():
            pass

    def stats(self) -> dict[str, float]:
        """Nothing: rank 0 has the figures."""
        return {}

    def close(self) -> None:
        """Nothing to close."""


class Sender:
    """Rank 0. `address` is where servers join; the learner tells it to the buffer, which tells the servers."""

    def __init__(
        self,
        specs: Iterable[Spec],
        config: WeightsConfig,
        seed: int,
        device: torch.device,
        probe: Sequence[int] | None = None,
        keys: ServingKeys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        folder: Path | None = None,
    ) -> None:
        """`folder`: where `weights.transport: safetensors` writes. Raises ValueError for a host nobody can reach."""
        specs = [Spec(*spec) for spec in specs]
        if config.host in ("0.0.0.0", "::", "*"):
            raise ValueError(f"weights.host: servers cannot connect to {config.host}; name an address of this machine")
        plan = Plan.of(specs, config.bucket_mib << 20)
        self._config, self._prober = config, Prober.of(specs, config, seed, probe)
        self._shelf = DoubleBuffer(plan, device)
        self._published: dict[str, float] = {"weights/bytes": float(plan.total_bytes)}
        self._ended: Future[None] = Future()
        started: Future[str] = Future()
        session = uuid.uuid4().hex

        async def serve() -> None:
            self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
            if config.transport == "safetensors":
                assert folder is not None
                group: BroadcastGroup | Files = Files(folder, session, config.timeout_s)
            else:
                group = BroadcastGroup(config.host, device, config.timeout_s)
            self._rounds = Distributor(
                plan, config.bucket_mib << 20, self._shelf, group, session, config.host, config.timeout_s,
                heartbeat_s, keys,
            )  # fmt: skip
            await self._rounds.serve(started.set_result)

        self._thread = threading.Thread(target=_run, args=(serve, started, self._ended), name="weights", daemon=True)
        self._thread.start()
        self.address: str = started.result()

    def publish(self, policy: Policy, version: int) -> None:
        """Take `version` of the policy and return; it is on its way. Raises what ended the background thread, if
        anything did."""
        if self._ended.done():
            self._ended.result()
            raise RuntimeError("the weights wire is closed")
        started = time.perf_counter()
        edition = self._shelf.reserve(self._config.timeout_s)
        edition.version, edition.probe = version, self._prober.ask(policy, version)
        edition.snapshot.fill(policy.full_weights())
        edition.checksums = edition.snapshot.checksums()
        edition.published_at = started
        self._shelf.offer(edition)
        self._loop.call_soon_threadsafe(self._rounds.changed.set)
        self._published["weights/gather_s"] = time.perf_counter() - started

    def stats(self) -> dict[str, float]:
        """The timeline of the last publication and of the last round that reached servers: seconds, counts, the last
        probe."""
        return self._published | self._rounds.timeline.stats

    def close(self, drain_s: float = 0.0) -> None:
        """End the wire; first wait up to `drain_s` seconds until every server has the newest version."""
        if drain_s and not self._ended.done():
            with suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._rounds.drained(), self._loop).result(drain_s)
        if not self._ended.done():
            with suppress(RuntimeError):  # it ended by itself in between
                self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join(5.0)

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()


def _run(serve: Callable[[], Coroutine[Any, Any, None]], started: "Future[str]", ended: "Future[None]") -> None:
    """The thread: whatever ends it is raised in the learner's next `publish`."""
    try:
        asyncio.run(serve())
    except asyncio.CancelledError:
        ended.set_result(None)
    except BaseException as error:  # the outermost boundary of the thread: handed on
        log.exception("weights: the serving thread ended")
        ended.set_exception(error)
        if not started.done():
            started.set_exception(error)
    else:
        ended.set_result(None)
