"""All learner ranks of the benchmark, in one process: take every batch, train nothing.

Run by `__main__.py`, which reads a line of JSON per batch: when the first and the last part had come, and their bytes.
`{"again": true}` on its input has the batch before taken over and over, as by learners that restart, until
`{"again": false}`.
"""

import json
import sys
import time
from dataclasses import dataclass, field
from typing import Any

import uvloop

from benchmarks.capacity.crowd import Crowd, PartArrived
from buffer.wire.message import Message
from buffer.wire.protocol import Finished, Rewind, Take, Trained


@dataclass
class TakeRound:
    """One batch, taken by all ranks at once."""

    version: int
    repeated: bool
    left: int
    times: list[float] = field(default_factory=list)
    bytes: int = 0


class Ranks:
    """`ranks` of them."""

    def __init__(self, address: str, fingerprint: str, given: dict[str, Any]) -> None:
        self.crowd = Crowd(address, fingerprint, "learner", given["ranks"], self._heard, given["start"])
        self.share_prompts = given["share_prompts"]
        self.version, self.again = 0, False
        self._rounds: dict[tuple[int, int], TakeRound] = {}
        """By rank and number of its Take."""

    def _take(self, version: int, repeated: bool) -> None:
        world = self.crowd.size
        taken = TakeRound(version, repeated, world)
        for rank in range(world):
            take = Take(version=version, rank=rank, world=world, share_prompts=self.share_prompts)
            self._rounds[rank, self.crowd.send(rank, take)] = taken

    def _heard(self, client: int, number: int, answer: Message, seconds: float, size: int) -> None:
        if isinstance(answer, Finished):
            raise RuntimeError(answer.why)
        if not isinstance(answer, PartArrived):
            return
        taken = self._rounds.pop((client, number))
        taken.times.append(time.time())
        taken.bytes += size
        taken.left -= 1
        if not taken.left:
            told = {"version": taken.version, "first": min(taken.times), "last": max(taken.times)}
            print(json.dumps(told | {"bytes": taken.bytes, "repeated": taken.repeated}), flush=True)
            self._next(taken)

    def _next(self, taken: TakeRound) -> None:
        if not taken.repeated:
            self.crowd.send(0, Trained(version=self.version, oldest_kept=max(self.version - 1, 0)))
            self.version += 1
            self._take(self.version, False)
        elif self.again:
            self._take(self.version - 1, True)

    def obey(self, line: bytes) -> None:
        """One command."""
        before, self.again = self.again, json.loads(line)["again"]
        if self.again and not before:
            assert self.version, "no batch was taken yet"
            self._take(self.version - 1, True)

    async def run(self) -> None:
        """Until the input ends."""
        self.crowd.start()
        await self.crowd.all_welcome()
        self.crowd.send(0, Rewind(version=0))
        print(json.dumps({"ready": True}), flush=True)
        self._take(0, False)
        await self.crowd.obey(self.obey)


if __name__ == "__main__":
    uvloop.run(Ranks(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])).run())
