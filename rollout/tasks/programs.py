"""In a worker: episodes of agent programs, which reach the policy by URL.

`async` functions share the event loop; others and commands get a process per episode. The server keeps the time: it
knows when it generates.
"""

import base64
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import msgpack

from configs.user_file import is_async
from rollout.cage.apart import TAIL_BYTES, Apart, run_apart, write_all
from rollout.cage.failure_text import ToldError
from rollout.cage.frames import BAD_BYTES
from rollout.cage.worker_loop import failure_message, leave_fork, value_message

SHOWN = 200
Play = Callable[..., Awaitable[Any]]


def timed_by_server(play: Any, apart: bool) -> Play:
    """Mark a function for `worker_loop.py` and `worker_task.py`."""
    play.timed, play.apart, play.about = False, apart, {"convention": "base_url", "apart": apart}
    return play  # type: ignore[no-any-return]


def agent_of(name: str, function: Callable[..., Any], memory: str, files: frozenset[int]) -> Play:
    """Return a user's function as episodes. `memory`, `files`: see `Apart`."""

    async def play(row: dict[str, Any], base_url: str, api_key: str, generate: object) -> Any:
        return await function(row=row, base_url=base_url, api_key=api_key)

    async def play_apart(row: dict[str, Any], base_url: str, api_key: str, generate: object) -> Any:
        def program(said: int) -> None:
            home = os.getpid()
            try:
                message = value_message(name, 0, function(row=row, base_url=base_url, api_key=api_key))
            except BaseException as error:
                message = failure_message(name, 0, error)
            leave_fork(home)
            write_all(said, message)

        return result_of_function(name, await run_apart(Apart(name, memory, files=files), program))

    apart = not is_async(function)
    return timed_by_server(play_apart if apart else play, apart)


def result_of_function(name: str, said: bytes) -> Any:
    """Return the function's value. Raises ToldError."""
    try:
        _, _, origin, value, trace, permanent, _ = msgpack.unpackb(said, strict_map_key=False)
    except BAD_BYTES:
        raise ToldError("died", f"{name} ended its process before it returned") from None
    if origin != "value":
        raise ToldError(origin, value, trace, permanent)
    return value


def load_command(command: list[str], memory: str) -> Play:
    """Run a program that reads the row as JSON and writes its result on the last line."""
    name = command_name(command)

    async def play(row: dict[str, Any], base_url: str, api_key: str, generate: object) -> Any:
        def program(said: int) -> None:
            given = os.memfd_create("row")
            write_all(given, json.dumps(row, default=as_text).encode())
            os.lseek(given, 0, os.SEEK_SET)
            os.dup2(given, 0)
            os.dup2(said, 1)
            os.environ |= {"OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
            os.execvp(command[0], command)

        return result_of_command(name, await run_apart(Apart(name, memory, echo=True), program))

    return timed_by_server(play, apart=True)


def command_name(command: Sequence[str]) -> str:
    return " ".join(command)[:200]


def as_text(value: Any) -> Any:
    """Encode bytes of an image as Base64."""
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value.tolist()


def result_of_command(name: str, said: bytes) -> Any:
    """Return the score on the last line. Raises ToldError."""
    lines = said.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    try:
        result = json.loads(last)
    except (ValueError, RecursionError):
        result = None
    if not isinstance(result, int | float | dict):
        needed, found = 'a number or {"score": ...} is needed', f"is {last[:SHOWN]!r}"
        if len(said) >= TAIL_BYTES and b"\n" not in said.rstrip():
            found = f"has more than {TAIL_BYTES // 1024} KiB, and no more are kept"
        raise ToldError("unanswerable", f"{name}: the last line of its output {found}; {needed}")
    return result
