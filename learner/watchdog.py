"""No collective outlives its timeout: a watchdog on each rank says which rank was missing, where, and for how long.

A thread of each rank reads torch's flight recorder (which knows every collective, NCCL's and gloo's) and tells the
other ranks through a store how many collectives its rank has begun. When `learner.timeout_s` expires it prints one
line, writes the recorder's dump and ends the process; the other ranks' watchdogs see that and end too. torch's own
timeout comes a little later. Started by `__main__.py`; waits for nothing but its clock.
"""

import json
import logging
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import _get_default_store

from configs.entrypoint import FAILED

log = logging.getLogger(__name__)
RECORDER = "TORCH_FR_BUFFER_SIZE"
"""Entries that the flight recorder keeps; read when the process group is created."""
TORCH_LATER_S = 15.0
"""torch's own timeout expires this much after ours."""
Note = dict[str, Any]
"""What a rank tells the others: collectives `begun`, the line `where` it is, the time `at` which it said so."""


def enable_flight_recorder() -> None:
    """Turn the flight recorder on in this process, unless its size is set; call it before `init_process_group`."""
    if os.environ.get(RECORDER, "0") == "0":
        os.environ[RECORDER] = "2000"


class Watchdog:
    """A context manager around all that the ranks do together. `folder` gets the recorder's dump on expiry."""

    def __init__(self, timeout_s: float, folder: Path) -> None:
        self.timeout_s, self.folder = timeout_s, folder
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        if self.world > 1:  # a connection of its own: the default store's may be blocked by a wait
            self._store = PrefixStore("watchdog", _get_default_store().clone())  # type: ignore[attr-defined]
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.wait(min(max(self.timeout_s / 10, 0.1), 5.0)):
            try:
                self._check()
            except dist.DistError as error:  # the rank or parent that held the store has ended
                log.warning("watchdog: the ranks' store is gone (%s)", str(error).splitlines()[0])
                return

    def _check(self) -> None:
        state = flight_record()
        oldest = min(state["entries"], key=lambda entry: entry["time_created_ns"], default=None)
        waited = (time.time_ns() - oldest["time_created_ns"]) / 1e9 if oldest else 0.0
        begun = sum(max(int(group["last_enqueued_collective"]), 0) for group in state["pg_status"].values())
        note = {"begun": begun, "where": current_line(self._main), "at": time.time()}
        self._store.set(str(self.rank), json.dumps(note))
        if self._store.check(["verdict"]):
            os._exit(FAILED)
        elif oldest and waited > self.timeout_s:
            self._expire(oldest, waited)

    def _expire(self, entry: dict[str, Any], waited: float) -> None:
        first = self._store.add("verdicts", 1) == 1
        path = self.folder / f"flight-{self.rank}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(flight_record(active=False)))
        if first:  # one line, however many ranks wait
            print(verdict(entry, waited, self._notes(), self.rank, self.timeout_s, path), file=sys.stderr, flush=True)
            self._store.set("verdict", "1")
        os._exit(FAILED)

    def _notes(self) -> list[Note | None]:
        names = [str(rank) for rank in range(self.world)]
        return [json.loads(self._store.get(name)) if self._store.check([name]) else None for name in names]


def flight_record(active: bool = True) -> dict[str, Any]:
    """The flight recorder's dump: the collectives in progress (`active`), or all that it remembers."""
    dumps = [getattr(c10d, name) for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json") if hasattr(c10d, name)]
    states = [json.loads(dump(includeCollectives=True, onlyActive=active) or b"{}") for dump in dumps]
    entries = [entry for state in states for entry in state.get("entries") or []]
    if active:  # gloo's entries stay "scheduled" until they are retired
        entries = [entry for entry in entries if not entry["retired"] and entry["state"] != "completed"]
    groups = {str(i) + name: status for i, state in enumerate(states) for name, status in state["pg_status"].items()}
    return {"entries": entries, "pg_status": groups}


def current_line(thread: int | None) -> str:
    """The innermost line that a thread executes outside of installed packages: `learner/train/step.py:80 backward`."""
    frame = sys._current_frames().get(thread or 0)
    if frame is None:
        return "nowhere"
    lines = traceback.extract_stack(frame)
    ours = [line for line in lines if "site-packages" not in line.filename and "/lib/python" not in line.filename]
    line = (ours or lines)[-1]
    return f"{'/'.join(Path(line.filename).parts[-2:])}:{line.lineno} {line.name}"


def verdict(
    entry: dict[str, Any], waited: float, notes: list[Note | None], rank: int, timeout_s: float, path: Path
) -> str:
    """Which rank was missing: one that never wrote a note, else the one that has begun the fewest collectives."""
    mine = notes[rank]
    where = mine["where"] if mine else "?"
    head = f"learner: timeout: rank {rank} has waited {waited:.1f} s in {entry['profiling_name']} ({where}) for"
    tail = f"learner.timeout_s is {timeout_s:g}; all collectives are in {path}"
    if None in notes:
        return f"{head} rank {notes.index(None)}, which never reported; {tail}"
    known = [note for note in notes if note]
    behind = min(range(len(known)), key=lambda r: known[r]["begun"])
    begun, own = known[behind]["begun"], known[rank]["begun"]
    if begun == own:
        return f"{head} ranks that have begun as many collectives: the network between them, or a GPU, hangs; {tail}"
    silent = time.time() - known[behind]["at"]
    quiet = f", silent for {silent:.1f} s" if silent > max(timeout_s / 2, 1.0) else ""
    return (
        f"{head} rank {behind}, which has begun {begun} collectives where rank {rank} has begun {own}: "
        f"it is at {known[behind]['where']}{quiet}; {tail}"
    )
