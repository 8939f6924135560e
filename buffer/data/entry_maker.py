"""Makes entries of reasoning-gym in a process of its own, because sets may be slow."""

import atexit
import json
import os
import subprocess
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import cache
from itertools import count
from typing import Any

from buffer.data.servable import unservable
from configs.data.sources import GeneratedSet
from configs.own_packages import command

KEPT = 16_384
"""More rows than are open at a time."""
HASH_SEED = "0"
"""PYTHONHASHSEED wherever entries are made."""


class EntryError(ValueError):
    """An entry cannot be made or scored; one line."""

    pass


class MakerEnded(EntryError):
    """The process ended before it answered."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process that makes entries ended with exit code {code}")
        self.code = code


class EntryMaker:
    """The process starts at the first request, restarts if it ended, and ends with this one."""

    def __init__(self, arguments: Sequence[str] = command("buffer.data.entries")[1:]) -> None:
        self._arguments = arguments
        self._process: subprocess.Popen[str] | None = None
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._numbers = count()
        self._lock = threading.Lock()

    def ask(self, verb: str, *arguments: Any, ahead: bool = False) -> "Future[dict[str, Any]]":
        """Requests `ahead` of their need come last. The answer may raise EntryError."""
        answer: Future[dict[str, Any]] = Future()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._process is not None and self._process.stdin is not None
            number = next(self._numbers)
            self._waiting[number] = answer
            with suppress(BrokenPipeError):  # the reader raises the reason
                self._process.stdin.write(json.dumps([ahead, number, verb, arguments]) + "\n")
                self._process.stdin.flush()
        return answer

    def close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process and process.stdin:
            with suppress(OSError):
                process.stdin.close()
            process.kill()
            process.wait()

    def _start(self) -> None:
        line = [sys.executable, *self._arguments]
        environment = os.environ | {"PYTHONHASHSEED": HASH_SEED, "PYTHONUNBUFFERED": "1"}
        pipe = subprocess.PIPE
        if self._process and self._process.stdin:
            with suppress(OSError):
                self._process.stdin.close()
        self._process = subprocess.Popen(line, stdin=pipe, stdout=pipe, text=True, env=environment)
        self._waiting = {}
        reading = [self._process, self._waiting]
        threading.Thread(target=self._read, args=reading, name="reasoning-gym", daemon=True).start()

    def _read(self, process: "subprocess.Popen[str]", waiting: dict[int, "Future[dict[str, Any]]"]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                if not line.endswith("\n"):  # it ended while it wrote
                    break
                number, answer = json.loads(line)
                if "error" in answer:
                    reason = answer["error"].encode(errors="backslashreplace").decode()
                    waiting.pop(number).set_exception(EntryError(reason))
                else:
                    waiting.pop(number).set_result(answer)
        code = process.wait()
        with self._lock:  # nothing is added any more
            left = list(waiting.values())
        for future in left:
            future.set_exception(MakerEnded(code))


@cache
def entry_maker() -> EntryMaker:
    maker = EntryMaker()
    atexit.register(maker.close)
    return maker


class GeneratedRows:
    """The rows of a set, made when they are asked for or expected. Raises EntryError.

    Example: row 17 is `{"data_source": "reasoning_gym/leg_counting", "problem": "How many legs ...", "answer": "12",
    "extra_info": {"reasoning_gym": {"name": "leg_counting", "config": {"size": 100, "seed": 1}, "index": 17,
    "question_sha256": "..."}}}`
    """

    def __init__(self, made: GeneratedSet) -> None:
        if reason := unservable({"config": made.config}):
            raise EntryError(f"its {reason}")
        self.set, self._config = made, json.dumps(made.config, sort_keys=True)
        self._rows: OrderedDict[int, Future[dict[str, Any]]] = OrderedDict()
        self._retried: set[int] = set()
        """Rows lost with the process and asked for again."""
        self.on_made: Callable[[], object] = lambda: None
        """Called by a thread."""
        self.version = str(entry_maker().ask("about", made.name, self._config).result()["version"])

    def expect(self, rows: Iterable[int]) -> None:
        for index in rows:
            if index not in self._rows:
                self._rows[index] = self._ask(index, ahead=True)
        while len(self._rows) > KEPT:
            self._retried.discard(self._rows.popitem(last=False)[0])

    def is_made(self, index: int) -> bool:
        """A lost row is asked for again once, since it may be what ends the process."""
        if self._lost(index) and index not in self._retried:
            again = [row for row in self._rows if self._lost(row) and row not in self._retried]
            self._retried.update(again)
            for row in again:
                self._rows[row] = self._ask(row, ahead=True)
        return index in self._rows and self._rows[index].done()

    def _lost(self, index: int) -> bool:
        known = self._rows.get(index)
        return known is not None and known.done() and isinstance(known.exception(), MakerEnded)

    def _ask(self, index: int, ahead: bool = False) -> "Future[dict[str, Any]]":
        answer = entry_maker().ask("row", self.set.name, self._config, index, ahead=ahead)
        answer.add_done_callback(lambda _: self.on_made())
        return answer

    def __call__(self, index: int) -> dict[str, Any]:
        """A row that cannot be made has `unmade`, the reason, in place of its problem."""
        known = self._rows.get(index)
        if known is None or not known.done() or self._lost(index):
            self._rows[index] = self._ask(index)
        self._rows.move_to_end(index)
        identity = {"name": self.set.name, "config": self.set.config, "index": index}
        row: dict[str, Any] = {"data_source": f"reasoning_gym/{self.set.name}"}
        row["extra_info"] = {"reasoning_gym": identity}
        try:
            made = self._rows[index].result()
        except EntryError as error:
            return row | {"unmade": str(error)}
        identity["question_sha256"] = made["sha256"]
        whole = row | {"problem": made["question"]} | ({"answer": made["answer"]} if "answer" in made else {})
        reason = unservable(whole)
        return row | {"unmade": f"entry {index} of {self.set.name}: {reason}"} if reason else whole
