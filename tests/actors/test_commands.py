"""The commands of `python -m actors`: what a reader that leaves does to each."""

import signal
from collections.abc import Iterator
from contextlib import suppress

import pytest

from actors.__main__ import COMMANDS, main


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
