"""A rollout server's end of the weights wire. Runs in the front process's event loop, beside generation.

`policies` yields each version once its buckets are in the workers' staging copies with the checksums that the learner
has (`StagedPolicy`); the rollout loop then loads it between two steps. Workers without room for copies receive it
during `load` instead, while the engine is paused (`StreamedPolicy`).
Waits for: the buffer, which knows the learner's address (`where`), the learner's messages, the workers' reports. What
the learner owes to a round (Checksums, Probe) is waited for until it offers another round or is replaced by another
learner; it leaves a server out that does not answer in time, and offers again. When the learner falls silent this asks
`where` again and keeps trying the old address, whichever succeeds first.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

import zmq
import zmq.asyncio

from buffer.data.images import ImageFormat
from buffer.keys import ClientKeys
from buffer.wire.awake import AwakeClock
from buffer.wire.message import Message
from configs.schema import WeightsConfig
from configs.variables import WEIGHTS_BYTES, socket_folder
from learner.weights import protocol
from learner.weights.receiver.learner_connection import LearnerConnection
from learner.weights.receiver.reception import Reception
from learner.weights.receiver.staged import ReceivingEngine, StagedPolicy, WeightsError
from learner.weights.receiver.streamed import StreamedPolicy

log = logging.getLogger(__name__)
STUCK = 3.0
"""A server ends whose workers have not reported a round after so many of its timeouts since it was given up: they wait
for the group, its first step and a bucket up to one timeout each."""


class Receiver:
    """`where(known)` returns the learner's address as soon as there is one other than `known`
    (`buffer.wire.client.RolloutClient.where`)."""

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
        """`form`: how the server's model sees images. `keys`: those for the learner as a server."""
        self._engine, self._timeout_s, self._heartbeat_s, self._form = engine, config.timeout_s, heartbeat_s, form
        self._where, self._keys, self._staging = where, keys, config.staging
        self._policies: asyncio.Queue[StagedPolicy | StreamedPolicy | BaseException] = asyncio.Queue()
        self._connection: LearnerConnection | None = None
        self._join = protocol.Join(name=name, protocol=protocol.PROTOCOL, workers=1, backend="")
        """Says what this server is and holds; kept up to date."""
        self._reception: Reception | None = None
        """The round from its Go to its end."""
        self._lingering: Reception | None = None
        """A round that was given up while workers still wrote to their buckets. The buckets are free once all workers
        have reported."""
        self._clock, self._given_up_at = AwakeClock(), 0.0
        """When it was given up, by the clock."""
        self._busy = False
        """The staging copies must not be overwritten; an offer waits in `_offered`."""
        self._offered: protocol.Offer | None = None
        self._held, self._pledged = False, False
        """No offer is accepted at present; one was, and its round has not begun here."""
        self._streams = False
        """Workers have room for two buckets only."""
        self._streamed: StreamedPolicy | None = None
        """Yielded, and not in place yet."""

    def hold(self, loading: bool = False) -> bool:
        """Accept no newer version until `release`; False: another one is on its way by now. `loading`: this is called
        between the `load` and the `loaded` of one."""
        if self._pledged or (self._busy and not loading):
            return False
        self._held = True
        if not self._busy:  # else once the round is over
            self._say(protocol.Hold(round=0))
        return True

    def release(self) -> None:
        """Accept newer versions again."""
        self._held = False
        self._say(protocol.Release())

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
        """Raise what ended `_follow` wherever somebody waits for it."""
        error = None if follow.cancelled() else follow.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = error or asyncio.CancelledError()
        self._policies.put_nowait(reason)
        if self._reception:
            self._reception.take_probe(None)
        if self._streamed:
            self._streamed.finish(reason)

    async def _follow(self) -> None:
        """Follow the learner from address to address."""
        workers = await self._collective("rl_describe")
        self._join = self._join.model_copy(update={"workers": len(workers), "backend": workers[0]["backend"]})
        folder = tempfile.mkdtemp(prefix="headrace-", dir=socket_folder(WEIGHTS_BYTES))
        self._notify = f"ipc://{folder}/weights"
        try:
            with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
                pull.bind(self._notify)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._collect(pull))
                    tasks.create_task(self._clock.tick())
                    address = await self._where(None)
                    while True:
                        log.info("weights: the learner is at %s", address)
                        connection = LearnerConnection(context, address, self._keys, self._heartbeat_s)
                        address = await self._attend(connection)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _attend(self, connection: LearnerConnection) -> str:
        """Serve the learner at one address; returns its next address."""
        self._connection, self._pledged, self._offered = connection, False, None
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
            if self._lingering:  # nothing can be allocated before its buckets are free: Join is said again
                return
            await self._prepare(message)
            self._join = self._join.model_copy(update={"digest": message.digest, "trained": message.trained})
            connection.heartbeat_s = message.heartbeat_s
            connection.say(self._join)
        elif isinstance(message, protocol.Joined):
            connection.joined, connection.lost = True, False
            if self._held and not self._busy:
                self._say(protocol.Hold(round=0))
            if self._reception:  # of before: this member is a new one, to whom nothing of that round is told
                self._reception.take_probe(None)
        elif isinstance(message, protocol.Offer):
            await self._abandon("the learner began another round")
            self._offered = message
            if not self._busy:
                self._release_staging()
        elif isinstance(message, protocol.Go):
            self._pledged, self._busy, self._reception = False, True, Reception(message, self._join.workers, self._form)
            await self._begin(self._reception)
        elif isinstance(message, protocol.Checksums | protocol.Probe | protocol.Cancel):
            if self._reception and self._reception.go.round == message.round:
                await self._on_fact(message, self._reception)
        elif isinstance(message, protocol.Rejoin | protocol.Bye):
            if isinstance(message, protocol.Rejoin) and connection.joined:
                log.warning("weights: the learner left this server out: %s", message.reason)
            connection.leave(lost=isinstance(message, protocol.Bye))
            self._pledged, self._offered = False, None
        elif isinstance(message, protocol.JoinRefused):
            raise WeightsError(message.reason)

    async def _prepare(self, welcome: protocol.ServerWelcome) -> None:
        """Have all workers allocate room: each for a copy, or all for two buckets."""
        for staging in (self._staging, "bucket"):
            answers = await self._collective("rl_prepare", protocol.pack(welcome), staging)
            digests, modes = {tuple(answer[:2]) for answer in answers}, {answer[2] for answer in answers}
            if digests != {(welcome.digest, welcome.trained)}:
                theirs = (welcome.digest, welcome.trained)
                raise WeightsError(f"the plans of the weights are {digests} here, {theirs} at the learner")
            if len(modes) == 1:
                break
        self._streams = modes == {"bucket"}
        log.info("weights: received %s", "into place, bucket by bucket" if self._streams else "into a staging copy")

    async def _on_fact(self, message: protocol.Checksums | protocol.Probe | protocol.Cancel, of: Reception) -> None:
        """What the learner tells about the present round."""
        if isinstance(message, protocol.Checksums):
            of.checksums = message
            self._verify(of)
        elif isinstance(message, protocol.Probe):
            of.take_probe(message)
        else:
            await self._abandon(message.reason)

    async def _begin(self, reception: Reception) -> None:
        """Receive into the staging copies at once, or into place as soon as the engine is paused."""
        if not self._streams:
            return await self._receive(reception)
        if self._streamed is None:
            self._streamed = StreamedPolicy(
                reception, self._engine, self._say, self._release_staging, self._receive, self._timeout_s
            )
            self._policies.put_nowait(self._streamed)
        self._streamed.begin(reception)

    async def _receive(self, reception: Reception) -> None:
        """Have all workers receive the round, unless it was cancelled meanwhile."""
        if reception is self._reception:
            await self._collective("rl_receive", protocol.pack(reception.go), self._notify)

    async def _collect(self, pull: "zmq.asyncio.Socket") -> None:
        """Take the workers' reports; all but those of the current round are stale."""
        while True:
            staged = protocol.unpack(await pull.recv(), protocol.TO_FRONT)
            assert isinstance(staged, protocol.Staged)
            if self._reception and staged.round == self._reception.go.round:
                self._reception.reports.append(staged)
                self._verify(self._reception)
            elif self._lingering and staged.round == self._lingering.go.round:
                self._lingering.reports.append(staged)
                self._settle()

    def _verify(self, reception: Reception) -> None:
        """Hand the version to the rollout loop once it is all there and the learner's checksums agree."""
        if reception.verified or len(reception.reports) < reception.workers:
            return
        go, failed = reception.go, reception.failure()
        if failed:
            log.warning("weights: version %d was not received: %s", go.version, failed.reason)
            return self._fail(failed)
        if reception.checksums is None:
            return
        reception.verified = True
        self._join = self._join.model_copy(update={"session": go.session, "version": go.version})
        self._say(protocol.Received(round=go.round, span_s=max(report.span_s for report in reception.reports)))
        if self._streamed:
            self._streamed.finish()
            self._streamed = None
        else:
            policy = StagedPolicy(reception, self._engine, self._say, self._release_staging, self._timeout_s)
            self._policies.put_nowait(policy)

    async def _abandon(self, reason: str) -> None:
        """Give up this round. A version that is not verified yet is never loaded.

        A stuck thread keeps the only buckets, so no offer is accepted until the thread ends.
        """
        reception = self._reception
        if reception is None:
            return
        reception.take_probe(None)
        if not reception.verified:
            self._reception, self._lingering, self._given_up_at = None, reception, self._clock.now()
            if all(await self._collective("rl_abort")):
                self._lingering = None
            else:
                self._settle()
            if self._lingering:
                log.warning(
                    "weights: version %d was given up (%s), but its broadcast still runs; the next one is received "
                    "after the broadcast has ended, within %g s",
                    *(reception.go.version, reason, reception.go.timeout_s),
                )
            self._fail(protocol.Failed(round=reception.go.round, reason=reason))

    def _fail(self, failed: protocol.Failed) -> None:
        """The round is over without a version."""
        self._say(failed)
        if failed.fatal:
            raise WeightsError(failed.reason)
        self._release_staging()

    def _release_staging(self) -> None:
        """The round is over and the staging copies may be overwritten: answer the offer that arrived meanwhile."""
        self._busy, self._reception = False, None
        if self._held:
            self._say(protocol.Hold(round=self._offered.round if self._offered else 0))
        elif self._lingering:
            return
        elif self._offered:
            self._pledged = True
            self._say(protocol.Ready(round=self._offered.round))
        self._offered = None

    def _require_end(self) -> None:
        """Raises WeightsError if the workers' threads of the round that was given up hang for ever: without their
        buckets this server would keep its policy, and only a new start gives it others."""
        if not self._lingering:
            return
        go, silent_s = self._lingering.go, self._clock.now() - self._given_up_at
        if silent_s > STUCK * go.timeout_s:
            number = self._lingering.workers - len(self._lingering.reports)
            raise WeightsError(
                f"version {go.version}: its broadcast was given up {silent_s:.0f} s ago, and {number} worker(s) still "
                "hang in it; see what the GPU or the network has logged"
            )

    def _settle(self) -> None:
        """Free the buckets of the abandoned round once all workers have reported."""
        if self._lingering and len(self._lingering.reports) >= self._lingering.workers:
            self._lingering = None
            if not self._busy:
                self._release_staging()

    def _say(self, message: Message) -> None:
        """Tell the learner, if there is one."""
        if self._connection:
            self._connection.say(message)

    async def _collective(self, method: str, *args: Any) -> list[Any]:
        return await self._engine.collective(method, *args, timeout_s=self._timeout_s)
