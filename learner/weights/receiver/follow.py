"""A rollout server's end of the weights wire, in its front process.

`policies` yields each version that the workers have verified, or receive during `load`. A silent learner is sought at
the buffer (`where`) and at its old address.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable

import zmq.asyncio

from buffer.data.images import ImageFormat
from buffer.keys import ClientKeys
from buffer.wire.awake import AwakeClock
from buffer.wire.message import Message
from configs.schema import WeightsConfig
from learner.weights import protocol
from learner.weights.receiver.comparison import Comparison
from learner.weights.receiver.learner_connection import LearnerConnection
from learner.weights.receiver.reception import Reception
from learner.weights.receiver.rounds import Rounds, State
from learner.weights.receiver.staged import ReceivingEngine, StagedPolicy, WeightsError
from learner.weights.receiver.streamed import StreamedPolicy
from learner.weights.receiver.workers import Workers, next_report

log = logging.getLogger(__name__)
STUCK = 3.0
"""Timeouts after which a server with hanging workers ends: group, first step and bucket may take one each."""


class Receiver:
    """Follows the learner. `where(known)` returns its address as soon as it is not `known`."""

    def __init__(
        self,
        where: Callable[[str | None], Awaitable[str]],
        engine: ReceivingEngine,
        name: str,
        config: WeightsConfig,
        heartbeat_s: float = 2.0,
        form: ImageFormat | None = None,
        *,
        keys: ClientKeys,
    ) -> None:
        self._where, self._keys, self._heartbeat_s = where, keys, heartbeat_s
        self._comparison = Comparison(engine, form)
        self._workers = Workers(engine, config.timeout_s, config.staging)
        self._policies: asyncio.Queue[StagedPolicy | StreamedPolicy | BaseException] = asyncio.Queue()
        self._connection: LearnerConnection | None = None
        self._join = protocol.Join(name=name, protocol=protocol.PROTOCOL, workers=1, backend="")
        self._clock, self._rounds = AwakeClock(), Rounds(self._say)
        self._streamed: StreamedPolicy | None = None

    def hold(self, loading: bool = False) -> bool:
        """Accept no newer version until `release`; False: one is on its way."""
        return self._rounds.hold(loading)

    def release(self) -> None:
        self._rounds.release()

    async def policies(self) -> AsyncGenerator[StagedPolicy | StreamedPolicy, None]:
        """Each new policy, verified by checksums. Load it before asking for the next. Raises WeightsError."""
        follow = asyncio.create_task(self._follow(), name="weights")
        follow.add_done_callback(self._on_end)
        try:
            while True:
                policy = await self._policies.get()
                if isinstance(policy, BaseException):
                    raise policy
                yield policy
        finally:
            follow.cancel()
            await asyncio.wait([follow])

    def _on_end(self, follow: "asyncio.Task[None]") -> None:
        error = None if follow.cancelled() else follow.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = error or asyncio.CancelledError()
        self._policies.put_nowait(reason)
        if self._rounds.reception:
            self._rounds.reception.take_probe(None)
        if self._streamed:
            self._streamed.finish(reason)

    async def _follow(self) -> None:
        number, backend = await self._workers.describe()
        self._join = self._join.model_copy(update={"workers": number, "backend": backend})
        with zmq.asyncio.Context() as context, self._workers.reporting(context) as reports:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._collect(reports))
                tasks.create_task(self._clock.tick())
                address = await self._where(None)
                while True:
                    log.info("weights: the learner is at %s", address)
                    connection = LearnerConnection(context, address, self._keys, self._heartbeat_s)
                    address = await self._attend(connection)

    async def _attend(self, connection: LearnerConnection) -> str:
        self._connection = connection
        self._rounds.leave()
        await self._abandon("the learner was lost")
        seeking: asyncio.Future[str] | None = None
        try:
            while True:
                message = await connection.receive(self._join, seeking)
                self._require_end()
                if message is not None:
                    await self._on_message(message, connection)
                if connection.joined and seeking:
                    seeking.cancel()
                    seeking = None
                elif connection.lost and not seeking:
                    log.warning("weights: the learner at %s is silent or gone; asking where it is", connection.address)
                    seeking = asyncio.ensure_future(self._where(connection.address))
                if seeking and seeking.done():
                    return seeking.result()
        finally:
            if seeking:
                seeking.cancel()
            await connection.close()
            self._connection = None

    async def _on_message(self, message: Message, connection: LearnerConnection) -> None:
        if isinstance(message, protocol.ServerWelcome):
            await self._on_welcome(message, connection)
        elif isinstance(message, protocol.Joined):
            connection.joined, connection.lost = True, False
            self._rounds.joined()
        elif isinstance(message, protocol.Offer):
            await self._abandon("the learner began another round")
            self._rounds.offer(message)
        elif isinstance(message, protocol.Go):
            await self._begin(Reception(message, self._join.workers, self._comparison))
        elif isinstance(message, protocol.Checksums | protocol.Probe | protocol.Cancel):
            if self._rounds.is_present(message.round):
                await self._on_fact(message)
        elif isinstance(message, protocol.Rejoin | protocol.Bye):
            if isinstance(message, protocol.Rejoin) and connection.joined:
                log.warning("weights: the learner left this server out: %s", message.reason)
            connection.leave(lost=isinstance(message, protocol.Bye))
            self._rounds.leave()
        elif isinstance(message, protocol.JoinRefused):
            raise WeightsError(message.reason)

    async def _on_welcome(self, welcome: protocol.ServerWelcome, connection: LearnerConnection) -> None:
        if self._rounds.state is State.CLEARING:  # Join follows once its buckets are free
            return
        await self._workers.prepare(welcome)
        self._join = self._join.model_copy(update={"digest": welcome.digest, "trained": welcome.trained})
        connection.heartbeat_s = welcome.heartbeat_s
        connection.say(self._join)

    async def _on_fact(self, message: protocol.Checksums | protocol.Probe | protocol.Cancel) -> None:
        reception = self._rounds.reception
        assert reception
        if isinstance(message, protocol.Checksums):
            reception.checksums = message
            self._judge()
        elif isinstance(message, protocol.Probe):
            reception.take_probe(message)
        else:
            await self._abandon(message.reason)

    async def _begin(self, reception: Reception) -> None:
        if not self._rounds.go(reception):
            return
        if not self._workers.streams:
            return await self._receive(reception)
        if self._streamed is None:
            workers, loaded = self._workers, self._rounds.loaded
            self._streamed = StreamedPolicy(
                reception, workers.engine, self._say, loaded, self._receive, workers.timeout_s
            )
            self._policies.put_nowait(self._streamed)
        self._streamed.begin(reception)

    async def _receive(self, reception: Reception) -> None:
        if self._rounds.state is State.RECEIVING and reception is self._rounds.reception:
            await self._workers.receive(reception.go)

    async def _collect(self, reports: "zmq.asyncio.Socket") -> None:
        while True:
            self._rounds.report(await next_report(reports))
            self._judge()

    def _judge(self) -> None:
        reception = self._rounds.reception
        if self._rounds.state is not State.RECEIVING or not reception or not reception.complete:
            return
        if failed := reception.failure():
            log.warning("weights: version %d was not received: %s", reception.go.version, failed.reason)
            self._rounds.fail(failed)
            if failed.fatal:
                raise WeightsError(failed.reason)
        elif reception.checksums:
            self._hand_over(reception)

    def _hand_over(self, reception: Reception) -> None:
        go = self._rounds.verify()
        self._join = self._join.model_copy(update={"session": go.session, "version": go.version})
        self._say(protocol.Received(round=go.round, span_s=max(report.span_s for report in reception.reports)))
        if self._streamed:
            self._streamed.finish()
            self._streamed = None
        else:
            workers, loaded = self._workers, self._rounds.loaded
            self._policies.put_nowait(StagedPolicy(reception, workers.engine, self._say, loaded, workers.timeout_s))

    async def _abandon(self, reason: str) -> None:
        if self._rounds.reception:
            self._rounds.reception.take_probe(None)
        if self._rounds.state is not State.RECEIVING:
            return
        reception = self._rounds.give_up(self._clock.now())
        if not self._rounds.aborted(await self._workers.abort()):
            log.warning(
                "weights: version %d was given up (%s), but its broadcast still runs; the next one is received "
                "after the broadcast has ended, within %g s",
                *(reception.go.version, reason, reception.go.timeout_s),
            )
        self._say(protocol.Failed(round=reception.go.round, reason=reason))

    def _require_end(self) -> None:
        """Raise WeightsError if workers hang: they would never free their buckets."""
        reception = self._rounds.reception
        if self._rounds.state is not State.CLEARING or not reception:
            return
        go, silent_s = reception.go, self._clock.now() - reception.given_up_at
        if silent_s > STUCK * go.timeout_s:
            number = reception.workers - len(reception.reports)
            raise WeightsError(
                f"version {go.version}: its broadcast was given up {silent_s:.0f} s ago, and {number} worker(s) still "
                "hang in it; see what the GPU or the network has logged"
            )

    def _say(self, message: Message) -> None:
        if self._connection:
            self._connection.say(message)
