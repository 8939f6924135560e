"""The clients of the samples wire: async for a rollout server, blocking for a learner rank."""

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from queue import SimpleQueue
from typing import Any, TypeVar

from buffer.keys import ClientKeys
from buffer.ledger.types import FailureKind
from buffer.wire import protocol
from buffer.wire.connection import Connection, MessageTooLarge, RefusedError
from buffer.wire.protocol import EvaluationResult, Part, SetResult, WorkItem
from buffer.wire.sample import Sample
from configs.entrypoint import made_progress

__all__ = ["Connection", "LearnerClient", "MessageTooLarge", "RefusedError", "RolloutClient", "heartbeats"]
T = TypeVar("T")
log = logging.getLogger(__name__)
CLOSE_S = 30.0


class RolloutClient:
    def __init__(self, client: Connection, server_version: Callable[[], int]) -> None:
        self.client, self._version = client, server_version
        self.holding: set[int] = set()
        self.nudged = asyncio.Event()
        self.finished: protocol.Finished | None = None
        self.learner_waits = False
        self.evaluating: int | None = None
        self.evaluation_due, self.evaluation_over = asyncio.Event(), asyncio.Event()
        self._requests = 0
        self._asking: asyncio.Task[list[WorkItem] | None] | None = None

    async def ask(self, room: int) -> list[WorkItem] | None:
        """Up to `room` items, at least one; None: there will be no more. One call at a time.

        A cancelled call loses nothing: the next one returns its items.
        """
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask(room))
        items = await asyncio.shield(self._asking)
        self._asking = None
        return items

    async def _ask(self, room: int) -> list[WorkItem] | None:
        items: list[WorkItem] = []
        while not items:  # images of all items could not be read
            self._requests += 1
            ask = protocol.Ask(request=self._requests, version=self._version(), room=room)
            answer = await self.client.expect(ask, protocol.Work, protocol.Finished)
            if isinstance(answer, protocol.Finished):
                self.finished = answer
                return None
            items = answer.items
        self.holding.update(item.lease for item in items)
        return items

    async def put(self, item: WorkItem, samples: Sequence[Sample]) -> protocol.Stored:
        """Hand over a group; waits while the buffer is full. Not `accepted`: the lease was over."""
        packed = [sample.pack() for sample in samples]
        put = protocol.Put(item=item.item, lease=item.lease, samples=packed)
        stored = await self.client.expect(put, protocol.Stored)
        self.holding.discard(item.lease)
        if stored.accepted:
            made_progress()
        return stored

    async def fail(
        self,
        item: WorkItem,
        reason: str,
        permanent: bool = False,
        returned: bool = False,
        kind: FailureKind = "infrastructure",
    ) -> None:
        """The item is tried again unless `permanent`. `returned`: this server has not failed at it."""
        failure = {"reason": reason, "failure_kind": kind, "permanent": permanent, "returned": returned}
        fail = protocol.Fail(item=item.item, lease=item.lease, **failure)  # type: ignore[arg-type]
        await self.client.expect(fail, protocol.Ack)
        self.holding.discard(item.lease)

    async def beat(self, stats: Mapping[str, float]) -> list[int]:
        """Send one heartbeat; returns leases to abort, each once."""
        holding, version = sorted(self.holding), self._version()
        beat = protocol.Heartbeat(version=version, holding=holding, stats=dict(stats), evaluating=self.evaluating)
        news = await self.client.expect(beat, protocol.News)
        self.learner_waits = news.learner_waits
        if news.evaluation == "due":
            self.evaluation_due.set()
        elif news.evaluation == "over" and beat.evaluating == self.evaluating:
            self.evaluation_over.set()
        self.holding.difference_update(news.revoked)
        return news.revoked

    async def claim(self, version: int) -> int | None:
        """The evaluation of `version` that this server is to make, by when it was due."""
        self.evaluating = (await self.client.expect(protocol.Evaluate(version=version), protocol.Due)).due
        self.evaluation_over.clear()
        return self.evaluating

    async def evaluated(self, due: int, version: int, sets: Mapping[str, SetResult]) -> protocol.Stored:
        made = protocol.Evaluated(due=due, version=version, sets=dict(sets))
        stored = await self.client.expect(made, protocol.Stored)
        self.evaluating = None
        return stored

    async def leave(self) -> None:
        """What this server has, and what a pending Ask would bring, goes to others."""
        if self._asking:
            self._asking.cancel()  # else it is repeated, and lets this server in again
        await self.client.expect(protocol.Goodbye(), protocol.Ack)

    async def where(self, known: str | None) -> str:
        return (await self.client.expect(protocol.Where(known=known), protocol.WeightsAddress)).address


async def heartbeats(
    samples: RolloutClient,
    every_s: float,
    stats: Callable[[], Mapping[str, float]],
    revoke: Callable[[list[int]], None],
) -> None:
    """Send a heartbeat every `every_s`, and at once when `samples.nudged` is set."""
    while True:
        revoke(await samples.beat(stats()))
        try:
            async with asyncio.timeout(every_s):
                await samples.nudged.wait()
        except TimeoutError:
            continue
        samples.nudged.clear()


