"""A keeper with real processes: restart, give-up, drain, force, log, and that nothing is left of what it started."""

import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from actors.process import FINAL, Event, Process, Restarts
from actors.supervise.guard import Guarded, receive, send
from actors.supervise.keeper import LOG_BYTES, SHOWN_LINES, Keeper
from buffer.wire.awake import AwakeClock
from configs.entrypoint import PARENT

QUICK = Restarts(first_s=0.05, most_s=0.2, failures=3)
FAMILY = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, time; os.write(1, b'child\\n'); time.sleep(600)"])
far = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
os.write(1, f"family {os.getpid()} {child.pid} {far.pid}\\n".encode())
"""
"""A process, its child and a child in a session of its own. Each line is one write, so that those of two do not mix."""


@pytest.fixture
def keep(tmp_path: Path) -> Iterator[Callable[..., Keeper]]:
    made = []

    def make(code: str, restarts: Restarts = QUICK, role: str = "rollout") -> Keeper:
        argv = (sys.executable, "-c", code)
        log = tmp_path / "logs" / "it.log"
        made.append(Keeper(Process("it", role, argv, log, str(tmp_path), restarts=restarts)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for keeper in made:
        keeper.kill()


def until(keeper: Keeper, wanted: Callable[[Event], bool], limit_s: float = 150.0) -> list[Event]:
    """Events up to the first one that is wanted."""
    seen: list[Event] = []
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        for event in keeper.events(seen[-1].number if seen else 0, 1.0):
            seen.append(event)
            if wanted(event):
                return seen
    raise AssertionError(f"it did not happen: {seen}")


def family(keeper: Keeper) -> list[int]:
    line = until(keeper, lambda event: event.text.startswith("family"))[-1].text
    return [int(pid) for pid in line.split()[1:]]


def gone(pids: list[int]) -> bool:
    """Do all of them end long before they would by themselves?"""
    processes = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    return not psutil.wait_procs(processes, timeout=100)[1]


def test_output_is_reported_and_logged(keep: Callable[..., Keeper], tmp_path: Path) -> None:
    keeper = keep("import sys; print('one'); print('0%\\r50%\\r100%'); print('two', file=sys.stderr)")
    events = until(keeper, lambda event: event.kind in FINAL)
    assert [event.kind for event in events if event.kind != "line"] == ["started", "ended"]
    assert sorted(event.text for event in events if event.kind == "line") == ["100%", "one", "two"]
    assert events[-1].code == 0
    log = (tmp_path / "logs" / "it.log").read_text()
    assert "one\n" in log and "two\n" in log and "--- it ended" in log


def test_what_it_starts_has_its_own_parent(keep: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    """A keeper that a benchmark started, and that dies with it, passes that on to nobody."""
    monkeypatch.setenv(PARENT, "1")
    events = until(keep(f"import os; print(os.environ.get({PARENT!r}))"), lambda event: event.kind in FINAL)
    assert [event.text for event in events if event.kind == "line"] == ["None"]


@pytest.mark.long
def test_a_flood_of_lines_fills_neither_disk_nor_terminal(keep: Callable[..., Keeper], tmp_path: Path) -> None:
    """Three logs and a half of lines: three files are left, and the events are few."""
    line, number = "a line of a flood" * 500, int(3.5 * LOG_BYTES / 8500)
    keeper = keep(f"import sys\nfor n in range({number}): print({line!r}, n)\nsys.exit(2)")
    events = until(keeper, lambda event: event.kind in FINAL)
    logs = sorted((tmp_path / "logs").glob("it.log*"))
    assert [path.name for path in logs] == ["it.log", "it.log.1", "it.log.2"]
    assert all(path.stat().st_size < LOG_BYTES + 10000 for path in logs)
    lines = [event.text for event in events if event.kind == "line"]
    windows = sum("lines left out, see" in text and str(tmp_path) in text for text in lines)
    assert windows and len(lines) <= windows * (SHOWN_LINES + 1) and max(map(len, lines)) < 2010
    shown = len(lines) - windows
    assert shown + sum(int(text.split()[0]) for text in lines if "lines left out" in text) == number


def test_sigkill_is_followed_by_a_restart_without_the_old_family(keep: Callable[..., Keeper]) -> None:
    keeper = keep(FAMILY + "time.sleep(600)")
    first = family(keeper)
    os.kill(first[0], signal.SIGKILL)
    events = until(keeper, lambda event: event.kind == "failed")
    assert events[-1].code == 137
    old = [psutil.Process(pid) for pid in first if psutil.pid_exists(pid)]
    until(keeper, lambda event: event.text.startswith("family") and str(first[0]) not in event.text.split())
    assert not [each for each in old if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]


def test_a_process_that_cannot_be_started_now_is_started_later(keep: Callable[..., Keeper]) -> None:
    """Without files for its pipes the keeper's thread ended in silence, and the run waited for ever."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        keeper = keep("import time; time.sleep(600)", Restarts(first_s=0.05, most_s=0.1, failures=10**6))
        events = until(keeper, lambda event: event.kind == "failed")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert events[0].text.startswith("cannot start ") and events[0].text.endswith("Too many open files")
    until(keeper, lambda event: event.kind == "started")


