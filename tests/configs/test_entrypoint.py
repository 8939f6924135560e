"""Flags and log lines; signals with and without an event loop and the exit boundary, each in a child process."""

import argparse
import errno
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from configs.entrypoint import BAD_INPUT, FAILED, PARENT, StopSignals, code_of, process_name, split_flags

IMPORTS = "import asyncio, logging, os, signal, sys, threading, time\nfrom configs.entrypoint import *\n"
LOOP = """
def drain(number):
    os.write(1, b"drain %d\\n" % number)
    {drained}

{start}
"""
THREAD = (
    LOOP
    + "with StopSignals(drain{force}):\n    os.write(1, b'ready\\n')\n    while not done:\n        time.sleep(0.01)\n"
)
TASK = (
    LOOP
    + "async def main():\n    with StopSignals(drain{force}):\n        os.write(1, b'ready\\n')\n"
    + "        while not done:\n            await asyncio.sleep(0.01)\n"
    + "asyncio.run(main())\n"
)


def flags(*argv: str) -> tuple[argparse.Namespace, list[str]]:
    return split_flags(
        argv,
        "python -m x",
        name={"default": "rollout-0"},
        no_report={"action": "store_true"},
        models={"nargs": "+", "type": Path, "default": []},
    )


@pytest.mark.parametrize("words", [["--name", "a"], ["--name=a"]])
def test_flags_are_taken_out_and_the_rest_keeps_its_order(words: list[str]) -> None:
    own, rest = flags("run.yaml", "--learner.lr", "-1", *words, "--batch.groups=4", "more.yaml", "--no-report", "-v")
    assert (own.name, own.no_report, own.models) == ("a", True, [])
    assert rest == ["run.yaml", "--learner.lr", "-1", "--batch.groups=4", "more.yaml", "-v"]


def test_flags_of_several_values_and_their_defaults() -> None:
    own, rest = flags("run.yaml", "--models", "a", "b", "--run.name=x")
    assert own.models == [Path("a"), Path("b")]
    assert (own.name, own.no_report) == ("rollout-0", False)
    assert rest == ["run.yaml", "--run.name=x"]


def test_an_override_with_spaces_is_no_value_of_a_flag() -> None:
    own, rest = flags("--models", "my model", "--data.system_prompt=think, then answer", "run.yaml", "--name=a b")
    assert (own.models, own.name) == ([Path("my model")], "a b")
    assert rest == ["--data.system_prompt=think, then answer", "run.yaml"]


def test_flags_are_not_abbreviated_and_help_is_the_run_files() -> None:
    assert flags("--nam=x", "--mod", "a", "--help", "-h")[1] == ["--nam=x", "--mod", "a", "--help", "-h"]


