"""In a worker process: load the user's function, then run its calls one after another, as the server sends them.

Waits for the next call; ends when the server closes the connection. What the function raises, SystemExit included,
becomes a reply; what it prints goes to the warden, which also watches its time and memory (`warden.py`).
"""

import faulthandler
import importlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

from rollout.cage.failure_text import describe_error, describe_load_error, unanswerable
from rollout.cage.frames import FrameReader, encode
from rollout.cage.warden import (
    DEADLINE,
    DRAINED,
    DUMP_SIGNAL,
    MARK,
    RESIDENT,
    STARTED,
    CallState,
    anonymous_bytes,
    unread_bytes,
)

GROWN = 0.75
"""A worker that grew by this share of the memory it had left when it was loaded is replaced between calls."""


def work(setup: dict[str, Any], control: socket.socket, state: CallState, printing: int) -> None:
    """Serve one worker process from loading to its end."""
    faulthandler.enable(printing)
    faulthandler.register(DUMP_SIGNAL, printing, all_threads=True)
    home = os.getpid()
    state[DEADLINE] = time.monotonic() + setup["load_timeout_s"]
    try:
        sys.path[:0] = [folder for folder in setup["folders"] if folder not in sys.path]
        module, _, name = setup["loader"].partition(":")
        function = getattr(importlib.import_module(module), name)(*setup["arguments"])
        loaded = encode(["loaded", os.getpid(), getattr(function, "about", {})])
    except BaseException as error:  # the user's module may end in any way while it is imported
        leave_fork(home)
        control.sendall(encode(["unloadable", *describe_load_error(setup["name"], error)]))
        flush_output()
        os._exit(1)
    leave_fork(home)
    flush_output()
    state[DEADLINE] = 0
    if setup["episodes"]:
        from rollout.cage.episode_loop import serve_episodes  # brings asyncio along, which calls do not need

        serve_episodes(setup, control, state, function, loaded)
    else:
        _serve_calls(setup, control, state, function, loaded, partial(unread_bytes, printing))


class Recycling:
    """When a worker is to be replaced: after `max_calls`, or once it has grown so far that a leak would soon end it."""

    def __init__(self, setup: dict[str, Any], state: CallState) -> None:
        loaded, most = anonymous_bytes(os.getpid()), setup["memory_bytes"]
        self._calls = setup["max_calls"] or float("inf")
        self._bytes = loaded + GROWN * (most - loaded) if most else float("inf")
        self._state = state

    def due(self, calls: int) -> bool:
        """Whether it is to be replaced after so many calls, before the next."""
        return calls >= self._calls or self._state[RESIDENT] > self._bytes


def _serve_calls(
    setup: dict[str, Any],
    control: socket.socket,
    state: CallState,
    function: Callable[..., Any],
    loaded: bytes,
    unread: Callable[[], int],
) -> None:
    """Answer each call with `[last, kind, result or reason, traceback]`; `last`: replace it after this call."""
    home, recycling = os.getpid(), Recycling(setup, state)
    timeout_s, reader, calls = setup["timeout_s"], FrameReader(), 0
    control.sendall(loaded)
    while data := control.recv(2**18):
        for arguments in reader.feed(data):
            calls += 1
            state[MARK] = state[DRAINED] + unread()
            state[DEADLINE] = time.monotonic() + timeout_s
            state[STARTED] = calls
            reply = _call(setup["name"], function, arguments, partial(recycling.due, calls))
            leave_fork(home)
            flush_output()
            state[DEADLINE] = 0
            control.sendall(reply)


def _call(name: str, function: Callable[..., Any], arguments: list[Any], last: Callable[[], bool]) -> bytes:
    try:
        result = function(*arguments)
    except BaseException as error:
        return encode([last(), *describe_error(name, error)])
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.setitimer(signal.ITIMER_REAL, 0)  # an alarm that the function left behind
    try:
        return encode([last(), "value", result, ""])
    except BaseException as error:  # users' own classes run here
        return encode([last(), "unanswerable", unanswerable(name, result, error), ""])


def leave_fork(home: int) -> None:
    """End this process if it is a copy that users' code forked and let return."""
    if os.getpid() != home:
        os._exit(0)


def flush_output() -> None:
    """Hand what was printed to the warden, unless the function closed or replaced its streams."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
