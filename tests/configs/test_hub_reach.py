"""Whether the hub answers, judged in seconds, and what commands that judge a run file do if it does not."""

import json
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.hub_reach import OFFLINE, SKIPPED, is_skipped, reachable, skip_hub_out_of_reach
from configs.load import dump, load
from tests.harness.ports import free_port

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def without_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def open_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def closed_port() -> int:
    return free_port()


def run_file(folder: Path, model: str) -> list[str]:
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"problem": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(100)))
    given = {"model.path": model, "data.train": rows, "reward.function": "exact_match", "run.folder": folder / "runs"}
    return [f"--{key}={value}" for key, value in given.items()]


def test_only_what_accepts_a_connection_is_reachable(open_port: int, closed_port: int) -> None:
    assert reachable(f"http://127.0.0.1:{open_port}")
    assert not reachable(f"http://127.0.0.1:{closed_port}")


def test_a_silent_host_takes_no_longer_than_was_given() -> None:
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        waiting = [socket.socket() for _ in range(4)]
        for each in waiting:  # nobody accepts: further connections wait
            each.setblocking(False)
            each.connect_ex(full.getsockname())
        assert not reachable(f"http://127.0.0.1:{full.getsockname()[1]}", within_s=0.3)
        assert time.monotonic() - begin < 60  # the kernel itself tries for minutes
        for each in waiting:
            each.close()


def test_the_proxy_is_asked_where_there_is_one(
    open_port: int, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{open_port}")
    assert reachable("https://hub.invalid")
    monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{closed_port}")
    assert not reachable("https://hub.invalid")


def test_the_hub_is_left_out_only_for_a_hub_s_name_that_cannot_be_asked_for(
    tmp_path: Path, open_port: int, closed_port: int
) -> None:
    out, reached = f"http://127.0.0.1:{closed_port}", f"http://127.0.0.1:{open_port}"
    named, local = load(run_file(tmp_path, "no/model")), load(run_file(tmp_path, str(tmp_path)))
    for config, given, left_out in (
        (named, {"HF_ENDPOINT": out}, True),
        (named, {"HF_ENDPOINT": reached}, False),
        (local, {"HF_ENDPOINT": out}, False),
    ):
        environment = dict(given)
        skip_hub_out_of_reach(config, environment)
        assert (OFFLINE in environment, SKIPPED in environment) == (left_out, left_out)
        assert is_skipped(config.model.path, environment) == left_out
    environment = {"HF_ENDPOINT": out, OFFLINE: "1"}
    skip_hub_out_of_reach(named, environment)
    assert SKIPPED not in environment, "the user's own choice is judged as before"


@pytest.mark.parametrize("module", [("actors.doctor.price", "--gpu", "H100"), ("actors.doctor.run_file",)])
def test_a_run_file_with_a_hub_s_name_is_judged_without_a_network(
    module: tuple[str, ...], tmp_path: Path, closed_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's client alone tries six times, in 23 s at least, and then the run file must not be refused."""
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{closed_port}")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "empty"))
    monkeypatch.delenv(OFFLINE, raising=False)
    watched = "import sys, time, runpy; slept = []; time.sleep = lambda s: slept.append(s); sys.argv = sys.argv[1:]\n"
    watched += "try: runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)\n"
    watched += "finally: print('slept', sum(s for s in slept if s >= 1))"
    line = [sys.executable, "-c", watched, *module]
    done = subprocess.run(
        line, input=dump(load(run_file(tmp_path, "no/model"))), capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert "slept 0" in done.stdout, "it waits between tries"
    if "actors.doctor.price" in module:
        assert "not known, because of" in done.stdout
        return
    why = "is not on this machine, and the hub cannot be reached: prompts and layers are not judged"
    assert [line for line in done.stdout.splitlines() if "model.path: " in line] == [
        f"warning: model.path: no/model {why}"
    ]
