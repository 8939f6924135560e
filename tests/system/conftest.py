"""One set of problems and one model for all system tests, made once."""

import fcntl
import os
import shutil

import pytest

from tests.harness.toy import Toy, make_toy


@pytest.fixture(scope="session")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The first of several workers makes it, and each has a copy, into which its tests write their runs."""
    own = tmp_path_factory.mktemp("toy")
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return make_toy(own)
    first = tmp_path_factory.getbasetemp().parent / "first_toy"
    with first.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (first / "model" / "warm_start.json").exists():
            make_toy(first)
    shutil.copytree(first, own, dirs_exist_ok=True)
    return Toy(own)