def test_a_flag_without_its_value_is_bad_input(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        flags("run.yaml", "--name")
    assert end.value.code == 2
    assert "--name" in capsys.readouterr().err


class Process:
    """A Python process that runs `code` after the imports; `wait_for` reads its stdout line by line."""

    def __init__(self, code: str) -> None:
        self.child = subprocess.Popen(
            [sys.executable, "-c", IMPORTS + code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )

    def wait_for(self, line: str) -> None:
        assert self.child.stdout is not None
        assert self.child.stdout.readline() == f"{line}\n"

    def end(self) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.child.communicate(timeout=60)
        return self.child.returncode, errors


@pytest.fixture
def processes() -> Iterator[list[Process]]:
    """Processes that are killed if the test fails before their end."""
    started: list[Process] = []
    yield started
    for process in started:
        if process.child.poll() is None:
            process.child.kill()
        process.child.communicate()


def start(processes: list[Process], code: str) -> Process:
    processes.append(Process(code))
    return processes[-1]


@pytest.mark.parametrize("body", [THREAD, TASK], ids=["thread", "loop"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_drains(body: str, number: int, processes: list[Process]) -> None:
    code = body.format(start="done = []", drained="done.append(number)", force="")
    process = start(processes, code + "print(signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)\n")
    process.wait_for("ready")
    process.child.send_signal(number)
    process.wait_for(f"drain {int(number)}")
    process.wait_for("True")  # the handlers of before are back
    assert process.end() == (0, "")


@pytest.mark.parametrize("body", [THREAD, TASK], ids=["thread", "loop"])
def test_the_second_signal_ends_the_process_at_once(body: str, processes: list[Process]) -> None:
    """Also while a thread that is no daemon runs, on which a normal end would wait."""
    threads = "done = []\nthreading.Thread(target=time.sleep, args=(3600,)).start()"
    process = start(processes, body.format(start=threads, drained="", force=""))
    process.wait_for("ready")
    process.child.send_signal(signal.SIGTERM)
    process.wait_for(f"drain {int(signal.SIGTERM)}")
    process.child.send_signal(signal.SIGINT)
    assert process.end() == (128 + signal.SIGINT, "")


@pytest.mark.parametrize("body", [THREAD, TASK], ids=["thread", "loop"])
def test_each_later_signal_forces(body: str, processes: list[Process]) -> None:
    forced = "done = []\nforced = []\ndef force(number):\n    forced.append(number)\n    os.write(1, b'force\\n')\n"
    forced += "    done.extend(forced[1:])\n"
    process = start(processes, body.format(start=forced, drained="", force=", force"))
    process.wait_for("ready")
    for line in (f"drain {int(signal.SIGINT)}", "force", "force"):
        process.child.send_signal(signal.SIGINT)
        process.wait_for(line)
    assert process.end() == (0, "")


def test_what_drain_raises_reaches_the_main_thread() -> None:
    def drain(number: int) -> None:
        raise InterruptedError(number)

    with StopSignals(drain) as stop, pytest.raises(InterruptedError):
        assert stop.count == 0
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()
    assert stop.count == 1


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("return 0", 0, ""),
        ("return BAD_INPUT", 2, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit('words')", 1, ""),
        ("raise KeyboardInterrupt", 130, ""),
        ("raise RuntimeError('the cause')", 1, "RuntimeError: the cause"),
        ("threading.Thread(target=time.sleep, args=(3600,)).start(); return 0", 0, ""),
    ],
)
def test_the_exit_boundary(body: str, code: int, words: str, processes: list[Process]) -> None:
    run = f"def main(argv):\n    print('out', end='')\n    {body}\nrun_and_exit(main, logging.getLogger('x'))\n"
    process = start(processes, f"configure_logging('[3]')\n{run}")
    out, errors = process.child.communicate(timeout=60)
    assert (process.child.returncode, out) == (code, "out")
    assert words in errors
    assert bool(errors) == bool(words)
    if words:
        assert " CRITICAL x[3]: failed\nTraceback" in errors


def test_a_full_disk_ends_a_process_with_one_line(processes: list[Process]) -> None:
    body = "raise OSError(28, 'No space left on device', 'runs/a/file')"
    process = start(processes, f"def main(argv):\n    {body}\nrun_and_exit(main, logging.getLogger('learner'))\n")
    said = "learner: runs/a/file: No space left on device; make room on its disk\n"
    assert process.end() == (1, said)


def test_a_full_disk_is_no_bad_input() -> None:
    def ended(reason: Exception) -> int:
        try:
            try:
                raise reason
            except Exception as error:
                raise ValueError("the keys cannot be made") from error
        except ValueError as error:
            return code_of(error)

    assert [code_of(OSError(number, "", "file")) for number in (errno.ENOSPC, errno.EDQUOT, errno.EACCES)] == [1, 1, 2]
    assert [code_of(ValueError("learner.lr")), ended(OSError(errno.ENOSPC, "")), ended(KeyError())] == [2, 1, 2]


def test_a_reader_that_went_away_is_no_failure() -> None:
    """As in `python -m actors status ... | head -1`: output that is still buffered is lost without an error."""
    run = "def main(argv):\n    sys.stdin.read()\n    print('out')\n    return 0\n"
    run += "run_and_exit(main, logging.getLogger('x'))\n"
    command, pipe = [sys.executable, "-c", IMPORTS + run], subprocess.PIPE
    buffered = {**os.environ, "PYTHONUNBUFFERED": ""}
    child = subprocess.Popen(command, env=buffered, stdin=pipe, stdout=pipe, stderr=pipe)
    assert child.stdin and child.stdout and child.stderr
    with child:
        child.stdout.close()
        child.stdin.close()
        assert child.wait(60) == 0
        assert child.stderr.read() == b""


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "prints", ["plain_text.print_visible('a line')", "Console(file=plain_text.output(), width=80).print('a line')"]
)
def test_output_that_is_lost_is_one_line_and_a_failure(prints: str, unbuffered: str) -> None:
    code = f"""
import logging
from rich.console import Console
from configs import plain_text
from configs.entrypoint import run_and_exit
def main(argv):
    for _ in range(3000): {prints}
    return 0
run_and_exit(main, logging.getLogger("test"))
"""
    with open("/dev/full", "w") as full:
        line, env = [sys.executable, "-c", code], os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(line, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, env=env)
    assert (done.returncode, done.stderr) == (1, "the output is incomplete: No space left on device\n")


def test_log_lines_have_time_level_logger_and_tag(processes: list[Process]) -> None:
    process = start(
        processes,
        "configure_logging('[3]')\nlog = logging.getLogger('learner')\nlog.setLevel(logging.DEBUG)\n"
        "log.info('ready'); log.debug('never shown')\nlogging.getLogger('/lib/hub/torch.py').info('saved')\n",
    )
    code, errors = process.end()
    (line,) = errors.splitlines()
    assert code == 0
    assert line.endswith(" INFO learner[3]: ready")


TREE = """
import multiprocessing, os, time
from configs.entrypoint import tie_children


def grow(methods):
    os.write(1, b"%d\\n" % os.getpid())
    if methods:
        multiprocessing.get_context(methods[0]).Process(target=grow, args=(methods[1:],)).start()
    time.sleep(300)


if __name__ == "__main__":
    tie_children()
    grow({methods})
"""


@pytest.mark.parametrize("methods", [["spawn", "spawn"], ["spawn", "fork"], ["fork", "spawn"], ["fork", "fork"]])
def test_children_and_their_children_die_with_a_killed_process(tmp_path: Path, methods: list[str]) -> None:
    (tmp_path / "tree.py").write_text(TREE.format(methods=methods))
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, str(tmp_path / "tree.py")], stdout=subprocess.PIPE, env=env) as top:
        family = [psutil.Process(int(top.stdout.readline())) for _ in range(3)]
        assert family[0].pid == top.pid
        top.kill()
        top.wait()
        assert not psutil.wait_procs(family, timeout=120)[1]


