"""Processes that end with their parents, and orphans that find a new one."""

import signal
import subprocess
import sys

import pytest

from configs import parent_death

GRANDCHILD = """
import os, time
from configs.parent_death import end_with_parent
end_with_parent({number})
print(os.getpid(), flush=True)
time.sleep(60)
"""
CHILD = """
import os, subprocess, sys
grandchild = subprocess.Popen([sys.executable, "-c", {grandchild!r}], stdout=subprocess.PIPE)
print(int(grandchild.stdout.readline()), flush=True)
os._exit(0)
"""
SUBREAPER = """
import os, subprocess, sys
from configs.parent_death import adopt_orphans
adopt_orphans()
done = subprocess.run([sys.executable, "-c", {child!r}], stdout=subprocess.PIPE, text=True, check=True)
print(os.waitstatus_to_exitcode(os.waitpid(int(done.stdout), 0)[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_orphan_ends_by_the_signal_and_the_subreaper_sees_it(number: int) -> None:
    child = CHILD.format(grandchild=GRANDCHILD.format(number=int(number)))
    command = [sys.executable, "-c", SUBREAPER.format(child=child)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == str(-number), done.stderr


def test_what_the_kernel_refuses_is_an_error() -> None:
    with pytest.raises(OSError, match=r"prctl\(1, 4096\): Invalid argument"):
        parent_death.end_with_parent(4096)