def test_a_signal_to_all_processes_of_a_job_leaves_a_guard_that_starts(tmp_path: Path) -> None:
    """The launcher does not block SIGTERM as Ray's processes did, and a new process has no handlers yet."""
    at_once = lambda: os.kill(os.getpid(), signal.SIGTERM)  # noqa: E731
    guarded = Guarded("it", ["/bin/sh", "-c", "exit 5"], preexec_fn=at_once)
    assert guarded.pid is not None and guarded.wait() == 5
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_restarts_back_off_and_end_with_the_last_lines(keep: Callable[..., Keeper]) -> None:
    keeper = keep("print('no such luck'); raise SystemExit(3)")
    events = until(keeper, lambda event: event.kind in FINAL)
    failed = [event for event in events if event.kind in ("failed", "gave_up")]
    assert [event.kind for event in failed] == ["failed", "failed", "gave_up"]
    assert "again in 0.05 s" in failed[0].text and "again in 0.1 s" in failed[1].text
    assert "exit code 3" in failed[2].text and "no such luck" in failed[2].text


def test_failures_do_not_add_up_over_progress(keep: Callable[..., Keeper], tmp_path: Path) -> None:
    """It makes progress in its first three lives, and in none after."""
    keeper = keep(
        f"import os\nlives = open({str(tmp_path / 'lives')!r}, 'a+')\nlives.write('x')\nlives.flush(); lives.seek(0)\n"
        "from configs.entrypoint import made_progress\nlen(lives.read()) <= 3 and made_progress()\nraise SystemExit(3)",
        Restarts(first_s=1000.0, most_s=1000.0, failures=2),
    )
    events = until(keeper, lambda event: event.kind in FINAL)
    failed = [event.text for event in events if event.kind == "failed"]
    assert len(failed) == 3 and all("again at once" in text for text in failed)
    assert "failed 2 times in a row and never delivered a group" in events[-1].text


def test_bad_input_is_not_tried_again(keep: Callable[..., Keeper]) -> None:
    keeper = keep("print('data.train: nope: no such file'); raise SystemExit(2)")
    events = until(keeper, lambda event: event.kind in FINAL)
    assert [event.kind for event in events if event.kind != "line"] == ["started", "refused"]
    assert events[-1].text == "data.train: nope: no such file"


def test_a_failed_probe_of_the_first_policy_ends_the_server_without_restart(keep: Callable[..., Keeper]) -> None:
    """The line of `rollout.__main__.explain_failure`, after lines of vLLM. A restart would take minutes."""
    words = "python -m rollout: version 0: the probe's log-probabilities differ"
    keeper = keep(f"print('INFO of vLLM'); print({words!r}); raise SystemExit(2)", role="rollout")
    events = until(keeper, lambda event: event.kind in FINAL)
    assert [event.kind for event in events if event.kind != "line"] == ["started", "refused"]
    assert events[-1].text == words


