"""The server's end of agents that reach the policy by URL."""

import asyncio
from typing import Any

from configs.schema import Config
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.chat.door import ChatServer, Door
from rollout.chat.session import Sessions
from rollout.tasks.trajectory import CUT_SCORE, Generate, Problem, Recorded

REFUSALS = ("BadRequestError", "ContextWindowExceededError", "ChatRefused")
"""Origins of model calls that were refused beyond a limit."""
HTTP_ERRORS = ("HTTPError", "HTTPStatusError", "APIStatusError", "ClientResponseError")
"""Refusals if the text has the status 400."""


BLOCKED_S = 3.0
"""Agents that share a worker get more time, until its warden finds the one that blocks it."""


class UrlEpisodes:
    """Plays episodes of agents, as a task."""

    def __init__(self, config: Config, function: CagedFunction, cage: Cage, sessions: Sessions) -> None:
        self.function, self.server = function, ChatServer(config.rollout.chat, config.sampling.temperature)
        self._cage, self._sessions = cage, sessions
        self._hosted, self._command = config.rollout.task == "environment", config.rollout.task == "agent"

    async def __call__(self, problem: Problem, generate: Generate) -> Recorded:
        """Raises CagedError, and what the engine raised."""
        session, limit_s = self._sessions.open(generate, problem), self.function.timeout_s
        limit = f"{self.function.prefix}timeout_s ({limit_s:g} s) outside of model calls"
        late = CagedError(f"{self.function.name} took longer than {limit}; it was ended", "timed_out")
        more_s = 0.0 if self._cage.about["apart"] else BLOCKED_S
        with self.server.admit(session, limit_s + more_s, late) as door:
            try:
                result = await self._result(door, problem)
            except CagedError as error:
                if session.error:
                    raise session.error from error
                if self._hosted and error.origin in ("died", "unloadable"):  # nobody knows which episode did it
                    error.kind = "infrastructure"
                if not session.truncated or not self._is_refusal(error):
                    raise
                result = CUT_SCORE
        recorded = session.recorded(result)
        recorded.trajectory.metrics["ignored_settings"] = float(door.ignored)
        return recorded

    def _is_refusal(self, error: CagedError) -> bool:
        """Whether refused model calls made an agent fail. A program shows only its exit code."""
        bad_request = error.origin in HTTP_ERRORS and "400" in str(error)
        return bad_request or error.origin in REFUSALS or (self._command and error.origin == "exited")

    async def _result(self, door: Door, problem: Problem) -> Any:
        sampling = [{"max_tokens": problem.answer}] if self._hosted else []
        playing = self._cage.call(problem.row, door.url, door.key, *sampling, on_worker=door.on_worker)
        call = asyncio.ensure_future(playing)
        call.add_done_callback(lambda call: call.cancelled() or call.exception())  # if the door was faster, it decides
        try:
            await asyncio.wait({call, door.over}, return_when=asyncio.FIRST_COMPLETED)
            return door.over.result() if door.over.done() else call.result()
        finally:
            call.cancel()
