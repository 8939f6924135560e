"""A poll of the buffer can be stopped, also in the moment in which the buffer answers."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from actors.watch import state_poll
from actors.watch.state_poll import StatePoll
from buffer.wire.protocol import State
from tests.harness.watched import make_config, state


class Silent:
    """A connection whose buffer answers when the test has it answer."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        self.answer: asyncio.Future[State] = asyncio.get_running_loop().create_future()
        self.asked = asyncio.Event()

    async def __aenter__(self) -> "Silent":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def expect(self, *arguments: Any) -> State:
        self.asked.set()
        return await self.answer


@pytest.mark.parametrize("turns", range(5))
def test_a_poll_that_is_cancelled_as_the_answer_comes_ends(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation comes so many turns of the loop after the answer. A poll that has lost it asks again."""
    monkeypatch.setattr(state_poll, "Connection", Silent)
    monkeypatch.setattr(state_poll, "EVERY_S", 0.0)

    async def test() -> None:
        poll = StatePoll(make_config(tmp_path), "watch")
        following = asyncio.create_task(poll.follow())
        while not poll.connection:
            await asyncio.sleep(0)
        connection: Any = poll.connection
        for _ in range(5):  # it waits for the answer
            await asyncio.sleep(0)
        answer, connection.answer = connection.answer, asyncio.get_running_loop().create_future()
        answer.set_result(state())
        for _ in range(turns):
            await asyncio.sleep(0)
        following.cancel()
        connection.asked.clear()
        again = asyncio.create_task(connection.asked.wait())
        await asyncio.wait({following, again}, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        assert following.cancelled()
        again.cancel()

    asyncio.run(test())
