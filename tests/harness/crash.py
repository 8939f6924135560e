"""Kills a writing process at each of its system calls, one after the other, and checks what it left.

    python tests/harness/crash.py FOLDER     prints JSON: by transition, how often the old and the new state were found

Run by tests/buffer/store/test_sqlite.py, in a process of its own because it forks. The process under test lets itself
be traced (ptrace) from the beginning of its transition: it stops at every entry into the kernel, and at the n-th it
dies by SIGKILL, before the call is made. n goes up until the transition completes. So every state of the files that a
killed process can leave is checked, not a sample of them. What a power cut would leave in addition (writes the disk
lost or reordered) is not tested here: that is what `fsync` is for.
"""

import ctypes
import json
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffer.ledger.rules import Ledger
from buffer.ledger.types import SampleStats, Transaction
from buffer.store.segments import folder_of
from buffer.store.sqlite import Store
from configs.inner_command import inner_words

TRACEME, SYSCALL, SETOPTIONS = 0, 24, 0x4200
TRACESYSGOOD, EXITKILL = 0x1, 0x100000
STOPPED_BY_CALL = signal.SIGTRAP | 0x80
LIBC = ctypes.CDLL(None, use_errno=True)
EVERY = 3
"""In a transition that changes no state (opening, closing) a crash at every third call is enough."""
TABLES = ("samples", "segments", "meta WHERE name NOT IN ('ledger', 'commits')", "totals")
"""Two rows apart: a ledger's name is random, and each start of a buffer may be a commit."""
GROUP = (SampleStats(10, 6, 0.0), SampleStats(12, 8, 1.0, True))
Transition = Callable[[Store, Ledger], Callable[[], None]]


def ptrace(request: int, pid: int, data: int = 0) -> None:
    if LIBC.ptrace(ctypes.c_long(request), ctypes.c_long(pid), None, ctypes.c_void_p(data)) < 0:
        raise OSError(
            ctypes.get_errno(), "ptrace of an own child is not permitted here; allow it (no capability is needed)"
        )


def killed_at(number: int, prepare: Callable[[], Callable[[], None]]) -> bool:
    """Run `prepare()` in a fork, then what it returned; killed at its system call `number`. False: it got through."""
    pid = os.fork()
    if pid == 0:
        act = prepare()
        ptrace(TRACEME, 0)
        os.kill(os.getpid(), signal.SIGSTOP)
        act()
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSTOPPED(status), f"the child failed before its transition: {status}"
    ptrace(SETOPTIONS, pid, TRACESYSGOOD | EXITKILL)
    calls, entering = 0, False
    while True:
        ptrace(SYSCALL, pid)
        _, status = os.waitpid(pid, 0)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0
            return False
        assert os.WIFSTOPPED(status) and os.WSTOPSIG(status) == STOPPED_BY_CALL, status
        entering = not entering
        calls += entering
        if entering and calls > number:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return True


def payload(item: int) -> list[bytes]:
    """Samples of a few pages each."""
    return [bytes([item % 256, index]) * 15_000 for index in range(2)]


def reopened(path: Path, fsync: bool = True) -> tuple[Store, Ledger]:
    store = Store(path, fsync)
    ledger = Ledger(20, groups=2, max_staleness=2)
    ledger.restore(store.load(), 0.0)
    return store, ledger


def state(path: Path) -> Any:
    """All that a restarted buffer can know."""
    store, _ = reopened(path, fsync=False)
    with store:
        assert store._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        tables = {name: store._db.execute(f"SELECT * FROM {name}").fetchall() for name in TABLES}
        groups = {item: store.group(item) for (item,) in store._db.execute("SELECT DISTINCT item FROM samples")}
        items = store._db.execute("SELECT item, state, lease, server, batch, bytes FROM items").fetchall()
        batches = store._db.execute("SELECT version, trained FROM batches").fetchall()
        files = {file.name for file in folder_of(path).iterdir()}  # after the clearing up of a start
        named = {f"{number:06}.samples" for (number,) in store._db.execute("SELECT segment FROM segments")}
        assert files <= named | {"000001.samples"}, f"{files} are there, {named} are named"
        return tables, groups, items, batches, store.load()


