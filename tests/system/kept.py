"""A run whose supervisor is in this process, so that a test can kill its processes during the run.

Buffer, keepers and supervisor are real; servers, learner and reward servers are the stand-ins of
`failures/stand_ins.py`.
"""

import asyncio
import io
import sys
import time
from collections.abc import Callable, Coroutine
from contextlib import closing
from dataclasses import replace
from typing import Any

import psutil
from rich.console import Console

from actors.process import Process, Restarts, Role
from actors.supervise.launch import prepare, processes
from actors.supervise.one_machine import OneMachine, PlainKeeper
from actors.supervise.supervisor import Supervisor
from actors.watch.display import Display
from buffer.store.sqlite import reading
from configs.schema import Config
from tests.harness.toy import Run

LIMIT_S = 200.0
QUICK = Restarts(first_s=0.1, most_s=0.5)


class KeptRun:
    """`await run(scene())` runs the processes to the end of the run, with the scene in parallel; returns the exit code.

    No process is left afterwards.
    """

    def __init__(self, config: Config) -> None:
        self.config, self.keepers = config, list[PlainKeeper]()
        self.machine = OneMachine([])
        self.terminal = io.StringIO()

    async def run(self, scene: Coroutine[Any, Any, None]) -> int:
        file, module = str(prepare(self.config)), (sys.executable, "-m", "tests.system.failures.stand_ins")
        kept = [
            replace(process, restarts=QUICK)
            if process.role == "buffer"
            else replace(process, argv=(*module, process.role, file), restarts=QUICK)
            for process in processes(self.config)
        ]
        display = Display(self.config, Console(file=self.terminal, highlight=False, soft_wrap=True))
        supervisor = Supervisor(kept, self._place, display.show_event, display.say)
        try:
            async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as tasks:
                tasks.create_task(scene)
                code = await supervisor.run()
        finally:
            for keeper in self.keepers:
                await keeper.kill()
        assert Run(self.config.run.path).left_behind() == []
        return code

    async def _place(self, process: Process) -> PlainKeeper:
        self.keepers.append(await self.machine.place(process))
        return self.keepers[-1]

    async def until(self, holds: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + LIMIT_S / 2
        while not holds():
            assert time.monotonic() < deadline, f"no {what}: {self.terminal.getvalue()}"
            await asyncio.sleep(0.02)

    def log(self, name: str) -> str:
        file = self.config.run.path / "logs" / f"{name}.log"
        return file.read_text() if file.exists() else ""

    def trained(self) -> int:
        """Batches trained so far."""
        journal = self.config.run.path.parent / "journal.jsonl"
        return len(journal.read_text().splitlines()) if journal.exists() else 0

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the ledger's file."""
        with closing(reading(self.config.run.path / "buffer.sqlite")) as database:
            return database.execute(sql).fetchall()

    def kill(self, role: Role) -> None:
        """SIGKILL to the process of this role."""
        file = str(self.config.run.path / "config.yaml")
        module = "buffer" if role == "buffer" else "tests.system.failures.stand_ins"
        words = ("-m", module, file) if role == "buffer" else ("-m", module, role, file)
        every = [(process, process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
        (victim,) = [process for process, line in every if tuple(line[1:]) == words]
        victim.kill()
