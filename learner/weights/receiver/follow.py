"""A rollout server's end of the weights wire. Runs in the front process's event loop, beside generation.

`policies()` yields each version once its buckets are in the workers' staging copies; the rollout loop then pauses,
loads and resumes. Without room for copies it yields before they come, and `load` receives them into place. Waits for:
the buffer's word where the learner is (`where`), the learner's offers, the workers' word that everything came. When the
learner falls silent it asks `where` again and tries the old address on, whichever comes first.
"""

import asyncio
import logging
import shutil
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable

import zmq
import zmq.asyncio

from configs.schema import WeightsConfig
from learner.weights.protocol import (
    PROTOCOL,
    TO_FRONT,
    AskingKeys,
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
    WeightsMessage,
    pack,
    unpack,
)
from learner.weights.receiver.learner_connection import LearnerConnection
from learner.weights.receiver.staged import ReceivingEngine, StagedPolicy, WeightsError

log = logging.getLogger(__name__)


class Receiver:
    """`where(known)` gives the learner's address as soon as there is one other than `known`
    (`buffer.client.RolloutClient.where`)."""

    def __init__(
        self,
        where: Callable[[str | None], Awaitable[str]],
        engine: ReceivingEngine,
        name: str,
        config: WeightsConfig,
        keys: AskingKeys | None = None,
        heartbeat_s: float = 2.0,
    ) -> None:
        self.engine, self.timeout_s, self.heartbeat_s = engine, config.timeout_s, heartbeat_s
        self._staging = config.staging
        self._where, self._name, self._keys = where, name, keys
        self._ready: asyncio.Queue[StagedPolicy | BaseException] = asyncio.Queue()
        self._link: LearnerConnection | None = None
        self._workers: list[dict[str, str]] = []
        self._digest, self._holds = "", ("", -1)
        self._go: Go | None = None
        self._busy = False
        self._offered: Offer | None = None
        self._staged: list[Staged] = []
        self._streams = self._streaming = False
        self._gos: asyncio.Queue[Go | BaseException] = asyncio.Queue()
        self._arrived: asyncio.Future[bool] | None = None

    async def policies(self) -> AsyncGenerator[StagedPolicy, None]:
        """Each new policy, received and verified. Load it before asking for the next. Raises WeightsError."""
        follow = asyncio.create_task(self._follow(), name="weights")
        follow.add_done_callback(self._end)
        try:
            while True:
                policy = await self._ready.get()
                if isinstance(policy, BaseException):
                    raise policy
                yield policy
        finally:
            follow.cancel()
            await asyncio.wait([follow])

    async def stream(self) -> Go:
        """Receive a version right into place; returns what it was. Call it while the engine is paused.

        A broadcast that breaks leaves weights of two versions in place, so this waits on, for the next round and for
        the next learner if need be: the engine must not go on with them.
        """
        while True:
            go = await self._gos.get()
            if isinstance(go, BaseException):
                raise go
            if go is not self._go:
                continue  # cancelled in between
            self._arrived = asyncio.get_running_loop().create_future()
            await self.engine.collective("rl_receive", pack(go), self._notify, timeout_s=self.timeout_s)
            if await self._arrived:
                self._streaming = False
                return go

    def say(self, message: WeightsMessage) -> None:
        """Tell the learner, if there is one."""
        if self._link:
            self._link.say(message)

    def free(self) -> None:
        """The staging copies may be overwritten: answer the offer that came meanwhile."""
        self._busy = False
        if self._offered:
            self.say(Ready(round=self._offered.round))
            self._offered = None

    def _end(self, follow: "asyncio.Task[None]") -> None:
        error = None if follow.cancelled() else follow.exception()
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        reason = error or asyncio.CancelledError()
        self._ready.put_nowait(reason)
        self._gos.put_nowait(reason)
        if self._arrived and not self._arrived.done():
            self._arrived.set_exception(reason)

    async def _follow(self) -> None:
        """Stay with the learner, wherever it goes."""
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
                        address = await self._attend(LearnerConnection(context, address, self._keys, self.heartbeat_s))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _attend(self, link: LearnerConnection) -> str:
        """Stay with the learner at one address; returns its next."""
        self._link = link
        await self._abandon("the learner was lost")
        seeking: asyncio.Task[str] | None = None
        try:
            while True:
                message = await link.hear(self._join())
                if message is not None:
                    await self._take(message)
                if link.joined and seeking:
                    seeking.cancel()
                    seeking = None
                elif link.lost and not seeking:
                    log.warning("weights: the learner at %s is silent; asking where it is", link.address)
                    seeking = asyncio.create_task(_text(self._where(link.address)))
                    seeking.add_done_callback(link.wake)
                if seeking and seeking.done():
                    return seeking.result()
        finally:
            if seeking:
                seeking.cancel()
            link.close()
            self._link = None

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

    async def _take(self, message: WeightsMessage) -> None:
        assert self._link is not None
        if isinstance(message, ServerWelcome):
            await self._prepare(message)
            self._digest, self._link.heartbeat_s = message.digest, message.heartbeat_s
            self.say(self._join())
        elif isinstance(message, Joined):
            self._link.joined, self._link.lost = True, False
        elif isinstance(message, Offer):
            self._offered = message
            if not self._busy:
                self.free()
        elif isinstance(message, Go):
            self._busy, self._go, self._staged = True, message, []
            if not self._streams:
                await self.engine.collective("rl_receive", pack(message), self._notify, timeout_s=self.timeout_s)
                return
            self._gos.put_nowait(message)
            if not self._streaming:
                self._streaming = True
                self._ready.put_nowait(StagedPolicy(self, message, streams=True))
        elif isinstance(message, Cancel):
            if self._go and self._go.round == message.round:
                await self._abandon(message.reason)
        elif isinstance(message, Rejoin | Bye):
            if isinstance(message, Rejoin) and self._link.joined:
                log.warning("weights: the learner left this server out: %s", message.reason)
            self._link.leave(lost=isinstance(message, Bye))
        elif isinstance(message, JoinRefused):
            raise WeightsError(message.reason)

    async def _prepare(self, welcome: ServerWelcome) -> None:
        """Have all workers make room, each for a copy or all for two buckets."""
        for staging in (self._staging, "bucket"):
            answers = await self.engine.collective("rl_prepare", pack(welcome), staging, timeout_s=self.timeout_s)
            digests, modes = ({answer[part] for answer in answers} for part in (0, 1))
            if digests != {welcome.digest}:
                raise WeightsError(f"the plan of the weights is {digests} here, {welcome.digest} at the learner")
            if len(modes) == 1:
                break
        self._streams = modes == {"bucket"}
        log.info("weights: received %s", "into place, bucket by bucket" if self._streams else "into a staging copy")

    async def _abandon(self, reason: str) -> None:
        """Stop receiving, unless everything is here already. A thread that is stuck keeps its buckets; the next gets
        others."""
        if self._go is None or len(self._staged) == len(self._workers):
            return
        go, self._go = self._go, None
        await self.engine.collective("rl_abort", timeout_s=self.timeout_s)
        self.say(Failed(round=go.round, reason=reason))
        self._broke()

    def _broke(self) -> None:
        self._go = None
        if self._arrived and not self._arrived.done():
            self._arrived.set_result(False)
        self.free()

    async def _collect(self, pull: "zmq.asyncio.Socket") -> None:
        """The workers' word about what they received."""
        while True:
            staged = unpack(await pull.recv(), TO_FRONT)
            assert isinstance(staged, Staged)
            if not self._go or staged.round != self._go.round:
                continue  # of a round that was given up
            self._staged.append(staged)
            if len(self._staged) == len(self._workers):
                self._judge(self._go)

    def _judge(self, go: Go) -> None:
        bad = max((staged for staged in self._staged if staged.reason), key=lambda staged: staged.fatal, default=None)
        if bad is None:
            self._holds = (go.session, go.version)
            receive_s, span_s = (
                max(getattr(staged, key) for staged in self._staged) for key in ("receive_s", "span_s")
            )
            self.say(Received(round=go.round, receive_s=receive_s, span_s=span_s))
            if self._arrived and not self._arrived.done():
                self._arrived.set_result(True)
            else:
                self._ready.put_nowait(StagedPolicy(self, go, streams=False))
            return
        self.say(Failed(round=go.round, reason=bad.reason, fatal=bad.fatal))
        if bad.fatal:
            raise WeightsError(bad.reason)
        log.warning("weights: version %d did not come: %s", go.version, bad.reason)
        self._broke()


async def _text(answer: Awaitable[str]) -> str:
    return await answer
