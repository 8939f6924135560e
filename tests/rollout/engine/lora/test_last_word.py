"""`python -m rollout evaluate` waits for another process as long as that runs, says so, and leaves none behind."""

import logging
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollout.engine.lora.adapter_folder import last_word
from tests.harness.world import ROOT


class Giver(logging.Handler):
    """Lets a process that reads from `pipe` go on at the second line of the log."""

    def __init__(self, pipe: int) -> None:
        super().__init__()
        self.pipe, self.lines = pipe, 0

    def emit(self, record: logging.LogRecord) -> None:
        self.lines += 1
        if self.lines == 2:
            os.write(self.pipe, b"go on")


def test_a_long_reading_is_told_and_waited_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    os.mkfifo(fifo := tmp_path / "fifo")
    giver = Giver(os.open(fifo, os.O_RDWR))
    logging.getLogger("rollout").addHandler(giver)
    try:
        assert last_word([sys.executable, "-c", f"print('read', open({str(fifo)!r}).read(5)[:2])"], 0.05) == "go"
    finally:
        logging.getLogger("rollout").removeHandler(giver)
        os.close(giver.pipe)
    assert giver.lines >= 2 and all("goes on; Ctrl-C ends it" in one.message for one in caplog.records)


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("sys.exit('the model\\nMemoryError: 9 GiB')", r"-c .*: exit code 1: MemoryError: 9 GiB"),
        ("os.kill(os.getpid(), 9)", r"-c .*: ended by SIGKILL: it said nothing"),
        ("sys.stderr.write('a warning\\nPROG: no model there\\n'); sys.exit(2)", r"^PROG: no model there"),
        ("sys.exit(2)", r"-c .*: exit code 2: it said nothing"),
    ],
)
def test_a_process_that_fails_is_named_with_its_last_line(code: str, says: str) -> None:
    with pytest.raises(ValueError, match=f"{says}$"):
        last_word([sys.executable, "-c", f"import os, sys; {code}"])


def test_an_interruption_ends_the_process_too(tmp_path: Path) -> None:
    """Also one that ignores the interruption, as it would be while it imports."""
    os.mkfifo(fifo := tmp_path / "fifo")
    child = f"import os, signal; signal.signal(2, signal.SIG_IGN); open({str(fifo)!r}, 'w').write(str(os.getpid()))"
    child += "; signal.pause()"
    code = "import signal; signal.signal(2, signal.default_int_handler); "  # whoever runs the tests may ignore it
    code += f"from rollout.engine.lora import adapter_folder as it; it.last_word([{sys.executable!r}, '-c', {child!r}])"
    asking = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    pid = int(fifo.read_text())
    asking.send_signal(signal.SIGINT)
    _, errors = asking.communicate(timeout=60)
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # which ends it, if it is left behind