def begin(path: Path) -> None:
    """A run in the middle: batches formed and trained, groups stored, leased and waiting, the log not yet copied."""
    store, ledger = reopened(path)
    work = ledger.ask("a", 0, 6, 0.0, request=1)
    for it in work:
        assert ledger.put("a", it.item, it.lease, GROUP, 0.0) is None
    assert ledger.batches.take(0) and ledger.batches.take(1)
    ledger.batches.trained(0)
    one, *_ = ledger.ask("a", 2, 4, 0.0, request=2)
    ledger.fail("a", one.item, one.lease, "engine died", 0.0)
    store.commit(Transaction(ledger.drain(), {it.item: payload(it.item) for it in work}))
    os._exit(0)  # as if killed: nothing is closed


def putting(store: Store, ledger: Ledger) -> Callable[[], None]:
    """A group is accepted."""
    it = next(ledger.view.leased())
    assert ledger.put("a", it.number, it.lease, GROUP, 0.0) is None
    transaction = Transaction(ledger.drain(), {it.number: payload(it.number)})
    return lambda: store.commit(transaction)


def many(store: Store, ledger: Ledger) -> Callable[[], None]:
    """Many calls in one commit: dispatched, accepted, batched, trained, pruned, rewound."""
    ledger.ask("b", 2, 1, 0.0, request=1)
    done = list(ledger.view.leased())
    for it in done:
        assert ledger.put(it.server, it.number, it.lease, GROUP, 0.0) is None
    assert ledger.batches.take(2)
    ledger.batches.trained(1)
    ledger.batches.prune(1)
    ledger.batches.rewind(1)
    transaction = Transaction(ledger.drain(), {it.number: payload(it.number) for it in done}, void_before=1)
    return lambda: store.commit(transaction)


def anew(store: Store, ledger: Ledger) -> Callable[[], None]:
    """A group is accepted: its commit begins the log anew, and copies it into the file."""
    store._db.execute("PRAGMA wal_checkpoint")
    store._db.execute("PRAGMA wal_autocheckpoint = 1")
    return putting(store, ledger)


def closing(store: Store, ledger: Ledger) -> Callable[[], None]:
    """The log is copied into the file."""
    return store.close


TRANSITIONS: dict[str, Transition] = {"put": putting, "many": many, "anew": anew, "close": closing}


def fresh(first: Path, path: Path) -> None:
    shutil.rmtree(folder_of(path), ignore_errors=True)
    for old in path.parent.glob(f"{path.name}*"):
        old.unlink()
    for file in first.parent.glob(f"{first.name}*"):
        if file.is_file():
            shutil.copyfile(file, path.with_name(file.name.replace(first.name, path.name)))
    if folder_of(first).is_dir():
        shutil.copytree(folder_of(first), folder_of(path))


def every_kill(first: Path, path: Path, prepare: Callable[[], Callable[[], None]]) -> Counter[str]:
    """Kill at each call; what is left must be the state before or after, and after a certain call always the latter."""
    fresh(first, path)
    before = state(path)
    fresh(first, path)
    assert not killed_at(10**9, prepare)
    after = state(path)
    found: Counter[str] = Counter()
    number = 0
    while True:
        fresh(first, path)
        if not killed_at(number, prepare):
            return found
        left = state(path)
        assert left in (before, after), f"killed at call {number}: neither before nor after"
        assert left == after or before == after or not found["after"], f"killed at call {number}: it was after already"
        found["after" if left == after else "before"] += 1
        number += 1 if before != after else EVERY


def main(folder: Path) -> None:
    first, path = folder / "first.sqlite", folder / "buffer.sqlite"
    results: dict[str, Counter[str]] = {}

    def create() -> Callable[[], None]:
        return lambda: reopened(path)[0].close()

    results["create"] = every_kill(first, path, create)  # there is no first file yet
    if (pid := os.fork()) == 0:
        begin(first)
    assert os.waitpid(pid, 0)[1] == 0
    results["reopen"] = every_kill(first, path, create)
    for name, transition in TRANSITIONS.items():
        results[name] = every_kill(first, path, lambda transition=transition: transition(*reopened(path)))  # type: ignore[misc]
    print(json.dumps(results))


if __name__ == "__main__":
    inner_words("FOLDER")
    main(Path(sys.argv[1]))
