"""All learner ranks of the benchmark, in one process: take every batch, train nothing, and send every message that
ranks send.

Run by `__main__.py`, which reads a line of JSON per batch: when the first and the last part had come, and their bytes.
After `{"again": true}` on its input the ranks take the previous batch again and again, like learners that restart,
until `{"again": false}`.
"""

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.capacity.crowd import Crowd, PartArrived
from buffer.keys import load_client_keys
from buffer.wire.message import Message
from buffer.wire.protocol import Finished, Results, Rewind, Take, Trained
from configs.inner_command import inner_words


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
        keys = load_client_keys(Path(given["keys"]), "learner")
        self.crowd = Crowd(address, fingerprint, "learner", given["ranks"], self._heard, given["start"], keys)
        self.share_prompts = given["share_prompts"]
        self.version, self.again = 0, False
        self._rounds: dict[tuple[int, int], TakeRound] = {}
        """By rank and number of its Take."""
        self._trained: dict[tuple[int, int], int] = {}
        """The version of each Trained, by rank and message number."""
        self.acks: defaultdict[int, list[float]] = defaultdict(list)
        """How long the answers to Trained took, by version."""

    def _take(self, version: int, repeated: bool) -> None:
        """Take a batch, each rank its part. The next one follows after each rank has sent Trained for the previous
        one."""
        world = self.crowd.size
        taken = TakeRound(version, repeated, world)
        for rank in range(world):
            if version and not repeated:
                self._trained[rank, self.crowd.send(rank, trained_before(version))] = version - 1
            take = Take(version=version, rank=rank, world=world, share_prompts=self.share_prompts)
            self._rounds[rank, self.crowd.send(rank, take)] = taken

    def _heard(self, client: int, number: int, answer: Message, seconds: float, size: int) -> None:
        if isinstance(answer, Finished):
            raise RuntimeError(answer.why)
        if (version := self._trained.pop((client, number), None)) is not None:
            self.acks[version].append(seconds)
            return
        if not isinstance(answer, PartArrived):
            return
        taken = self._rounds.pop((client, number))
        taken.times.append(time.time())
        taken.bytes += size
        taken.left -= 1
        if not taken.left:
            told = {"version": taken.version, "first": min(taken.times), "last": max(taken.times)}
            told |= {"bytes": taken.bytes, "repeated": taken.repeated}
            print(json.dumps(told | {"trained": self.acks.pop(taken.version - 1, [])}), flush=True)
            self._next(taken)

    def _next(self, taken: TakeRound) -> None:
        if not taken.repeated:
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
        for rank in range(self.crowd.size):
            self.crowd.send(rank, Rewind(version=0))
            self.crowd.send(rank, Results(known=[]))
        print(json.dumps({"ready": True}), flush=True)
        self._take(0, False)
        await self.crowd.obey(self.obey)


def trained_before(version: int) -> Trained:
    """The message that each rank sends before it takes batch `version`."""
    return Trained(version=version - 1, oldest_kept=max(version - 2, 0))


if __name__ == "__main__":
    inner_words("ADDRESS", "FOLDER", "SETTINGS")
    uvloop.run(Ranks(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])).run())
