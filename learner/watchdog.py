"""A watchdog on each rank ends all ranks if a collective outlives `learner.timeout_s`, and names the missing one. It
also ends all ranks if one fails: the others would wait for it in their next collective.

torch's flight recorder has the collectives, and a store how many each rank has begun. A watchdog whose timeout expires
prints one line, writes the recorder's dump and ends its process; the others see that and end too.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store, _world

from buffer.keys import KeysError
from buffer.wire.awake import TICK_S, AwakeClock
from configs.entrypoint import BAD_INPUT, FAILED
from configs.load import ConfigError
from configs.plain_text import print_visible
from configs.variables import private_folder

T = TypeVar("T")
log = logging.getLogger(__name__)
RECORDER = "TORCH_FR_BUFFER_SIZE"
"""Entries of the flight recorder; read when the process group is created."""
TORCH_LATER_S = 15.0
"""torch's own timeout expires this much later."""
ANSWER_S = 10.0
"""If the store answers later, each rank ends itself."""
OWN_S = 5.0
"""A rank ends so long after another has failed: it may be about to raise the same error."""
REFUSALS = (ConfigError, KeysError)
Note = dict[str, Any]
"""A rank's note: collectives `begun` by group, `where` the rank is, and `at` which Unix time it was written."""


def enable_flight_recorder() -> None:
    """Call it before `init_process_group`."""
    if os.environ.get(RECORDER, "0") == "0":
        os.environ[RECORDER] = "2000"


class Watchdog:
    """Context manager around all collectives. `folder` gets the recorder's dump."""

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self.timeout_s, self.folder = timeout_s, folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._asker = ThreadPoolExecutor(1, "watchdog-store")
        self._asked: Future[Any] = Future()
        self._asked.set_result(None)
        self._every_s = min(max(timeout_s / 10, 0.1), 5.0)
        self._verdict: tuple[int, str] | None = None
        self._gone, self._clock, self._waits = False, AwakeClock(), Waits(self._every_s)
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world > 1:  # waits may block the default store's connection
            self._store = PrefixStore("watchdog", _get_default_store().clone())  # type: ignore[attr-defined]
            self._thread.start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._stop.set()
        if error is not None and self.world > 1:
            self._thread.join(ANSWER_S)
            self._tell(error)

    def _tell(self, error: BaseException) -> None:
        """End the other ranks. If another rank refused its input and collectives failed here, end as that rank did."""
        code = BAD_INPUT if isinstance(error, REFUSALS) else FAILED
        own = code, f"learner: rank {self.rank} has failed: {error}"
        first, line = self._verdict or self._ask(partial(self._first, own)) or own
        if first == BAD_INPUT and isinstance(error, RuntimeError):
            print_visible(line, sys.stderr)
            os._exit(BAD_INPUT)
        if self.rank == 0:  # the store may end with this process
            self._ask(self._wait_heard)

    def _first(self, own: tuple[int, str]) -> tuple[int, str]:
        self._store.set(f"heard/{self.rank}", "")
        if self._store.add("verdicts", 1) == 1:
            self._store.set("verdict", json.dumps(own))
        code, line = json.loads(self._store.get("verdict"))
        return code, line

    def _wait_heard(self) -> None:
        with suppress(dist.DistStoreError):  # a rank may have ended before
            self._store.wait([f"heard/{rank}" for rank in range(self.world)], timedelta(seconds=2 * self._every_s))

    def _run(self) -> None:
        next_s = self._every_s
        while not self._stop.wait(min(next_s, TICK_S)):
            next_s -= TICK_S
            self._clock.now()
            if next_s <= 0:
                self._check()
                next_s = self._every_s

    def _check(self) -> None:
        state = flight_record()
        oldest = min(state["entries"], key=lambda entry: entry["time_created_ns"], default=None)
        waited = self._waits.waited_s(oldest, self._clock.now()) if oldest else 0.0
        begun = {name: max(int(group["last_enqueued_collective"]), 0) for name, group in state["pg_status"].items()}
        note = {"begun": begun, "where": current_line(self._main), "at": time.time()}
        self._verdict = self._ask(lambda: self._exchange(note))
        if self._verdict:
            self._follow(*self._verdict)
        elif oldest and waited > self.timeout_s:
            self._expire(oldest, waited, note)

    def _exchange(self, note: Note) -> tuple[int, str] | None:
        """The exit code of all ranks, and a line that each prints; None while none has failed."""
        self._store.set(str(self.rank), json.dumps(note))
        if not self._store.check(["verdict"]):
            return None
        code, line = json.loads(self._store.get("verdict"))
        self._store.set(f"heard/{self.rank}", "")
        return code, line

    def _follow(self, code: int, line: str) -> None:
        if line and self._stop.wait(OWN_S):
            return
        if line:
            print_visible(line, sys.stderr)
        os._exit(code)

    def _ask(self, work: Callable[[], T]) -> T | None:
        """None if the store does not answer in time: a machine may be cut off."""
        try:
            if self._asked.done():
                self._asked = self._asker.submit(work)
                until = self._clock.now() + ANSWER_S
                while not self._asked.done() and self._clock.now() < until:
                    wait([self._asked], TICK_S)
                answer: T = self._asked.result(0)
                return answer
        except TimeoutError:
            log.warning("watchdog: the ranks' store does not answer")
        except dist.DistError as error:
            if not self._gone:
                log.warning("watchdog: the ranks' store is gone (%s)", str(error).splitlines()[0])
            self._gone = True
        return None

    def _expire(self, entry: dict[str, Any], waited: float, note: Note) -> None:
        path = self.folder / f"flight-{self.rank}.json"
        try:
            private_folder(path.parent)
            path.write_text(json.dumps(flight_record(active=False)))
        except OSError as error:  # a full disk must not keep this process alive
            log.warning("watchdog: %s cannot be written: %s", path, error.strerror)
        first = self._ask(lambda: self._store.add("verdicts", 1) == 1)
        if first is not False:  # one line from all ranks, if they can agree
            line = verdict(entry, waited, self._ask(self._notes) or {self.rank: note}, self.rank, self.timeout_s, path)
            print_visible(line, sys.stderr)
            self._ask(lambda: self._store.set("verdict", json.dumps((FAILED, ""))))
        os._exit(FAILED)

    def _notes(self) -> dict[int, Note | None]:
        names = [str(rank) for rank in range(self.world)]
        return {i: json.loads(self._store.get(n)) if self._store.check([n]) else None for i, n in enumerate(names)}


