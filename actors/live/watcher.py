"""A run as it goes on: its records, the buffer's State, the overview, every second.

It waits for the clock, because nothing reports that a file grows.
"""

import asyncio
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from actors.watch.metrics_log import Records
from actors.watch.overview import Overview, look_over
from actors.watch.run_state import ending, last_life, stored, when
from actors.watch.state_poll import EVERY_S, StatePoll
from actors.watch.tuning import is_tuned, tuner
from buffer.curve import is_loopback
from buffer.keys import KeysError, NoKeys
from buffer.store.faults import StoreError
from buffer.wire.connection import RefusedError
from buffer.wire.protocol import State
from configs.load import ConfigError, load
from configs.schema import Config

log = logging.getLogger(__name__)
FILE_S = 10.0
"""Between two looks at a silent buffer's file."""


class Watcher:
    """`news` is notified after each look. Each launch writes `config.yaml` anew: then it is read again, with
    `overrides`."""

    def __init__(self, config: Config, run: Path, overrides: Sequence[str] = ()) -> None:
        self.config, self.run, self._overrides = config, run, overrides
        self._launched = self._written()
        self.records = Records(run / "metrics.jsonl", bounded=True)
        self._poll = StatePoll(config, "watch")
        self.news = asyncio.Condition()
        self.steady = asyncio.Lock()
        """Held by whoever looks, or reads `records` in a thread."""
        self._held: State | None = None
        self._read_at = -FILE_S
        self._trouble = ""
        self.overview = self._look()

    @property
    def state(self) -> State | None:
        return self._poll.state

    def look(self) -> None:
        """The caller holds `steady`."""
        self.records.read()
        self.overview = self._look()

    async def follow(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._ask())
            tasks.create_task(self._look_again())

    async def _look_again(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            async with self.steady:
                self.look()
            async with self.news:
                self.news.notify_all()

    async def _ask(self) -> None:
        while True:
            try:
                await self._poll.follow()
            except RefusedError as error:
                self._trouble = str(error)
                return
            except KeysError as error:  # a local run makes its keys when it starts
                waits = isinstance(error, NoKeys) and is_loopback(self.config.buffer.address)
                self._trouble = "" if waits else str(error)
            await asyncio.sleep(EVERY_S)

    def _written(self) -> float:
        try:
            return (self.run / "config.yaml").stat().st_mtime
        except FileNotFoundError:
            return 0.0

    def _read_config(self) -> None:
        """The launch that wrote a broken run file reports it."""
        written = self._written()
        if written == self._launched:
            return
        self._launched = written
        with suppress(ConfigError):
            words = [str(self.run / "config.yaml"), *self._overrides]
            self.config = self._poll.config = load(words, lenient=True, warn=log.warning)

    def _look(self) -> Overview:
        self._read_config()
        now, answers, ended = time.time(), self.state is not None or bool(tuner(self.config, self.run)), ""
        state = self.state
        if state is None:
            state = self._from_file()
            ended = ending(self.config, self.run, state, records=self.records)
        overview = look_over(self.config, self.records, state, now, ended, answers, self._launched)
        if overview.status != "silent" or is_tuned(self.config):
            return overview
        return replace(overview, summary=self._silence())

    def _silence(self) -> str:
        if self._trouble:
            return self._trouble
        life = last_life(self.config, self.run)
        since = f"the last sign of life was at {when(life)}" if life else "it has never been started"
        return f"the buffer at {self.config.buffer.address} does not answer; {since}"

    def _from_file(self) -> State | None:
        file = self.run / (self.config.buffer.path or "")
        if time.monotonic() >= self._read_at + FILE_S and file.is_file():
            self._read_at = time.monotonic()
            with suppress(StoreError):  # the file is being made
                self._held = stored(file)
        return self._held