@pytest.mark.parametrize(("role", "kind"), [("rollout", "ended"), ("learner", "ended"), ("buffer", "failed")])
def test_only_the_buffer_must_not_end(keep: Callable[..., Keeper], role: str, kind: str) -> None:
    events = until(keep("pass", role=role), lambda event: event.kind in ("failed", *FINAL))
    assert events[-1].kind == kind


def test_drain_lets_the_process_finish(keep: Callable[..., Keeper]) -> None:
    code = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nprint('ready', flush=True)\n"
    keeper = keep(code + "signal.sigwait({15})\nprint('finished', flush=True)")
    until(keeper, lambda event: event.text == "ready")
    keeper.drain(60.0)
    events = until(keeper, lambda event: event.kind in FINAL)
    assert [event.text for event in events if event.kind == "line"] == ["ready", "finished"]
    assert (events[-1].kind, events[-1].code) == ("ended", 0)


def test_a_process_is_asked_to_finish_only_once(keep: Callable[..., Keeper]) -> None:
    """Its node leaves and then the run is to end: a second SIGTERM would force it."""
    code = (
        "import signal, time\nasked = []\nsignal.signal(15, lambda *_: (asked.append(1), print('asked', flush=True)))\n"
    )
    code += "print('ready', flush=True)\nwhile not asked:\n    time.sleep(0.05)\n"
    keeper = keep(code + "time.sleep(2)\nprint(len(asked), flush=True)")
    until(keeper, lambda event: event.text == "ready")
    first = threading.Thread(target=keeper.drain, args=(60.0,))
    first.start()
    until(keeper, lambda event: event.text == "asked")
    keeper.drain(60.0)
    first.join()
    events = until(keeper, lambda event: event.kind in FINAL)
    assert [event.text for event in events if event.kind == "line"] == ["ready", "asked", "1"]
    assert (events[-1].kind, events[-1].code) == ("ended", 0)


def test_drain_gives_notice_of_its_timeout(keep: Callable[..., Keeper]) -> None:
    code = "import signal\nfrom configs.entrypoint import notice_s\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\n"
    keeper = keep(code + "print(notice_s(), flush=True)\nsignal.sigwait({15})\nprint(notice_s(), flush=True)")
    until(keeper, lambda event: event.text == "None")
    keeper.drain(123.0)
    assert "123.0" in [event.text for event in until(keeper, lambda event: event.kind in FINAL)]


def test_drain_forces_what_does_not_end(keep: Callable[..., Keeper]) -> None:
    keeper = keep("import signal\nsignal.signal(15, signal.SIG_IGN)\n" + FAMILY + "time.sleep(600)")
    pids = family(keeper)
    began = time.monotonic()
    keeper.drain(0.3)
    assert time.monotonic() - began < 300  # not the 600 of its sleep
    assert gone(pids)
    assert until(keeper, lambda event: event.kind in FINAL)[-1].code == 137


class StoppedOnce:
    """A clock of a process that is stopped for longer than a drain may take. Makes the file `go` after that."""

    def __init__(self, stopped_s: float, go: Path) -> None:
        self._looks, self._stopped_s, self._go = 0, stopped_s, go

    def __call__(self) -> float:
        self._looks += 1
        if self._looks == 5:
            self._go.touch()
        return self._stopped_s if self._looks >= 4 else 0.0  # the drain has begun with the third look


def test_a_drain_does_not_count_the_time_for_which_everything_is_stopped(
    keep: Callable[..., Keeper], tmp_path: Path
) -> None:
    code = "import os, signal, time\nsignal.pthread_sigmask(signal.SIG_BLOCK, {15})\nprint('ready', flush=True)\n"
    code += "signal.sigwait({15})\nwhile not os.path.exists('go'):\n    time.sleep(0.02)"
    keeper = keep(code)
    until(keeper, lambda event: event.text == "ready")
    keeper.drain(4.0, AwakeClock(StoppedOnce(5.0, tmp_path / "go")))
    assert until(keeper, lambda event: event.kind in FINAL)[-1].code == 0


