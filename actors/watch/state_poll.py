"""The buffer's State, asked for once a second over one connection, for all readers in a process."""

import asyncio

from buffer.keys import load_client_keys
from buffer.wire.connection import Connection
from buffer.wire.protocol import LAUNCHER, OBSERVER, State, Status
from configs.schema import Config

EVERY_S = 1.0
ANSWER_S = 3.0
"""After it the buffer counts as silent."""


class StatePoll:
    """Asks as the launcher, or as observer `name`. `config` may be replaced."""

    def __init__(self, config: Config, name: str) -> None:
        self.config, self.name = config, name
        self.state: State | None = None
        """None: the buffer is silent."""
        self.news = asyncio.Condition()
        self.connection: Connection | None = None
        """For requests after the first answer."""

    async def follow(self) -> None:
        """Ask until cancelled, or until `config` names another address. Raises KeysError, RefusedError."""
        address, role = self.config.buffer.address, LAUNCHER if self.name == LAUNCHER else OBSERVER
        keys = load_client_keys(self.config.run.path / "keys", role)
        async with Connection(address, self.name, role, keys=keys) as connection:
            self.connection = connection
            while self.config.buffer.address == address:
                try:
                    async with asyncio.timeout(ANSWER_S):
                        self.state = await connection.expect(Status(), State)
                except TimeoutError:
                    self.state = None
                async with self.news:
                    self.news.notify_all()
                await asyncio.sleep(EVERY_S)

    async def answer(self) -> tuple[State, Connection]:
        async with self.news:
            await self.news.wait()
            await self.news.wait_for(lambda: self.state)
        assert self.state and self.connection
        return self.state, self.connection
