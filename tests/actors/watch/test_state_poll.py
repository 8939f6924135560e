"""Whoever looks at the buffer stops when told, also in the moment in which it answers."""

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

    async def __aenter__(self) -> "Silent":
        return self

    async def __aexit__(self, *error: object) -> None:
        pass

    async def expect(self, *arguments: Any) -> State:
        return await self.answer


@pytest.mark.parametrize("turns", range(5))
def test_a_poll_that_is_cancelled_as_the_answer_comes_ends(
    turns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation comes so many turns of the loop after the answer."""
    monkeypatch.setattr(state_poll, "Connection", Silent)

    async def test() -> None:
        poll = StatePoll(make_config(tmp_path), "watch")
        following = asyncio.create_task(poll.follow())
        while not poll.connection:
            await asyncio.sleep(0)
        for _ in range(5):  # it waits for the answer
            await asyncio.sleep(0)
        poll.connection.answer.set_result(state())  # type: ignore[attr-defined]
        for _ in range(turns):
            await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait({following}, timeout=60)
        assert following.cancelled()

    asyncio.run(test())
