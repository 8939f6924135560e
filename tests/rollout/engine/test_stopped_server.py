"""A rollout server that was stopped does not blame vLLM for that time."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from rollout.errors import EngineDead


def engine(answer: Any) -> Any:
    """An engine whose workers answer with what the coroutine `answer` gives."""
    from rollout.engine.scheduling.scheduler import Reports  # imports vLLM, which takes seconds
    from rollout.engine.vllm_engine import Engine

    living = asyncio.ensure_future(asyncio.Event().wait())
    llm: Any = SimpleNamespace(output_handler=living, collective_rpc=lambda method, args: answer())
    return Engine(llm, Reports(), None)


async def test_an_answer_that_came_while_the_server_was_stopped_counts() -> None:
    async def answer() -> list[bool]:
        for _ in range(20):  # through the sockets and tasks between vLLM's process and this one
            await asyncio.sleep(0)
        return [True]

    asked = asyncio.ensure_future(engine(answer).alive(0.3))
    await asyncio.sleep(0)
    time.sleep(1.3)  # the whole process stands still
    await asked


async def test_an_engine_that_gives_no_answer_is_dead() -> None:
    with pytest.raises(EngineDead, match=r"did not answer rl_ping within 0\.1 s"):
        await engine(asyncio.Event().wait).alive(0.1)