class Waits:
    """How long the oldest collective has waited. The recorder's clock may be set, and runs while this process is
    stopped."""

    def __init__(self, at_most_s: float) -> None:
        self._at_most_s = at_most_s
        self._seen: tuple[object, float] = None, 0.0

    def waited_s(self, entry: Mapping[str, Any], now: float) -> float:
        name = entry["group"], entry.get("collective_seq_id"), entry.get("p2p_seq_id"), entry["time_created_ns"]
        if self._seen[0] != name:
            before_s = (time.time_ns() - entry["time_created_ns"]) / 1e9
            self._seen = name, now - min(max(before_s, 0.0), self._at_most_s)
        return now - self._seen[1]


def flight_record(active: bool = True) -> dict[str, Any]:
    """`active`: only the collectives in progress."""
    dumps = [getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]
    states = [json.loads(dump(includeCollectives=True, onlyActive=active) or b"{}") for dump in dumps]
    entries = [
        entry | {"group": f"{i}{entry['pg_id']}"}
        for i, state in enumerate(states)
        for entry in state.get("entries") or []
    ]
    if active:  # gloo's entries stay "scheduled" until they are retired
        entries = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    groups = {str(i) + name: status for i, state in enumerate(states) for name, status in state["pg_status"].items()}
    return {"entries": entries, "pg_status": groups}


def current_line(thread: int | None) -> str:
    """A thread's innermost line outside of installed packages: `learner/train/step.py:80 backward`."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "nowhere"
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if "site-packages" not in line.filename and "/lib/python" not in line.filename]
    line = (ours or lines)[-1]
    return f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno} {line.name}"


def verdict(
    entry: dict[str, Any], waited: float, notes: dict[int, Note | None], rank: int, timeout_s: float, path: Path
) -> str:
    """The missing rank wrote no note, or has begun the fewest of the group's collectives."""
    mine, group = notes[rank], entry["group"]
    where = mine["where"] if mine else "?"
    head = f"learner: timeout: rank {rank} has waited {waited:.1f} s in {entry['profiling_name']} ({where}) for"
    tail = f"learner.timeout_s is {timeout_s:g}; all collectives are in {path}"
    if len(notes) == 1:
        lost = "the network between the machines is cut, or the first one is gone"
        return f"{head} other ranks, and their store at the first node does not answer: {lost}; {tail}"
    among = {each: notes[each] for each in members(entry) or notes}
    if None in among.values():
        return f"{head} rank {next(each for each, note in among.items() if not note)}, which never reported; {tail}"
    numbers = {each: note["begun"].get(group, 0) for each, note in among.items() if note}
    behind = min(numbers, key=lambda each: numbers[each])
    begun, own, note = numbers[behind], numbers[rank], notes[behind]
    if begun == own or note is None:
        return f"{head} ranks that have begun as many collectives: the network between them, or a GPU, hangs; {tail}"
    silent = time.time() - note["at"]
    quiet = f", silent for {silent:.1f} s" if silent > max(timeout_s / 2, 1.0) else ""
    return (
        f"{head} rank {behind}, which has begun {begun} collectives where rank {rank} has begun {own}: "
        f"it is at {note['where']}{quiet}; {tail}"
    )


def members(entry: dict[str, Any]) -> list[int]:
    """Ranks of a collective's group; empty for other groups."""
    name, groups = entry["process_group"][0], _world.pg_group_ranks  # a group of other ranks is a number here
    return next((sorted(ranks) for group, ranks in groups.items() if getattr(group, "group_name", "") == name), [])
