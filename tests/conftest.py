"""For all tests: one CPU thread per process, because many tests start several processes on few cores; the same cases of
each property in every run, `--hypothesis-profile explore` draws others; no process that makes entries of
reasoning-gym outlives the file of tests that asked for it, because others count the processes that are left; and a
command that a test calls here quietens no logger for the tests after it and leaves SIGPIPE ignored, nor does a file of
tests leave a variable of ours in the environment of those that follow. Whoever starts the tests in the background may
have SIGINT, SIGQUIT and SIGHUP ignored, which children inherit: here they do what they do in a terminal. Compiled
modules are kept although an image may set PYTHONDONTWRITEBYTECODE: hundreds of processes are started, and each would
compile them again.
"""

import gc
import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.harness import children

pytest_plugins = ["tests.harness.lanes"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # without it a missing model is requested six times, in 24 s
os.environ.setdefault("TORCH_FAKE_TENSOR_DISPATCH_CACHE", "0")  # costs more than it saves where little is compiled
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
settings.register_profile("explore", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", settings.get_profile("explore"), derandomize=True)
settings.load_profile("same")


def leave_torch_untraced() -> None:
    """From 9.2 on pytest listens to each logger that does not propagate. Torch writes the trace of its compiler as soon
    as somebody listens: a fifth of the time of a test that compiles."""
    logging.getLogger("torch.__trace").propagate = True


def pytest_collection() -> None:
    """Nothing that is imported for tests is garbage: the collector only walks through more and more of it."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Torch is imported by now, and pytest has not yet begun to listen to what all tests say."""
    leave_torch_untraced()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol() -> None:
    """A test before this one may have imported it."""
    leave_torch_untraced()


@pytest.fixture(autouse=True)
def loggers_keep_their_levels() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("", "buffer", "learner", "rollout", "actors")]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True)
def the_working_folder_stays() -> Iterator[None]:
    """Tests after this one in the same process name files of the repository."""
    before = os.getcwd()
    yield
    assert os.getcwd() == before, "use monkeypatch.chdir"


@pytest.fixture(autouse=True)
def a_broken_pipe_ends_no_test() -> Iterator[None]:
    """A command that prints has the signal end it; here it would end the process of all tests that follow."""
    yield
    if signal.getsignal(signal.SIGPIPE) is not signal.SIG_IGN:
        signal.signal(signal.SIGPIPE, signal.SIG_IGN)


@pytest.fixture(scope="module", autouse=True)
def other_files_processes_are_known() -> Iterator[None]:
    """And the one that serves all files outlives each of them."""
    children.remember()
    before = children.trackers()
    yield
    assert {*before} <= {*children.trackers()}, "a test ended the resource tracker of this process"


@pytest.fixture(scope="module", autouse=True)
def entries_are_made_no_more() -> Iterator[None]:
    yield
    if (made := sys.modules.get("buffer.data.entry_maker")) is not None:
        made.entry_maker().close()


@pytest.fixture(scope="module", autouse=True)
def no_variable_of_ours_is_left() -> Iterator[None]:
    def ours() -> dict[str, str]:
        return {key: value for key, value in os.environ.items() if key.startswith("HEADRACE_")}

    before = ours()
    yield
    assert ours() == before
