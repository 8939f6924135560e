"""Calls to a server's vLLM workers to receive weights, and their reports."""

import logging
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import zmq
import zmq.asyncio

from configs.variables import WEIGHTS_BYTES, socket_folder
from learner.weights.protocol import TO_FRONT, Go, ServerWelcome, Staged, pack, unpack
from learner.weights.receiver.staged import ReceivingEngine, WeightsError

log = logging.getLogger(__name__)
WHERE = {
    "bucket": "into place, bucket by bucket",
    "full": "into a staging copy",
    "slices": "into a staging copy of what each worker loads",
}


class Workers:
    """The workers of `engine`. `staging`: `weights.staging`."""

    def __init__(self, engine: ReceivingEngine, timeout_s: float, staging: str) -> None:
        self.engine, self.timeout_s, self._staging = engine, timeout_s, staging
        self._notify = ""
        self.streams = False

    async def describe(self) -> tuple[int, str]:
        workers = await self.engine.collective("rl_describe", timeout_s=self.timeout_s)
        return len(workers), str(workers[0]["backend"])

    async def prepare(self, welcome: ServerWelcome) -> None:
        """Have all workers allocate room: each for a copy, or all for two buckets. Raises WeightsError."""
        theirs = welcome.digest, welcome.trained
        for staging in (self._staging, "bucket"):
            answers = await self.engine.collective("rl_prepare", pack(welcome), staging, timeout_s=self.timeout_s)
            digests, modes = {tuple(answer[:2]) for answer in answers}, {answer[2] for answer in answers}
            if digests != {theirs}:
                raise WeightsError(f"the plans of the weights are {digests} here, {theirs} at the learner")
            if "bucket" not in modes or len(modes) == 1:
                break
        self.streams = modes == {"bucket"}
        log.info("weights: received %s", ", ".join(WHERE[mode] for mode in sorted(modes)))

    async def receive(self, go: Go) -> None:
        await self.engine.collective("rl_receive", pack(go), self._notify, timeout_s=self.timeout_s)

    async def abort(self) -> bool:
        """Returns whether all buckets are free."""
        return all(await self.engine.collective("rl_abort", timeout_s=self.timeout_s))

    @contextmanager
    def reporting(self, context: zmq.asyncio.Context) -> Iterator[zmq.asyncio.Socket]:
        folder = tempfile.mkdtemp(prefix="headrace-", dir=socket_folder(WEIGHTS_BYTES))
        self._notify = f"ipc://{folder}/weights"
        try:
            with context.socket(zmq.PULL) as socket:
                socket.bind(self._notify)
                yield socket
        finally:
            shutil.rmtree(folder, ignore_errors=True)


async def next_report(socket: zmq.asyncio.Socket) -> Staged:
    """The next report of a worker."""
    staged = unpack(await socket.recv(), TO_FRONT)
    assert isinstance(staged, Staged)
    return staged
