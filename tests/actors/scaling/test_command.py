"""`python -m actors scale`: what it says, and its exit codes; with a real buffer in this process."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.scaling import command
from actors.scaling.command import arrival, prospect, scale
from buffer.wire.connection import Connection, RefusedError
from buffer.wire.protocol import Ack, Kept, Scale, State, Status
from configs.load import load
from configs.schema import Config
from tests.harness.buffer_process import buffer, client, in_loop, rollout
from tests.harness.keys import give_keys
from tests.harness.ports import free_port

SETTINGS = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=math"]


def config(folder: Path, address: str) -> Config:
    found = load([*SETTINGS, f"--run.folder={folder}", f"--buffer.address={address}", "--rollout.drain_s=7"])
    give_keys(found.run.path)
    return found


def kept(wanted: int, most: int = 4, **servers: Any) -> Kept:
    lives = {name.replace("_", "-"): life for name, life in servers.items()}
    return Kept(servers=lives, wanted=wanted, least=1, most=most, bound="there are GPUs for 4 of them")


@asynccontextmanager
async def launcher(address: str) -> AsyncIterator[Connection]:
    """A launcher that keeps server 0 at first; the test says what it reports later."""
    async with client(address, "launcher", "launcher", fingerprint="") as connection:
        await connection.expect(kept(1, rollout_0="started"), Ack)
        yield connection


class Said:
    """The lines of a command that runs in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.lines: list[str] = []
        self._capsys = capsys

    async def until(self, line: str) -> None:
        """Wait until it has said `line`."""
        while line not in self.lines:
            await asyncio.sleep(0.02)
            self.read()

    def read(self) -> list[str]:
        """All lines so far."""
        self.lines += self._capsys.readouterr().out.splitlines()
        return self.lines


