"""A process that was stopped does not count that time."""

import asyncio
import time

from buffer.wire.awake import STOPPED_S, AwakeClock, wait_awake
from tests.harness.buffer_process import in_loop


class Seconds:
    """A monotonic clock that is set by hand."""

    at = 100.0

    def __call__(self) -> float:
        return self.at


def test_the_clock_moves_while_it_is_read_and_stands_still_over_a_stop() -> None:
    seconds = Seconds()
    clock = AwakeClock(seconds)
    began = clock.now()
    for _ in range(10):
        seconds.at += 0.5
        clock.now()
    assert clock.now() - began == 5.0
    seconds.at += 60.0
    assert clock.now() - began == 5.0
    seconds.at += STOPPED_S
    assert clock.now() - began == 6.0


@in_loop
async def test_an_answer_that_came_while_the_process_was_stopped_is_in_time() -> None:
    """`asyncio.wait` gives up: its timer is due before the answer, which takes a few turns of the loop, is read."""

    async def ask() -> str:
        for _ in range(20):
            await asyncio.sleep(0)
        return "answer"

    async def judge() -> bool:
        answer = asyncio.ensure_future(ask())
        waiting = asyncio.ensure_future(wait_awake([answer], 0.4))
        await asyncio.sleep(0)
        time.sleep(STOPPED_S + 0.2)  # the whole process stands still
        await waiting
        return answer.done()

    assert await judge()


@in_loop
async def test_the_wait_ends_at_its_timeout_where_nothing_comes() -> None:
    never: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    began = time.monotonic()
    await wait_awake([never], 0.1)
    await wait_awake([never], 0.0)
    assert 0.09 < time.monotonic() - began < 60.0
