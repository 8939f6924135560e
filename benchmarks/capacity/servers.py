"""All rollout servers of the benchmark, in one process: ask for work, beat, put groups at a given pace.

Run by `__main__.py`, which writes one JSON object a line: `{"rate": 9.5}` puts so many groups a second, `{"at_once":
64}` keeps so many Puts on their way, `{"version": 3}` is the learner's, `{"report": true}` is answered with what was
measured since the last one, on a line.
"""

import asyncio
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import uvloop

from benchmarks.capacity.crowd import Crowd
from buffer.keys import load_client_keys
from buffer.wire.message import Array, Message
from buffer.wire.protocol import Ask, Finished, Heartbeat, News, Stored, Work, WorkItem
from buffer.wire.sample import Sample
from configs.inner_command import inner_words

TICK_S = 0.005
PROMPT = 256


class Servers:
    """`size` of them with `room` groups each; groups have `samples` samples of `tokens` tokens."""

    def __init__(self, address: str, fingerprint: str, given: dict[str, Any]) -> None:
        keys = load_client_keys(Path(given["keys"]), "rollout")
        self.crowd = Crowd(address, fingerprint, "rollout", given["servers"], self._heard, given["start"], keys)
        self.room, self.samples, self.tokens = given["room"], given["samples"], given["tokens"]
        self.heartbeat_s = given["heartbeat_s"]
        self.version, self.rate, self.at_once = 0, 0.0, 0
        self.under_way = 0
        self.waiting: deque[tuple[int, WorkItem]] = deque()
        """Leased groups that are yet to be put, by their server."""
        self.held: list[set[int]] = [set() for _ in range(self.crowd.size)]
        self.asking = [False] * self.crowd.size
        self.requests = 0
        self.puts: list[tuple[float, float]] = []
        """Time of the answer, and how long it took."""
        self.beats: list[float] = []
        self.asks: list[float] = []
        self._tails: dict[int, bytes] = {}

    def _heard(self, client: int, number: int, answer: Message, seconds: float, size: int) -> None:
        if isinstance(answer, Stored):
            self.puts.append((time.time(), seconds))
            self.under_way -= 1
            self._put_more()
            self._ask(client)
        elif isinstance(answer, News):
            self.beats.append(seconds)
            self.held[client].difference_update(answer.revoked)
        elif isinstance(answer, Work):
            self.asks.append(seconds)
            self.asking[client] = False
            for item in answer.items:
                self.held[client].add(item.lease)
                self.waiting.append((client, item))
            self._ask(client)
            self._put_more()
        elif isinstance(answer, Finished):
            raise RuntimeError(answer.why)

    def _ask(self, client: int) -> None:
        room = self.room - len(self.held[client])
        if room > 0 and not self.asking[client]:
            self.asking[client] = True
            self.requests += 1
            self.crowd.send(client, Ask(request=self.requests, version=self.version, room=room))

    def _put_more(self) -> None:
        while self.waiting and self.under_way < self.at_once:
            self._put()

    def _put(self) -> None:
        client, item = self.waiting.popleft()
        if item.lease not in self.held[client]:
            return
        self.held[client].discard(item.lease)
        self.under_way += 1
        tail = self._tail(item.version)
        head = {"kind": "Put", "id": 0, "item": item.item, "lease": item.lease}

        def frame(number: int) -> bytes:
            packed: bytes = msgpack.packb(head | {"id": number})
            return b"\x85" + packed[1:] + tail  # a map of five: `samples` follows

        self.crowd.send_frame(client, frame)

    def _tail(self, version: int) -> bytes:
        """The field `samples` of a group made under `version`."""
        if version not in self._tails:
            sampled = (np.arange(self.tokens) >= min(PROMPT, self.tokens // 2)).astype(np.uint8)
            sample = Sample(
                tokens=Array.of(np.arange(self.tokens, dtype=np.int32)),
                sampled=Array.of(sampled),
                behaviour_logprobs=Array.of(np.zeros(self.tokens, np.float32)),
                versions=Array.of(np.where(sampled, version, -1).astype(np.int32)),
                reward=1.0,
                finish="stop",
            ).pack()
            if len(self._tails) > 8:
                self._tails.clear()
            self._tails[version] = msgpack.packb("samples") + msgpack.packb([sample] * self.samples)
        return self._tails[version]

    async def beat(self) -> None:
        """Each server every `heartbeat_s`, evenly spread."""
        at, size = 0, self.crowd.size
        last = [0] * size
        began = time.monotonic()
        while True:
            due = int((time.monotonic() - began) / self.heartbeat_s * size)
            for client in range(at, due):
                which = client % size
                if self.crowd.waits(which, last[which]):  # as a server, which waits for the answer to its last one
                    continue
                stats = {"running": 64.0, "waiting": 0.0, "places": 64.0, "tokens_per_s": 1e4}
                beat = Heartbeat(version=self.version, holding=sorted(self.held[which]), stats=stats)
                last[which] = self.crowd.send(which, beat)
            at = max(at, due)
            await asyncio.sleep(TICK_S)  # a pace, not a wait for anything

    async def pace(self) -> None:
        """`rate` Puts a second."""
        owed, last = 0.0, time.monotonic()
        while True:
            now = time.monotonic()
            owed, last = min(owed + self.rate * (now - last), 64.0), now
            while owed >= 1.0 and self.waiting:
                self._put()
                owed -= 1.0
            await asyncio.sleep(TICK_S)

    def obey(self, line: bytes) -> None:
        """One command."""
        command = json.loads(line)
        self.rate = command.get("rate", 0.0 if "at_once" in command else self.rate)
        self.at_once = command.get("at_once", 0 if "rate" in command else self.at_once)
        self.version = command.get("version", self.version)
        self._put_more()
        if "report" in command:
            leased = sum(map(len, self.held))
            found = {"puts": self.puts, "beats": self.beats, "asks": self.asks}
            print(json.dumps(found | {"leased": leased, "under_way": self.under_way}), flush=True)
            self.puts, self.beats, self.asks = [], [], []

    async def run(self) -> None:
        """Until the commands end."""
        self.crowd.start()
        await self.crowd.all_welcome()
        for client in range(self.crowd.size):
            self._ask(client)
        print(json.dumps({"ready": True}), flush=True)
        await self.crowd.obey(self.obey, self.beat(), self.pace())


if __name__ == "__main__":
    inner_words("ADDRESS", "FOLDER", "SETTINGS")
    uvloop.run(Servers(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])).run())
