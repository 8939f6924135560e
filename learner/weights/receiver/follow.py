"""A rollout server's end of the weights wire. Runs in the front process's event loop, beside generation.

`policies` yields each version once its buckets are in the workers' staging copies (`StagedPolicy`); the rollout loop then
pauses, loads and resumes. Workers without room for copies receive it during `load` instead (`StreamedPolicy`). Waits for:
the buffer, which knows the learner's address (`where`), the learner's offers, the workers' reports. When the learner
falls silent it asks `where` again and keeps trying the old address, whichever succeeds first.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable

import zmq
import zmq.asyncio

from buffer.curve import ClientKeys
from buffer.wire.message import Message
from configs.schema import WeightsConfig
from learner.weights.protocol import (
    PROTOCOL,
    TO_FRONT,
    Bye,
    Cancel,
    Failed,
    Go,
    Join,
    Joined,
    JoinRefused,
    Offer,
    Ready,
    Received,
    Rejoin,
    ServerWelcome,
    Staged,
    pack,
    unpack,
)
from learner.weights.receiver.learner_connection import LearnerConnection
from learner.weights.receiver.staged import ReceivingEngine, StagedPolicy, WeightsError
from learner.weights.receiver.streamed import StreamedPolicy

log = logging.getLogger(__name__)


class Receiver:
    """`where(known)` returns the learner's address as soon as there is one other than `known`
    (`buffer.wire.client.RolloutClient.where`)."""

    def __init__(
        self,
        where: Callable[[str | None], Awaitable[str]],
        engine: ReceivingEngine,
        name: str,
        config: WeightsConfig,
        keys: ClientKeys | None = None,
        heartbeat_s: float = 2.0,
    ) -> None:
        self.engine, self.timeout_s, self.heartbeat_s = engine, config.timeout_s, heartbeat_s
        self._where, self._name, self._keys, self._staging = where, name, keys, config.staging
        self._policies: asyncio.Queue[StagedPolicy | StreamedPolicy | BaseException] = asyncio.Queue()
        self._connection: LearnerConnection | None = None
        self._workers: list[dict[str, str]] = []
        self._digest, self._holds = "", ("", -1)
        self._go: Go | None = None
        """The round being received."""
        self._staged: list[Staged] = []
        """The workers' reports of that round."""
        self._busy = False
        """The staging copies must not be overwritten; an offer waits in `_offered`."""
        self._offered: Offer | None = None
        self._streams = False
        """Workers have room for two buckets only."""
        self._streaming: asyncio.Queue[Go | BaseException] | None = None
        """Rounds for the StreamedPolicy that has been yielded and is not in place yet."""
        self._in_place: asyncio.Future[bool] | None = None

    async def policies(self) -> AsyncGenerator[StagedPolicy | StreamedPolicy, None]:
        """Each new policy, verified by checksums. Load it before asking for the next. Raises WeightsError."""
        follow = asyncio.create_task(self._follow(), name="weights")
        follow.add_done_callback(self._hand_on_end)
        try:
            while True:
                policy = await self._policies.get()
                if isinstance(policy, BaseException):
                    raise policy
                yield policy
        finally:
            follow.cancel()
            await asyncio.wait([follow])

    def say(self, message: Message) -> None:
        """Tell the learner, if there is one."""
        if self._connection:
            self._connection.say(message)

    def release_staging(self) -> None:
        """The staging copies may be overwritten: answer the offer that arrived meanwhile."""
        self._busy = False
        if self._offered:
            self.say(Ready(round=self._offered.round))
            self._offered = None

    def _hand_on_end(self, follow: "asyncio.Task[None]") -> None:
        """Raise what ended `_follow` wherever somebody waits for it."""
        error = None if follow.cancelled() else follow.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = error or asyncio.CancelledError()
        self._policies.put_nowait(reason)
        if self._streaming:
            self._streaming.put_nowait(reason)
        if self._in_place and not self._in_place.done():
            self._in_place.set_exception(reason)

    async def _follow(self) -> None:
        """Follow the learner from address to address."""
        self._workers = await self.engine.collective("rl_describe", timeout_s=self.timeout_s)
        folder = tempfile.mkdtemp(prefix="headrace-")
        self._notify = f"ipc://{folder}/weights"
        try:
            with zmq.asyncio.Context() as context, context.socket(zmq.PULL) as pull:
                pull.bind(self._notify)
                async with asyncio.TaskGroup() as tasks:
                    tasks.create_task(self._collect(pull))
                    address = await self._where(None)
                    while True:
                        log.info("weights: the learner is at %s", address)
                        connection = LearnerConnection(context, address, self._keys, self.heartbeat_s)
                        address = await self._attend(connection)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _attend(self, connection: LearnerConnection) -> str:
        """Serve the learner at one address; returns its next address."""
        self._connection = connection
        await self._abandon("the learner was lost")
        seeking: asyncio.Future[str] | None = None
        try:
            while True:
                message = await connection.receive(self._join())
                if message is not None:
                    await self._on_message(message, connection)
                if connection.joined and seeking:
                    seeking.cancel()
                    seeking = None
                elif connection.lost and not seeking:
                    log.warning("weights: the learner at %s is silent; asking where it is", connection.address)
                    seeking = asyncio.ensure_future(self._where(connection.address))
                    seeking.add_done_callback(connection.wake)
                if seeking and seeking.done():
                    return seeking.result()
        finally:
            if seeking:
                seeking.cancel()
            connection.close()
            self._connection = None

    def _join(self) -> Join:
        session, version = self._holds
        return Join(
            name=self._name,
            protocol=PROTOCOL,
            workers=len(self._workers),
            backend=self._workers[0]["backend"],
            digest=self._digest,
            session=session,
            version=version,
        )

    async def _on_message(self, message: Message, connection: LearnerConnection) -> None:
        if isinstance(message, ServerWelcome):
            await self._prepare(message)
            self._digest, connection.heartbeat_s = message.digest, message.heartbeat_s
            self.say(self._join())
        elif isinstance(message, Joined):
            connection.joined, connection.lost = True, False
        elif isinstance(message, Offer):
            self._offered = message
            if not self._busy:
                self.release_staging()
        elif isinstance(message, Go):
            self._busy, self._go, self._staged = True, message, []
            await self._start(message)
        elif isinstance(message, Cancel):
            if self._go and self._go.round == message.round:
                await self._abandon(message.reason)
        elif isinstance(message, Rejoin | Bye):
            if isinstance(message, Rejoin) and connection.joined:
                log.warning("weights: the learner left this server out: %s", message.reason)
            connection.leave(lost=isinstance(message, Bye))
        elif isinstance(message, JoinRefused):
            raise WeightsError(message.reason)

    async def _prepare(self, welcome: ServerWelcome) -> None:
        """Have all workers allocate room: each for a copy, or all for two buckets."""
        for staging in (self._staging, "bucket"):
            answers = await self.engine.collective("rl_prepare", pack(welcome), staging, timeout_s=self.timeout_s)
            digests, modes = ({answer[part] for answer in answers} for part in (0, 1))
            if digests != {welcome.digest}:
                raise WeightsError(f"the plan of the weights is {digests} here, {welcome.digest} at the learner")
            if len(modes) == 1:
                break
        self._streams = modes == {"bucket"}
        log.info("weights: received %s", "into place, bucket by bucket" if self._streams else "into a staging copy")

    async def _start(self, go: Go) -> None:
        """Receive into the staging copies at once, or into place as soon as the engine is paused."""
        if not self._streams:
            await self.engine.collective("rl_receive", pack(go), self._notify, timeout_s=self.timeout_s)
            return
        if self._streaming is None:
            self._streaming = asyncio.Queue()
            policy = StreamedPolicy(go, self.engine, self.say, self.release_staging, self._receive_in_place)
            self._policies.put_nowait(policy)
        self._streaming.put_nowait(go)

    async def _receive_in_place(self) -> Go:
        """Receive a version into place while the engine is paused; returns its round. Waits for further rounds if one
        breaks: the engine must not resume with weights of two versions."""
        assert self._streaming is not None
        while True:
            go = await self._streaming.get()
            if isinstance(go, BaseException):
                raise go
            if go is not self._go:
                continue  # cancelled meanwhile
            self._in_place = asyncio.get_running_loop().create_future()
            await self.engine.collective("rl_receive", pack(go), self._notify, timeout_s=self.timeout_s)
            if await self._in_place:
                self._streaming = self._in_place = None
                return go

    async def _abandon(self, reason: str) -> None:
        """Stop receiving, unless everything has arrived. A stuck thread keeps its buckets; the next one gets others."""
        if self._go is None or len(self._staged) == len(self._workers):
            return
        go, self._go = self._go, None
        await self.engine.collective("rl_abort", timeout_s=self.timeout_s)
        self._fail(Failed(round=go.round, reason=reason))

    def _fail(self, failed: Failed) -> None:
        """The round is over without a version."""
        self.say(failed)
        if failed.fatal:
            raise WeightsError(failed.reason)
        self._go = None
        if self._in_place and not self._in_place.done():
            self._in_place.set_result(False)
        self.release_staging()

    async def _collect(self, pull: "zmq.asyncio.Socket") -> None:
        """Take the workers' reports; all but those of the current round are stale."""
        while True:
            staged = unpack(await pull.recv(), TO_FRONT)
            assert isinstance(staged, Staged)
            if self._go and staged.round == self._go.round:
                self._staged.append(staged)
                if len(self._staged) == len(self._workers):
                    self._on_all_staged(self._go)

    def _on_all_staged(self, go: Go) -> None:
        bad = max((staged for staged in self._staged if staged.reason), key=lambda staged: staged.fatal, default=None)
        if bad:
            log.warning("weights: version %d was not received: %s", go.version, bad.reason)
            return self._fail(Failed(round=go.round, reason=bad.reason, fatal=bad.fatal))
        self._holds = (go.session, go.version)
        receive_s, span_s = (max(getattr(staged, key) for staged in self._staged) for key in ("receive_s", "span_s"))
        self.say(Received(round=go.round, receive_s=receive_s, span_s=span_s))
        if self._in_place and not self._in_place.done():
            self._in_place.set_result(True)
        else:
            self._policies.put_nowait(StagedPolicy(go, self.engine, self.say, self.release_staging, self.timeout_s))
