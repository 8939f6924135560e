"""One case as a run with real processes and keepers: what the terminal, the logs and status say, and after how long.

Buffer, reward workers, both loops, keepers, supervisor and display are the real ones; the learner trains nothing, and
the engine answers at once (`stand_ins.py`). Supervisor and keepers are in this process.
"""

import asyncio
import io
import json
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from rich.console import Console

from actors.process import Process
from actors.supervise.launch import prepare, processes
from actors.supervise.one_machine import OneMachine, PlainKeeper
from actors.supervise.supervisor import Supervisor
from actors.watch.display import Display
from actors.watch.run_state import ask, ledger_lines, stored, waits
from actors.watch.state_poll import StatePoll
from buffer.curve import client_keys_for, endpoint, identify
from buffer.wire.protocol import LAUNCHER, State
from configs.load import load
from configs.schema import Config
from tests.harness.ports import free_port
from tests.system.failures.cases import Case

LIMIT_S = 400.0
LOOK_S, ANSWER_S = 0.5, 5.0
"""Between two looks at status, and for the buffer's answer to one."""


@dataclass
class Story:
    """What happened; times in seconds from the launch, of the first mention of `Case.says`."""

    case: Case
    code: int = -1
    seconds: float = 0.0
    text: str = ""
    """All that the terminal showed."""
    status: str = ""
    """The line of status that shows it last."""
    logs_bytes: int = 0
    """Size of all logs of the run."""
    seen: dict[str, float] = field(default_factory=dict)
    """By place: `terminal`, `status`, `logs/NAME.log`."""


def run_file(case: Case, folder: Path) -> Config:
    """Write the case's files and its run file; returns the latter, read."""
    (folder / "user.py").write_text(case.source())
    rows = [{"problem": f"{n} " + "and so on " * 10 * case.long, "answer": str(n)} for n in range(case.rows)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "calm").touch()  # the engine does not pause
    sections: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "folder": str(folder), "versions": 4},
        "model": {"path": "none"},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 24},
        "reward": {"function": f"{folder / 'user.py'}:score", "timeout_s": 60.0},
        "sampling": {"max_tokens": 8},
        "batch": {"groups": 8, "samples": 2},
        "learner": {"device": "cpu"},
        "rollout": {"sequences": 16, "heartbeat_s": 0.5, "device": "cpu"},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}", "fsync": False},
        "log": {"display": "plain"},
    }
    if case.task:
        sections["rollout"]["task"] = f"{folder / 'user.py'}:task"
    for section, values in case.settings.items():
        sections[section] = sections.get(section, {}) | values
    (folder / "run.yaml").write_text(json.dumps(sections))  # JSON is YAML
    return load([str(folder / "run.yaml")])


def tell(case: Case, folder: Path) -> Story:
    """Run the case in `folder` to its end, or for LIMIT_S."""
    return asyncio.run(_Telling(case, run_file(case, folder)).tell())


class _Telling:
    """One run of a case."""

    def __init__(self, case: Case, config: Config) -> None:
        self.story, self.config, self.began = Story(case), config, time.monotonic()
        self.terminal = io.StringIO()
        self.display = Display(config, Console(file=self.terminal, highlight=False, soft_wrap=True))
        self.keepers: list[PlainKeeper] = []
        self.machine = OneMachine([])

    async def tell(self) -> Story:
        file, story = str(prepare(self.config)), self.story
        stand_in = (sys.executable, "-m", "tests.system.failures.stand_ins")
        plain = [
            process if process.role == "buffer" else replace(process, argv=(*stand_in, process.role, file))
            for process in processes(self.config)
        ]
        poll = StatePoll(self.display.config, LAUNCHER)
        watches = [poll.follow(), self.display.watch(poll), self._watch()]
        others = [asyncio.create_task(task) for task in watches]
        if story.case.flood:
            others.append(asyncio.create_task(flood(self.config)))
        supervisor = Supervisor(plain, self._place, self.display.show_event, self.display.say)
        try:
            story.code = await asyncio.wait_for(supervisor.run(), LIMIT_S)
        finally:
            for keeper in self.keepers:
                await keeper.kill()
            for other in others:
                other.cancel()
        self._look(stored(self.config.run.path / "buffer.sqlite"))  # a short run may be over between two looks
        folder = f"{self.config.run.folder}/"
        story.seconds = time.monotonic() - self.began
        story.logs_bytes = sum(file.stat().st_size for file in (self.config.run.path / "logs").iterdir())
        story.text, story.status = self.terminal.getvalue().replace(folder, ""), story.status.replace(folder, "")
        return story

    async def _place(self, process: Process) -> PlainKeeper:
        self.keepers.append(await self.machine.place(process))
        return self.keepers[-1]

    async def _watch(self) -> None:
        """Look until cancelled."""
        while True:
            self._look(await ask(self.config, ANSWER_S))
            await asyncio.sleep(LOOK_S)

    def _look(self, state: State | None) -> None:
        """Note where the case's words have come up."""
        story, seconds = self.story, time.monotonic() - self.began
        place = f"logs/{story.case.log}.log"
        log = self.config.run.path / place
        status = "\n".join([*ledger_lines(state), *waits(state, self.config)]) if state else ""
        texts = {"terminal": self.terminal.getvalue(), "status": status}
        texts[place] = log.read_text(errors="replace") if log.exists() else ""
        if story.case.early and story.case.early in status:
            story.seen.setdefault(f"status ({story.case.early})", seconds)
        for place, text in texts.items():
            if story.case.says and story.case.says in text:
                story.seen.setdefault(place, seconds)
        lines = [line for line in status.splitlines() if story.case.says and story.case.says in line]
        story.status = next(iter(lines), story.status)


async def flood(config: Config) -> None:
    """Send the buffer malformed messages until cancelled."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        keys = client_keys_for(config.buffer.address, config.run.path, "rollout")
        identify(socket, keys, config.buffer.address)
        socket.connect(endpoint(config.buffer.address, keys.folder))
        while True:
            for _ in range(500):
                await socket.send(b"rubbish")
            await asyncio.sleep(0.01)