def test_a_process_with_another_parent_than_it_is_told_says_so() -> None:
    line = [sys.executable, "-c", "from configs.entrypoint import die_with_parent; die_with_parent()"]
    end = subprocess.run(line, env=os.environ | {PARENT: "0"}, capture_output=True, text=True)
    assert end.returncode == FAILED
    assert end.stderr.startswith(f"{PARENT}: 0 has ended or is not the parent of ")


def test_a_name_of_a_process_that_cannot_be_a_file_s_is_refused_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a/b", "", "..\n"):
        with pytest.raises(SystemExit) as ended:
            split_flags(["run.yaml", f"--name={name}"], "python -m rollout", name={"type": process_name})
        (line,) = capsys.readouterr().err.splitlines()
        assert ended.value.code == BAD_INPUT and line.startswith(f"python -m rollout: argument --name: {name!r} is not")


def test_a_hub_out_of_reach_is_one_line_of_the_command() -> None:
    """Its client warns of each of five tries otherwise."""
    code = "from configs.entrypoint import quiet_hub; quiet_hub(); from huggingface_hub.utils import _http; "
    line = [sys.executable, "-c", f"{code}print(_http.logger.getEffectiveLevel())"]
    done = subprocess.run(line, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{logging.ERROR}\n", done.stderr
