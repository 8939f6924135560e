"""No collective outlives its deadline: a watch on each rank that says which rank was missing, where, and for how long.

A thread of each rank reads torch's flight recorder (it knows every collective, NCCL's and gloo's), tells the others
through the ranks' store how far its rank is, and on expiry of `learner.timeout_s` prints one line, writes the
recorder's account and ends the process; the other ranks' watches see it and end too. torch's own timeout stands behind
it, a little later. Started by `learner/__main__.py`; waits for nothing but its clock.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

log = logging.getLogger(__name__)
EXIT = 1
RECORDER = "TORCH_FR_BUFFER_SIZE"
"""Entries the flight recorder keeps; set before the process group is made."""
LATER_S = 15.0
"""torch's own deadline comes this much after ours."""


def record() -> None:
    """Have the flight recorder on in this process, whose account a verdict is; call it before `init_process_group`."""
    if os.environ.get(RECORDER, "0") == "0":
        os.environ[RECORDER] = "2000"


class Watchdog:
    """A context manager around all that ranks do together. `folder` gets the recorder's account on expiry."""

    def __init__(self, timeout_s: float, folder: Path, end: Callable[[int], Any] = os._exit) -> None:
        self.timeout_s, self.folder, self.end = timeout_s, folder, end
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="deadlines", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world > 1:  # its own connection: the ranks' may be held by a wait
            self._store = PrefixStore("deadlines", _get_default_store().clone())  # type: ignore[attr-defined]
            self._thread.start()
        return self

    def __exit__(self, *of_what: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(min(max(self.timeout_s / 10, 0.1), 5.0)):
            try:
                self._look()
            except dist.DistError as error:  # the store went with the rank or the parent that held it
                log.warning("deadlines: the ranks' store is gone (%s)", str(error).splitlines()[0])
                return

    def _look(self) -> None:
        state = recorded()
        oldest = min(state["entries"], key=lambda entry: entry["time_created_ns"], default=None)
        waited = (time.time_ns() - oldest["time_created_ns"]) / 1e9 if oldest else 0.0
        note = {"made": made(state), "where": where(self._main), "at": time.time()}
        self._store.set(str(self.rank), json.dumps(note))
        if self._store.check(["verdict"]):
            self._stop.set()
            self.end(EXIT)
        elif oldest and waited > self.timeout_s:
            self._expire(oldest, waited)

    def _expire(self, entry: dict[str, Any], waited: float) -> None:
        first = self._store.add("verdicts", 1) == 1
        path = self.folder / f"flight-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(recorded(active=False)))
        if first:  # one line, whoever else waits
            print(verdict(entry, waited, self._notes(), self.rank, self.timeout_s, path), file=sys.stderr, flush=True)
            self._store.set("verdict", "1")
        self._stop.set()
        self.end(EXIT)

    def _notes(self) -> list[dict[str, Any] | None]:
        names = [str(rank) for rank in range(self.world)]
        return [json.loads(self._store.get(name)) if self._store.check([name]) else None for name in names]


def recorded(active: bool = True) -> dict[str, Any]:
    """The flight recorder's account: all collectives it remembers, or those under way (`active`)."""
    dumps = [getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]
    found = [json.loads(dump(includeCollectives=True, onlyActive=active) or b"{}") for dump in dumps]
    entries = [entry for state in found for entry in state.get("entries") or []]
    if active:  # gloo's stay "scheduled" to the end, and are told by being retired
        entries = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    groups = {str(i) + name: status for i, state in enumerate(found) for name, status in state["pg_status"].items()}
    return {"entries": entries, "pg_status": groups}


def made(state: dict[str, Any]) -> int:
    """How many collectives this rank has begun, over all groups."""
    return sum(max(int(status["last_enqueued_collective"]), 0) for status in state["pg_status"].values())


def where(thread: int | None) -> str:
    """The line a thread is at, the innermost outside of installed packages: `learner/train/step.py:80 backward`."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "nowhere"
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if "site-packages" not in line.filename and "/lib/python" not in line.filename]
    line = (ours or lines)[-1]
    return f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno} {line.name}"


def verdict(
    entry: dict[str, Any],
    waited: float,
    notes: list[dict[str, Any] | None],
    rank: int,
    timeout_s: float,
    path: Path,
) -> str:
    """Who was missing: the rank that has begun the fewest collectives, or else the one that has been silent longest."""
    mine = notes[rank]
    reached = {r: note["made"] for r, note in enumerate(notes) if note is not None}
    name = entry["profiling_name"]
    head = f"learner: deadline: rank {rank} has waited {waited:.1f} s in {name} ({mine['where'] if mine else '?'}) for"
    tail = f"learner.timeout_s is {timeout_s:g}; account of all collectives: {path}"
    missing = [r for r in range(len(notes)) if r not in reached]
    behind = min(reached, key=lambda r: reached[r])
    if missing:
        return f"{head} rank {missing[0]}, never heard of; {tail}"
    note = notes[behind]
    assert note is not None
    silent = time.time() - note["at"]
    if reached[behind] == reached[rank]:
        return f"{head} ranks that are as far as itself: the network between them, or a GPU, hangs; {tail}"
    quiet = f", silent for {silent:.1f} s" if silent > max(timeout_s / 2, 1.0) else ""
    return (
        f"{head} rank {behind}, which has made {reached[behind]} collectives where rank {rank} has {reached[rank]}: "
        f"it is at {note['where']}{quiet}; {tail}"
    )