def test_a_killed_guard_is_reported_once_its_command_has_ended() -> None:
    """Else a second copy would start beside the first, which the kernel kills somewhat later; this one ignores that."""
    code = "import os, time\nfrom configs.parent_death import end_with_parent\nend_with_parent(0)\n"
    code += "os.write(1, b'ready')\ntime.sleep(1.5)"
    root = str(Path(__file__).parents[3])
    ours, theirs = os.pipe()
    guarded = Guarded("it", [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": root}, stdout=theirs)
    os.close(theirs)
    assert os.read(ours, 5) == b"ready" and guarded.pid
    os.close(ours)
    command = psutil.Process(guarded.pid)
    os.kill(command.ppid(), signal.SIGKILL)
    assert guarded.wait() == 137
    assert not command.is_running() or command.status() == psutil.STATUS_ZOMBIE


def test_drain_ends_a_pause_between_restarts(keep: Callable[..., Keeper]) -> None:
    keeper = keep("raise SystemExit(1)", Restarts(first_s=60.0))
    until(keeper, lambda event: event.kind == "failed")
    keeper.drain(30.0)
    assert until(keeper, lambda event: event.kind in FINAL)[-1].kind == "ended"


def test_a_command_that_does_not_exist_is_reported(tmp_path: Path) -> None:
    process = Process("it", "learner", ("/no/such/program",), tmp_path / "it.log", restarts=Restarts(failures=1))
    events = until(Keeper(process), lambda event: event.kind in FINAL)
    assert events[-1].kind == "gave_up" and "/no/such/program" in events[-1].text


def test_nothing_outlives_a_keeper_that_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "keeper.py"
    script.write_text(
        "import sys, time\nfrom pathlib import Path\n"
        "from actors.process import Process\nfrom actors.supervise.keeper import Keeper\n"
        f"argv = (sys.executable, '-c', {FAMILY + 'time.sleep(600)'!r})\n"
        f"keeper = Keeper(Process('it', 'rollout', argv, Path({str(tmp_path / 'it.log')!r})))\n"
        "seen = 0\nwhile True:\n    for event in keeper.events(seen, 5):\n"
        "        seen = event.number; print(event.text, flush=True)\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with psutil.Popen([sys.executable, str(script)], stdout=-1, text=True, env=env) as keeper:
        for line in keeper.stdout:
            if line.startswith("family"):
                break
        pids = [int(pid) for pid in line.split()[1:]]
        assert all(psutil.pid_exists(pid) for pid in pids)
        keeper.kill()
    assert gone(pids)


def test_events_of_a_keeper_that_replaces_another_one_are_new_although_the_clock_was_set_back(
    keep: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = until(keep("print('before')"), lambda event: event.kind in FINAL)[-1].number
    monkeypatch.setattr(time, "time_ns", lambda: 1)
    successor = keep("print('after')")
    until(successor, lambda event: event.kind in FINAL)
    assert [event.kind for event in successor.events(before, 1.0)] == ["started", "line", "ended"]
    seen = successor.events(before, 1.0)
    assert successor.events(seen[1].number, 1.0) == seen[2:]


def test_an_exit_code_comes_also_where_the_guard_ended_before_it_read_a_signal() -> None:
    """The kernel then reports a reset, before what the guard had sent."""
    ours, guards_end = socket.socketpair(type=socket.SOCK_SEQPACKET)
    with ours:
        with guards_end:
            send(guards_end, {"code": 0})
            send(ours, int(signal.SIGTERM))
        assert receive(ours, {}) == {"code": 0}
        assert receive(ours, {}) == {}


FORKING_OWNER = """
import os, signal, sys, time
from actors.supervise.guard import Guarded
guarded = Guarded("it", [sys.executable, "-c", "import time; time.sleep(600)"])
if not (child := os.fork()):
    time.sleep(600)
os.write(1, f"{guarded.pid} {child}".encode())
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_no_command_outlives_its_owner_because_of_what_the_owner_forked(tmp_path: Path) -> None:
    """A worker of multiprocessing inherits the owner's end of the socket, and may outlive the owner."""
    with open(tmp_path / "pids", "wb") as pids:
        subprocess.run([sys.executable, "-c", FORKING_OWNER], stdout=pids, timeout=60)
    command, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        assert gone([command]) and psutil.pid_exists(child)
    finally:
        for pid in (command, child):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
