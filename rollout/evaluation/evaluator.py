"""Evaluates while the run trains: claims an evaluation of the version just loaded, holds newer ones back, plays sets.

The buffer decides who evaluates what, after each load or, if a server died, after a heartbeat.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from buffer.wire.client import MessageTooLarge, RolloutClient
from buffer.wire.protocol import SetResult
from configs.entrypoint import unless
from configs.schema import Config
from rollout.concurrency import SparePlaces
from rollout.episodes.setup import RolloutSetup
from rollout.evaluation.players import ProblemSet, play

if TYPE_CHECKING:
    from learner.weights.receiver.follow import Receiver
    from rollout.engine.vllm_engine import Engine

log = logging.getLogger(__name__)
CLAIM_S = 10.0
"""Longest wait for the buffer, at most a quarter of `weights.timeout_s`: the learner waits meanwhile."""


class Evaluator:
    """A server without `sets` evaluates nothing."""

    def __init__(
        self,
        config: Config,
        setup: RolloutSetup,
        engine: "Engine",
        buffer: RolloutClient,
        weights: "Receiver",
        places: SparePlaces,
        sets: list[ProblemSet],
    ) -> None:
        self.sets, self.places = sets, places
        self.steady = asyncio.Lock()
        """Held while a version is loaded or evaluated: never both."""
        self._config, self._setup, self._engine, self._buffer, self._weights = config, setup, engine, buffer, weights
        self._loaded = False
        """vLLM has a policy, not dummy weights."""
        self._unanswered = False
        """The buffer has not answered the last claim."""

    async def claim(self) -> int | None:
        """Call between `load` and `loaded`; a due evaluation holds newer versions back until `evaluate` is done."""
        self._loaded = True
        due = await self._claim()
        if due is not None:
            self._weights.hold(loading=True)
        return due

    async def idle(self) -> bool:
        """Wait until nothing is loaded or evaluated, and repeat unanswered claims; return whether there were any."""
        asked = False
        async with self.steady:
            while self._unanswered and self._weights.hold():  # else the version on its way is claimed when it is loaded
                asked = True
                await self._claim_held()
        return asked

    async def take_over(self) -> None:
        while True:
            await self._buffer.evaluation_due.wait()
            self._buffer.evaluation_due.clear()
            async with self.steady:
                if not self._loaded or not self._weights.hold():
                    continue
                await self._claim_held()

    async def evaluate(self, due: int) -> None:
        """Play all sets and report; end early once the claim is lost."""
        version = self._engine.version
        log.info("evaluating version %d on %s", version, ", ".join(each.name for each in self.sets))
        try:
            results = await unless(self._buffer.evaluation_over, self._play())
        finally:
            self._weights.release()
        if results is None:
            log.warning("this server has lost its claim to evaluate version %d", version)
            self._buffer.evaluating = None
            return
        try:
            stored = await self._buffer.evaluated(due, version, results)
        except MessageTooLarge as error:
            log.warning("the answers of this evaluation are not kept for reading: %s", error)
            figures = {name: one.model_copy(update={"examples": []}) for name, one in results.items()}
            stored = await self._buffer.evaluated(due, version, figures)
        log.info("version %d is evaluated%s", version, "" if stored.accepted else f", but not used: {stored.reason}")

    async def _claim_held(self) -> None:
        due = await self._claim()
        if due is None:
            self._weights.release()
        else:
            await self.evaluate(due)

    async def _claim(self) -> int | None:
        if not self.sets:
            return None
        self._unanswered = True
        try:
            async with asyncio.timeout(min(CLAIM_S, self._config.weights.timeout_s / 4)):
                due = await self._buffer.claim(self._engine.version)
        except TimeoutError:
            return None
        self._unanswered = False
        return due

    async def _play(self) -> dict[str, SetResult]:
        """All sets share one tail of long answers."""
        keep = self._config.eval.keep_samples
        async with asyncio.TaskGroup() as tasks:
            playing = {
                each.name: tasks.create_task(
                    play(each, each.episodes(self._config, self._setup, self._engine), self.places, keep)
                )
                for each in self.sets
            }
        played = {name: task.result() for name, task in playing.items()}
        return {
            name: SetResult(figures=one.figures, reasons=one.reasons, examples=one.examples)
            for name, one in played.items()
        }
