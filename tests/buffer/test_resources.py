"""Open files and memory: what is left, and what the log says before it runs out."""

import logging
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from buffer import resources
from buffer.resources import MemoryWatch, memory_in_words, memory_left
from configs.flow.capacity import OWN_FILES, RESERVED_FILES, connections, memory_bytes, open_files
from configs.load import load
from configs.schema import Config

NEEDED = ["--model.path=m", "--data.train=d.parquet", "--reward.function=countdown"]


def config(*overrides: str) -> Config:
    return load([*NEEDED, *(f"--{one}" for one in overrides)])


COUNTS = """
import os
from buffer.resources import OpenFiles
from configs.flow.capacity import OWN_FILES
files = OpenFiles(limit=10_000)
before = files.left()
opened = [os.open(os.devnull, os.O_RDONLY) for _ in range(20)]
assert files.left() <= before - 20, (before, files.left())  # numbers that were free above the lowest are passed over
lowest = os.open(os.devnull, os.O_RDONLY)
os.close(lowest)
enough = lowest + OWN_FILES // 2
assert OpenFiles(limit=enough).refusal("rollout-7") == ""
words = OpenFiles(limit=enough - 1).refusal("rollout-7")
assert "rollout-7" in words and f"{enough - 1} files open" in words and "ulimit -Hn" in words, words
"""


def test_files_are_counted_down_and_the_first_without_a_place_is_refused_with_number_and_remedy() -> None:
    """In a process of its own: threads of other tests open and close files at any time."""
    done = subprocess.run([sys.executable, "-c", COUNTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RAISES = """
import logging, resource, sys
from buffer.resources import raise_open_files
from configs.load import load
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 400))
raise_open_files(load(sys.argv[1:]))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(("servers", "warned"), [(8, False), (500, True)])
def test_the_limit_is_raised_at_the_start_and_too_low_a_one_is_told(servers: int, warned: bool) -> None:
    command = [sys.executable, "-c", RAISES, *NEEDED, f"--rollout.servers={servers}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{400 - RESERVED_FILES}\n", "the rest is for the store"
    assert (f"rollout.servers {servers} and learner.ranks 1 are" in done.stderr) == warned
    assert ("LimitNOFILE" in done.stderr) == warned


def test_what_a_run_takes_grows_with_it() -> None:
    small, large = config(), config("rollout.servers=2048", "learner.ranks=256", "batch.groups=256")
    assert connections(large) == 2048 + 256 + 8
    assert open_files(large) == connections(large) + OWN_FILES
    assert memory_bytes(large) > memory_bytes(small)
    assert memory_bytes(large, 10**6) == memory_bytes(large) + (16 + 320) * 10**6


def test_memory_that_gets_short_is_told_with_what_is_held_and_not_each_time(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.WARNING)
    watch = MemoryWatch(0.0)
    watch.look({"groups that wait": 2**29}, 0.0)
    monkeypatch.setattr(resources, "LOW_BYTES", 2**60)
    assert watch.due == resources.LOOK_S
    for now in (10.0, 20.0, 100.0):
        watch.look({"groups that wait": 2**29}, now)
    assert len(caplog.messages) in (2, 3)  # a third where memory is short anyway
    assert "groups that wait 0.50" in caplog.messages[-1] and "memory gets short" in caplog.messages[-1]


def test_words_about_memory() -> None:
    words = memory_in_words(3 * 2**29, 2**29, {"parts on their way": 2**28})
    assert words.startswith("memory gets short: 0.50 GiB are left on this machine, the buffer takes 1.50")
    assert "(parts on their way 0.25); stop what else runs here" in words


@pytest.mark.parametrize(("most", "used", "left"), [("max", 5, None), (str(2**20), 2**20 - 4096, 4096 + 100)])
def test_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: str, used: int, left: int) -> None:
    monkeypatch.setattr(resources, "CGROUP", tmp_path)
    (tmp_path / "memory.max").write_text(most)
    (tmp_path / "memory.current").write_text(str(used))
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100\n")
    assert memory_left() == left if left else memory_left() > 2**20


KEEPS = """
import resource
from buffer.resources import keep_memory
keep_memory()

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytes(100_000) for _ in range(200)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

rounds = [faults() for _ in range(5)]
assert rounds[-1] < rounds[0] / 4, rounds
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory in its own way")
def test_memory_that_was_freed_is_used_again_and_not_asked_for_anew() -> None:
    done = subprocess.run([sys.executable, "-c", KEEPS], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
