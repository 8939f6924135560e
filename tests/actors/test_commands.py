"""The commands of `python -m actors`: what a reader that leaves does to each, and a file that may not be read."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from actors.__main__ import COMMANDS, main
from actors.scaling import command
from configs.entrypoint import BAD_INPUT
from configs.schema import Config
from configs.writing import WriteError
from tests.harness.watched import make_config


@pytest.fixture(autouse=True)
def as_python_starts() -> Iterator[None]:
    """SIGPIPE is ignored, as in each new interpreter."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGPIPE, before)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "launch"])
def test_only_commands_that_print_end_when_their_reader_leaves(name: str) -> None:
    with suppress(SystemExit):
        main([name, "--servers=2", "no/such/run.yaml"] if name == "scale" else [name, "no/such/run.yaml"])
    ends = name in ("status", "report", "doctor")
    assert signal.getsignal(signal.SIGPIPE) == (signal.SIG_DFL if ends else signal.SIG_IGN)


def into_a_closed_pipe(*line: str) -> tuple[int, str]:
    """Exit code and errors of a Python whose output nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *line], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writer)
    return done.returncode, done.stderr


@pytest.mark.parametrize("flags", [("--port", "0"), ("--terminal",)])
def test_a_watch_whose_reader_has_left_ends_without_a_traceback(flags: tuple[str, ...], tmp_path: Path) -> None:
    code, errors = into_a_closed_pipe("-m", "actors", "watch", str(make_config(tmp_path).run.path), *flags)
    assert code in (1, 128 + signal.SIGPIPE) and not errors


DISPLAY = """
import sys
from pathlib import Path
from typing import Any
from actors.process import Event, Process
from actors.watch.display import Display
from configs.load import load
words = ["--model.path=m", "--data.train=d", "--reward.function=r", f"--run.folder={sys.argv[1]}"]
display = Display(load([*words, "--log.display=plain"]))
with display.shown():
    for number in range(1000):
        display.say("a line")
        display.show_event(Process("learner", "learner", ("x",), Path("log")), Event(number, "line", "more"))
    display.refresh()
print("it goes on", file=sys.stderr)
"""


def test_a_launch_whose_reader_has_left_goes_on(tmp_path: Path) -> None:
    assert into_a_closed_pipe("-c", DISPLAY, str(tmp_path)) == (0, "it goes on\n")


def test_a_launch_whose_output_fills_the_disk_goes_on(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-c", DISPLAY, str(tmp_path)]
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=300)
    assert done.stderr.startswith("it goes on\n") and "Traceback" not in done.stderr


@pytest.mark.parametrize("kind", [PermissionError, WriteError])
def test_a_file_that_this_user_may_not_read_or_write_is_named_in_one_line(
    kind: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another user may have started the run."""

    def refused(*_: object) -> Any:
        raise kind(errno.EACCES, "Permission denied", str(tmp_path / "metrics.jsonl"))

    monkeypatch.setattr("actors.report.summary.main", refused)
    assert main(["report", str(tmp_path)]) == BAD_INPUT
    line = f"python -m actors report: {tmp_path}/metrics.jsonl: Permission denied; run this as the user who started"
    assert capsys.readouterr().err.startswith(line)


def test_ctrl_c_ends_the_wait_of_scale_and_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async def interrupted(config: Config, servers: int | None, waits: bool) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "scale", interrupted)
    run = make_config(tmp_path).run.path
    assert main(["scale", str(run), "--servers=2"]) == 128 + signal.SIGINT
    said = capsys.readouterr().err
    assert said == f"this command waits no longer; the servers stay wanted: see `python -m actors status {run}`\n"
