"""Neither end of the weights wire blames the other for a time in which it was stopped itself."""

import asyncio
import ctypes

from tests.harness.weights_server import HEARTBEAT_S, Addresses, VersionedPolicy, servers
from tests.learner.weights.test_wire import a_sender


def stop_the_process(seconds: float) -> None:
    """Hold the interpreter: no Python thread of the process runs, as under SIGSTOP."""
    ctypes.PyDLL(None).usleep(int(seconds * 1e6))


def test_a_stop_of_both_ends_costs_no_member() -> None:
    async def test() -> None:
        with a_sender() as sender:
            addresses = Addresses(sender.address)
            async with servers(addresses, "rollout-0") as (one,):
                sender.publish(VersionedPolicy(0), 0)
                await one.has(0)
                stop_the_process(8 * HEARTBEAT_S)
                await asyncio.sleep(2 * HEARTBEAT_S)
                sender.publish(VersionedPolicy(1), 1)
                await one.has(1)
        assert sender.stats()["weights/failed"] == 0
        assert addresses.asked == [None], "the server did not look for another learner"

    asyncio.run(test())
