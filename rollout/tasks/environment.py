"""In a worker: an environment's host process, in the Python that the environment is installed in, and its episodes.

The worker ends as the host ends: the cage starts both anew.
"""

import asyncio
import json
import os
import signal
import subprocess
from contextlib import suppress
from contextvars import Context
from itertools import count
from pathlib import Path
from subprocess import PIPE
from typing import Any, NoReturn

from configs.plain_text import print_visible
from rollout.cage import GRACE_S
from rollout.cage.failure_text import ToldError
from rollout.tasks.programs import Play, timed_by_server

HOST = Path(__file__).parents[1] / "hosts" / "verifiers_host.py"
OUR_PYTHON = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
"""With these the host's Python would find our packages."""
RESULT = ("score", "overall", "turn_rewards")
"""No metric may take the reward's place."""
LONGEST_LINE = 2**26
LAST_ANSWERS_S = 1.0
"""Time to read what a host wrote before its end, where processes that it forked keep its pipe open."""


def load_environment(environment: dict[str, Any]) -> Play:
    """Return the episodes of `rollout.environment`. Raises ValueError."""
    name = environment_name(environment)
    relay = Relay(start_host(environment))

    async def play(
        row: dict[str, Any], base_url: str, api_key: str, sampling: dict[str, Any], generate: object
    ) -> dict[str, Any]:
        given = (row.get("extra_info") or {}).get("row")
        if given is None:
            remedy = "make the rows with `verifiers_host.py export` (docs/agents.md)"
            raise ToldError("KeyError", f"{name}: the row of the data has no extra_info.row; {remedy}", permanent=True)
        result = await relay.ask({"row": given, "url": base_url, "sampling": sampling})
        if not result.get("ok"):
            raise ToldError("environment", f"{name}: its episode failed: {result.get('error') or result.get('stop')}")
        metrics = {name: value for name, value in (result.get("metrics") or {}).items() if name not in RESULT}
        return {**metrics, "score": result["reward"]}

    return timed_by_server(play, apart=False)


def environment_name(environment: dict[str, Any]) -> str:
    return f"environment {environment['id']}"


def start_host(environment: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Wait until the environment is loaded. Raises ValueError."""
    python, key = os.path.abspath(environment["python"]), "rollout.environment"
    command = [python, "-u", str(HOST), "serve", environment["id"], json.dumps(environment["args"])]
    path = os.pathsep.join([os.path.dirname(python), os.environ.get("PATH", os.defpath)])
    ours = {name: value for name, value in os.environ.items() if name not in OUR_PYTHON}
    try:
        host = subprocess.Popen(command, bufsize=0, stdin=PIPE, stdout=PIPE, env=ours | {"PATH": path})
    except OSError as error:
        raise ValueError(f"{key}.python: {python} cannot be started: {error.strerror}; name a Python") from None
    assert host.stdout
    line = host.stdout.readline()
    said = json.loads(line) if line.startswith(b"{") else {}
    if "ready" not in said:
        why = said.get("refused") or f"its host ended with exit code {host.wait()} before it was ready"
        raise ValueError(f"{key}.id: {environment['id']}: {why}")
    return host


class Relay:
    """Sends requests to a host. Kills one that does not confirm a cancellation within `grace_s`."""

    def __init__(self, host: subprocess.Popen[bytes], grace_s: float = GRACE_S) -> None:
        self.host, self.grace_s = host, grace_s
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._kills: dict[int, asyncio.TimerHandle] = {}
        self._numbers = count(1)
        self._connected: asyncio.Task[asyncio.WriteTransport] | None = None

    async def ask(self, request: dict[str, Any]) -> Any:
        """Return the host's answer. Cancelling this cancels the request at the host."""
        if self._connected is None:  # its time belongs to no episode
            self._connected = asyncio.get_running_loop().create_task(self._connect(), context=Context())
        writer, number = await asyncio.shield(self._connected), next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        try:
            writer.write(json.dumps({"id": number, **request}).encode() + b"\n")
            return await answer
        except asyncio.CancelledError:
            self._kills[number] = asyncio.get_running_loop().call_later(self.grace_s, self.host.kill)
            writer.write(json.dumps({"cancel": number}).encode() + b"\n")
            raise
        finally:
            del self._answers[number]

    async def _connect(self) -> asyncio.WriteTransport:
        loop, reader = asyncio.get_running_loop(), asyncio.StreamReader(limit=LONGEST_LINE)
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), self.host.stdout)
        writer, _ = await loop.connect_write_pipe(asyncio.BaseProtocol, self.host.stdin)
        self._reading = loop.create_task(self._read(reader))
        ended = os.pidfd_open(self.host.pid)
        loop.add_reader(ended, lambda: (loop.remove_reader(ended), loop.call_later(LAST_ANSWERS_S, self._end)))
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                result = json.loads(line)
                if kill := self._kills.pop(result.get("cancelled"), None):
                    kill.cancel()
                answer = self._answers.get(result.get("id"))
                if answer and not answer.done():
                    answer.set_result(result)
        except Exception as error:
            print_visible(f"no answer of a host: {type(error).__name__}: {error}")
            self.host.kill()
        self._end()

    def _end(self) -> NoReturn:
        """End as the host ended: the server learns how."""
        code = self.host.wait()
        if code < 0:
            with suppress(OSError):
                signal.signal(-code, signal.SIG_DFL)
            os.kill(os.getpid(), -code)
        os._exit(code or 1)