@pytest.mark.parametrize("words", [[], ["--servers=0"], ["--servers=-1"], ["--servers=many"], ["--servers=1.5"]])
def test_a_number_that_is_none_is_refused(words: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    run = [*SETTINGS, f"--run.folder={tmp_path}"]
    assert command.main([*run, *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("--servers: ") and "write --servers=4, or --servers=auto" in line


def test_a_number_without_its_flag_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert command.main([str(tmp_path), "2"]) == 2
    assert capsys.readouterr().err == "2: the number of servers has a flag; write --servers=2\n"


def test_a_run_that_does_not_exist_and_a_buffer_that_does_not_run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with pytest.raises(SystemExit) as ended:
        command.main([str(tmp_path / "nothing"), "--servers=2"])
    assert ended.value.code == 2 and "no such file" in capsys.readouterr().err
    address = f"tcp://127.0.0.1:{free_port()}"
    assert command.main([*SETTINGS, f"--buffer.address={address}", "--servers=2"]) == 1
    assert f"the buffer at {address} does not answer: is the run launched?" in capsys.readouterr().err


@in_loop
async def test_without_a_launcher_nobody_would_do_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    async with buffer() as it:
        assert await scale(config(tmp_path, it.address), 2, waits=True) == 1
        assert "no launcher keeps this run's servers" in capsys.readouterr().err


@in_loop
async def test_a_launcher_that_is_gone_keeps_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(command, "LAUNCHER_POLLS", 1)
    async with buffer() as it, client(it.address, "a test", "observer", fingerprint="") as person:
        async with launcher(it.address):
            pass
        while (await person.expect(Status(), State)).launcher_gone_s is None:
            await asyncio.sleep(0.02)
        assert await scale(config(tmp_path, it.address), 2, waits=True) == 1
    assert "no launcher keeps this run's servers" in capsys.readouterr().err


@in_loop
async def test_more_than_there_are_gpus_for_is_refused_by_the_buffer(tmp_path: Path) -> None:
    async with buffer() as it, launcher(it.address):
        with pytest.raises(RefusedError, match="5 servers: the run may have 1 to 4; there are GPUs for 4 of them"):
            await scale(config(tmp_path, it.address), 5, waits=True)


@in_loop
async def test_it_says_what_happens_and_waits_until_the_new_one_works(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = Said(capsys)
    async with buffer() as it, launcher(it.address) as it_keeps, rollout(it.address, "rollout-0") as one:
        await one.beat({})
        waiting = asyncio.create_task(scale(config(tmp_path, it.address), 2, waits=True))
        await said.until("rollout-0 generates")
        for life in ("placing", "started"):
            await it_keeps.expect(kept(2, rollout_0="started", rollout_1=life), Ack)
            await said.until(f"rollout-1 {life}")
        assert not waiting.done()
        async with rollout(it.address, "rollout-1") as other:
            await other.beat({})
            assert await waiting == 0
    assert said.read() == [
        "servers: 1 -> 2; 1 to be placed; vLLM starts in a minute or two, then they generate",
        *("rollout-0 generates", "rollout-1 placing", "rollout-1 started", "rollout-1 generates"),
    ]


@in_loop
async def test_it_waits_until_a_drained_one_has_left(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    said = Said(capsys)
    async with buffer() as it, launcher(it.address) as it_keeps, rollout(it.address, "rollout-0") as one:
        await one.beat({})
        await it_keeps.expect(kept(2, rollout_0="started", rollout_1="started"), Ack)
        waiting = asyncio.create_task(scale(config(tmp_path, it.address), 1, waits=True))
        await said.until("rollout-1 started")
        await it_keeps.expect(kept(1, rollout_0="started", rollout_1="draining"), Ack)
        await said.until("rollout-1 draining")
        assert not waiting.done()
        await it_keeps.expect(kept(1, rollout_0="started"), Ack)
        assert await waiting == 0
    assert said.read()[-1] == "rollout-1 has left"


@in_loop
async def test_a_server_that_gives_up_is_a_failure_and_one_may_choose_not_to_wait(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    async with buffer() as it, launcher(it.address) as it_keeps:
        assert await scale(config(tmp_path, it.address), 2, waits=False) == 0
        await it_keeps.expect(kept(2, rollout_0="started", rollout_1="gave_up"), Ack)
        async with client(it.address, "scale", "launcher", fingerprint="") as connection:
            assert await arrival(config(tmp_path, it.address), connection, 2) == 1
    assert "rollout-1 could not be kept" in capsys.readouterr().out


@in_loop
async def test_what_failed_before_is_not_this_commands_failure(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    said = Said(capsys)
    async with buffer() as it, launcher(it.address) as it_keeps, rollout(it.address, "rollout-2") as one:
        await one.beat({})
        await it_keeps.expect(kept(3, rollout_0="gave_up", rollout_1="started", rollout_2="started"), Ack)
        waiting = asyncio.create_task(scale(config(tmp_path, it.address), 2, waits=True))
        await said.until("rollout-0 gave up")
        await it_keeps.expect(kept(2, rollout_0="gave_up", rollout_2="started"), Ack)
        assert await waiting == 0
    assert said.read()[0].startswith("servers: 3 -> 2; drained: rollout-0; ")


@pytest.mark.parametrize(
    ("other", "line"),
    [
        (3, "3 servers are wanted now, by another `scale`, and no longer 2"),
        (None, "1 servers are wanted now, as the run file says, and no longer 2"),
    ],
)
def test_it_does_not_wait_once_another_number_is_wanted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, other: int | None, line: str
) -> None:
    async def go() -> None:
        said = Said(capsys)
        async with buffer() as it, launcher(it.address) as it_keeps:
            waiting = asyncio.create_task(scale(config(tmp_path, it.address), 2, waits=True))
            await said.until("rollout-0 started")
            await it_keeps.expect(Scale(servers=other), Ack)
            async with asyncio.timeout(120):
                assert await waiting == 1
        assert said.read()[-1] == line

    asyncio.run(go())


def test_what_will_happen_in_words(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    three = kept(3, rollout_0="started", rollout_2="failed", rollout_4="placing", rollout_3="draining")
    line, leaving = prospect(settings, three, 1)
    assert line.startswith("servers: 3 -> 1; drained: rollout-2, rollout-4; their groups are finished within 7 s")
    assert leaving == "drained already: rollout-3"
    assert prospect(settings, three, 3) == [
        "nothing changes: 3 servers are kept already: rollout-0, rollout-2, rollout-4 (placing)",
        "drained already: rollout-3",
    ]
    broken = kept(2, rollout_0="gave_up", rollout_1="started")
    assert prospect(settings, broken, 3) == [
        "servers: 2 -> 3; 1 to be placed; vLLM starts in a minute or two, then they generate",
        "rollout-0 could not be kept before: scale down and up again to try anew",
    ]


def test_auto_says_from_how_many_to_how_many(tmp_path: Path) -> None:
    settings, three = config(tmp_path, "tcp://127.0.0.1:9"), kept(3, rollout_0="started", rollout_1="started")
    assert prospect(settings, three, None) == [
        "the number of servers is the run file's again: 1",
        "servers: 2 -> 1; drained: rollout-1; their groups are finished within 7 s, or made by the others",
    ]
    words = [*SETTINGS, f"--run.folder={tmp_path}", "--rollout.servers.min=2", "--rollout.servers.max=5"]
    assert prospect(load(words), three, None) == [
        "servers: 3 stay for now; the rule decides from here, between 2 and 5 (rollout.servers)"
    ]