class LearnerClient:
    """Blocking calls from any thread. Raises RefusedError, and TimeoutError after `timeout_s`."""

    def __init__(
        self,
        address: str,
        name: str,
        fingerprint: str,
        rank: int,
        world: int,
        serves: str | None = None,
        timeout_s: float | None = None,
        share_prompts: bool = False,
        *,
        keys: ClientKeys,
    ) -> None:
        self.address, self.rank, self.world, self.timeout_s = address, rank, world, timeout_s
        self.share_prompts = share_prompts
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="batches", daemon=True)
        self._thread.start()
        self._trained: Future[protocol.Ack] | None = None
        self.finished: protocol.Finished | None = None
        self._results: SimpleQueue[EvaluationResult] = SimpleQueue()
        self._fetching: Future[None] | None = None
        self._new = 0
        """To train an older batch again is no progress."""
        self._stopped = Future[None]()
        self.client = Connection(address, name, "learner", fingerprint, serves, keys=keys)
        self._is_connected = False
        try:
            self._wait(self.client.__aenter__(), "Hello")
            self._is_connected = True
        except BaseException:
            self.close()
            raise

    def rewind(self, version: int) -> int:
        """Returns how many batches will be served again as they were."""
        rewound = self._wait(self.client.expect(protocol.Rewind(version=version), protocol.Rewound), "Rewind")
        replay = rewound.replay if rewound else 0
        self._new = version + replay
        return replay

    def take(self, version: int) -> Part | None:
        """This rank's part; None: there will be none, as `finished` or `stop` says."""
        if self._stopped.done():
            return None
        if self._trained and self._trained.done():
            self._trained.result()  # raises what the buffer refused
        take = protocol.Take(version=version, rank=self.rank, world=self.world, share_prompts=self.share_prompts)
        answer = self._wait(self.client.expect(take, Part, protocol.Finished), "Take")
        if isinstance(answer, protocol.Finished):
            self.finished = answer
            return None
        return answer

    def quarantine(self, item: int, reason: str) -> None:
        reason = " ".join(reason.split())[: protocol.MOST_REASON]
        self._wait(self.client.expect(protocol.Quarantine(item=item, reason=reason), protocol.Ack), "Quarantine")

    def try_alone(self, version: int, item: int | None) -> None:
        self._wait(self.client.expect(protocol.Trial(version=version, item=item), protocol.Ack), "Trial")

    def stop(self) -> None:
        """From now on `rewind` returns 0, `take` None and `last_evaluations` what has come, also where they wait.

        A signal's handler may call it: nothing is raised into what it interrupts.
        """
        self._loop.call_soon_threadsafe(self._note_stop)

    def _note_stop(self) -> None:
        if not self._stopped.done():
            self._stopped.set_result(None)

    def trained(self, version: int, oldest_kept: int) -> None:
        """Does not wait for the answer: should it be lost with this process, the learner rewinds. The next call, or
        `close`, raises what the buffer refused."""
        if self._trained and self._trained.done():
            self._trained.result()
        trained = protocol.Trained(version=version, oldest_kept=oldest_kept)
        if version >= self._new:
            made_progress()
        self._trained = asyncio.run_coroutine_threadsafe(self.client.expect(trained, protocol.Ack), self._loop)

    def follow_evaluations(self, known: Sequence[int]) -> None:
        """`known`: evaluations whose results are not fetched, by when they were due."""
        self._fetching = asyncio.run_coroutine_threadsafe(self._fetch(list(known)), self._loop)

    async def _fetch(self, known: list[int]) -> None:
        while True:
            answer = await self.client.expect(protocol.Results(known=known), EvaluationResult, protocol.Ack)
            if isinstance(answer, protocol.Ack):
                return
            known.append(answer.due)
            self._results.put(answer)

    def evaluations(self) -> list[EvaluationResult]:
        return [self._results.get() for _ in range(self._results.qsize())]

    def last_evaluations(self) -> list[EvaluationResult]:
        self._wait(self._fetched(), "Results")
        return self.evaluations()

    async def _fetched(self) -> None:
        if self._fetching:
            await asyncio.shield(asyncio.wrap_future(self._fetching))

    def close(self) -> None:
        """Waits up to CLOSE_S for the answer to the last Trained."""
        if not self._thread.is_alive():
            return
        trained, self._trained = self._trained, None
        answered = bool(trained and wait([trained], CLOSE_S).done)
        if trained and not answered:
            log.warning("the buffer at %s did not confirm that the last batch was trained", self.address)
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        if trained and answered:
            trained.result()

    async def _end(self) -> None:
        given_up = asyncio.all_tasks() - {asyncio.current_task()}
        if self._is_connected:
            await self.client.__aexit__()
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)

    def __enter__(self) -> "LearnerClient":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _wait(self, work: Coroutine[Any, Any, T], what: str) -> T | None:
        """None once `stop` was called."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        either: list[Future[Any]] = [future, self._stopped]
        try:
            done, _ = wait(either, self.timeout_s, FIRST_COMPLETED)
            if future.done():
                return future.result()
            if done:
                return None
            late = f"the buffer at {self.address} gave no answer in {self.timeout_s:g} s"
            raise TimeoutError(f"{what}: {late}; {self._reason(what)}")
        finally:
            future.cancel()

    def _reason(self, what: str) -> str:
        if not self._is_connected:
            return "is it running? (`python -m buffer CONFIG`)"
        status = self.client.expect(protocol.Status(), protocol.State)
        answer = asyncio.run_coroutine_threadsafe(status, self._loop)
        try:
            state = answer.result(2.0)
        except (TimeoutError, RefusedError):
            answer.cancel()
            return "it does not answer at all: is it running?"
        return next((waiter.why for waiter in state.waiters if waiter.kind == what), "it does not say why")
