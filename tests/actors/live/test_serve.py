"""The watch server over real sockets: news that go on where a browser stopped, Prometheus, who may ask."""

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestServer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console

from actors.live import serve as serving
from actors.live import watcher as live_watcher
from actors.live.prometheus import exposition
from actors.live.screen import screen, show, spark
from actors.live.serve import application, main
from actors.live.watcher import Watcher
from actors.watch.metrics_log import Records
from actors.watch.overview import look_over
from buffer.wire.protocol import State
from configs import http_limits
from configs.http_limits import is_loopback_host
from configs.schema import Config
from tests.harness.buffer_process import in_loop
from tests.harness.fakes import until
from tests.harness.keys import give_keys
from tests.harness.watched import HOSTILE, append, evaluation, look, make_config, record, sample, state, store


@asynccontextmanager
async def watching(config: Config) -> AsyncIterator[tuple[aiohttp.ClientSession, Watcher]]:
    """The server in this process, and a client of it."""
    watcher = Watcher(config, config.run.path)
    following = asyncio.create_task(watcher.follow())
    server = TestServer(application(watcher, "127.0.0.1"))
    async with server, aiohttp.ClientSession(server.make_url("/")) as session:
        yield session, watcher
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def status_of(session: aiohttp.ClientSession, path: str, **options: Any) -> int:
    async with session.get(path, **options) as response:  # else its connection may be found unclosed
        return response.status


async def event(response: aiohttp.ClientResponse) -> dict[str, str]:
    """The next server-sent event: its fields."""
    fields = {}
    while line := (await response.content.readline()).decode().rstrip("\n"):
        name, _, value = line.partition(": ")
        fields[name] = value
    return fields


async def told(response: aiohttp.ClientResponse, what: str) -> tuple[str, list[Any]]:
    """Id and content of the next event that has some of `what`."""
    while True:
        fields = await event(response)
        if found := json.loads(fields["data"])[what]:
            return fields["id"], found


@in_loop
async def test_a_browser_that_comes_back_gets_what_it_missed_and_nothing_twice(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    async with watching(config) as (session, _):
        page = await (await session.get("/data")).json()
        assert page["version"] == [] and page["position"] == "0-0"
        append(config.run.path, record(1), look(1.0, 1), evaluation(0, 0.5))
        async with session.get("/events", params={"after": page["position"]}) as response:
            assert response.content_type == "text/event-stream"
            first_id, first = await told(response, "records")
        assert [one["version"] for one in first] == [1]
        append(config.run.path, record(2), look(2.0, 2))
        async with session.get("/events", headers={"Last-Event-ID": first_id}) as response:
            news = json.loads((await event(response))["data"])
        assert [one["version"] for one in news["records"]] == [2] and [one["time"] for one in news["looks"]] == [2.0]
        page = await (await session.get("/data")).json()
        async with session.get("/events", params={"after": first_id}) as response:
            second_id = (await event(response))["id"]
        restored = config.run.path / "metrics.tmp"
        restored.write_text(json.dumps(record(1)) + "\n")
        restored.replace(config.run.path / "metrics.jsonl")
        async with session.get("/events", headers={"Last-Event-ID": second_id}) as response:
            assert (await event(response))["event"] == "replaced"


@in_loop
async def test_a_browser_that_missed_too_much_gets_all_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "FAR_BYTES", 100_000)
    config = make_config(tmp_path)
    append(config.run.path, record(1))
    async with watching(config) as (session, _):
        async with session.get("/events") as response:
            last_id = (await event(response))["id"]
        append(config.run.path, *map(record, range(2, 400)))
        async with session.get("/events", headers={"Last-Event-ID": last_id}) as response:
            assert (await event(response))["event"] == "replaced"


@in_loop
async def test_a_browser_that_does_not_read_is_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "WRITE_S", 0.2)
    config = make_config(tmp_path)
    append(config.run.path, *map(record, range(1, 12_000)))
    watcher = Watcher(config, config.run.path)
    async with TestServer(application(watcher, "127.0.0.1")) as server:
        _, writer = await asyncio.open_connection("127.0.0.1", server.port, limit=1024)
        writer.write(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        await writer.drain()
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        async with asyncio.timeout(50):
            while server.runner.server.requests_count == 0 or server.runner.server.connections:
                await asyncio.sleep(0.05)
        writer.close()


@in_loop
async def test_on_a_pipe_what_stops_the_looks_is_told(tmp_path: Path) -> None:
    class Broken(Watcher):
        async def follow(self) -> None:
            raise OSError("no disk")

    with pytest.raises(ExceptionGroup):
        await show(Broken(config := make_config(tmp_path), config.run.path))


@in_loop
async def test_evaluations_looks_and_the_overview_are_news_too(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append(config.run.path, record(1), look(1.0, 1), evaluation(0, 0.5))
    async with watching(config) as (session, _), session.get("/events") as response:
        news = json.loads((await event(response))["data"])
        assert news["evaluations"] == [{"version": 0, "figures": {"aime mean@8": 0.5}}]
        assert news["looks"][0]["servers/heard"] == 2 and news["overview"]["status"] == "silent"


def test_the_buffers_answer_is_shown(tmp_path: Path, serve: Callable[[State], str]) -> None:
    address = serve(state())

    @in_loop
    async def test() -> None:
        config = make_config(tmp_path, f"buffer.address={address}")
        append(config.run.path, record(1))
        async with watching(config) as (session, watcher), session.get("/events") as response:
            while (overview := json.loads((await event(response))["data"])["overview"])["status"] != "running":
                pass
            assert overview["waits"] == [["learner-0", "rollout-0", "3.2 s", "batch 7 has 20 of 32 groups"]]
            assert any("rollout-1 is lost" in text for _, text in overview["alerts"])
            async with session.get("/metrics") as answered:
                metrics = await answered.text()
            assert watcher.state is not None and "headrace_buffer_up 1.0" in metrics

    test()


@in_loop
async def test_answers_of_any_batch_can_be_read(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    store(config.run.path, sample(HOSTILE))
    async with watching(config) as (session, _):
        found = await (await session.get("/samples", params={"batch": "39"})).json()
        assert [one["answer"] for one in found] == [HOSTILE, HOSTILE] and found[0]["prompt"] == "8 6 4=2"
        assert await (await session.get("/samples", params={"batch": "7"})).json() == []
        for none in ("", "x", "²", "9" * 5000):
            assert await status_of(session, "/samples", params={"batch": none}) == 400
        assert HOSTILE not in await (await session.get("/")).text()


@in_loop
async def test_a_web_site_cannot_make_its_name_mean_this_machine(tmp_path: Path) -> None:
    async with watching(make_config(tmp_path)) as (session, _):
        assert await status_of(session, "/", headers={"Host": "evil.example:5680"}) == 403
        for name in ("localhost:9", "127.0.0.1", "[::1]:5680"):
            assert await status_of(session, "/", headers={"Host": name}) == 200
    assert not is_loopback_host("10.0.0.7") and not is_loopback_host("head-node") and is_loopback_host("::1")
    assert not is_loopback_host("") and not is_loopback_host("[]"), "all interfaces"


@in_loop
async def test_connections_and_heads_of_the_page_have_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 16)
    monkeypatch.setattr(http_limits, "HEADER_S", 0.3)
    config, printed = make_config(tmp_path), list[str]()
    task = asyncio.create_task(serving.serve(Watcher(config, config.run.path), "127.0.0.1", 0))

    def port() -> int:
        printed.append(capsys.readouterr().out)
        found = re.search(r"http://127\.0\.0\.1:(\d+)/", "".join(printed))
        return int(found[1]) if found else 0

    await until(lambda: port() or task.done())
    held = [await asyncio.open_connection("127.0.0.1", port()) for _ in range(17)]
    for _, writer in held[:16]:
        writer.write(b"GET / HTTP/1.1\r\n")
    held[16][1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    async with asyncio.timeout(60):
        with suppress(ConnectionError):
            assert await held[16][0].read() == b"", "one more is closed at once"
        assert [await reader.read() for reader, _ in held[:16]] == [b""] * 16, "half a head is cut off"
    for _, writer in held:
        writer.close()
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port()}/data") as response:
        assert response.status == 200 and response.headers["X-Frame-Options"] == "DENY"
        assert response.headers["X-Content-Type-Options"] == "nosniff"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


def families(text: str) -> dict[str, dict[tuple[str, ...], float]]:
    """By name and labels, as Prometheus's own parser reads it."""
    return {
        found.name: {tuple(one.labels.values()): one.value for one in found.samples}
        for found in text_string_to_metric_families(text)
    }


def test_prometheus_reads_the_figures(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    odd = {"weights/rollout-0/pause_s": 0.5, "sample/solved": 0.25, "bad": float("nan")}
    append(config.run.path, record(1), record(2, **odd), evaluation(1, 0.5), look(1.0, 2))
    records = Records(config.run.path / "metrics.jsonl")
    found = families(exposition(records, state(), look_over(config, records, state(), 2e9, answers=True)))
    assert found["headrace_version"] == {(): 2.0} and found["headrace_buffer_up"] == {(): 1.0}
    assert found["headrace_length_mean"] == {(): 32.5} and found["headrace_sample"] == {("solved",): 0.25}
    assert found["headrace_weights_pause_s"] == {(): 0.02, ("rollout-0",): 0.5}
    assert found["headrace_eval_mean_8"] == {("aime",): 0.5} and "headrace_bad" not in found
    assert found["headrace_server_kv_usage"] == {("rollout-0",): 0.8}
    assert found["headrace_failed"] == {('reward: KeyError "answer"',): 4.0}
    assert found["headrace_wait_seconds"] == {("learner-0", "Take"): 3.25}
    silent = families(exposition(records, None, look_over(config, records, None, 2e9)))
    assert silent["headrace_buffer_up"] == {(): 0.0}
    assert silent["headrace_server_running"] == {("rollout-0",): 190.0, ("rollout-1",): 190.0}
    empty = Records(tmp_path / "nothing")
    assert families(exposition(empty, None, look_over(config, empty, None, 2e9)))["headrace_version"] == {(): 0.0}


def test_the_screen_of_a_terminal_says_what_the_page_says(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append(config.run.path, *(record(version) for version in range(1, 9)), evaluation(0, 0.5))
    records = Records(config.run.path / "metrics.jsonl")
    seen = look_over(config, records, state(failed={"task: \x1b[2J": 1}), 2e9, answers=True)
    console = Console(width=100, highlight=False)
    with console.capture() as capture:
        console.print(screen(seen, records))
    shown = capture.get()
    for words in ("8 / 40", "62 %", "one more server", "rollout-1 is lost", "learner-0", "mean@8 0.500", "80 %"):
        assert words in shown
    assert "\x1b[2J" not in shown and spark([0.0, None, 1.0]) == "▁ █" and spark([1.0, None]) == ""


def test_a_run_that_is_none_and_a_port_that_is_taken_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = make_config(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([str(tmp_path)])
    assert ended.value.code == 2 and "not a run's folder" in capsys.readouterr().err

    @in_loop
    async def test() -> None:
        async with TestServer(application(Watcher(config, config.run.path), "127.0.0.1")) as server:
            taken = ["--port", str(server.port), str(config.run.path)]
            command = [sys.executable, "-m", "actors", "watch", *taken]
            found = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True)
            assert found.returncode == 2 and "choose another port" in found.stderr
            assert len(found.stderr.splitlines()) == 1

    test()


@pytest.mark.parametrize(
    ("address", "names"),
    [
        (["--host", ""], "--host is empty"),
        (["--port=70000"], "--port 70000"),
        (["--host=localhost", "--port=70000"], "--port 70000"),
        (["--port=-1"], "--port -1"),
    ],
)
def test_an_address_that_is_none_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], address: list[str], names: str
) -> None:
    config = make_config(tmp_path)
    assert main([*address, str(config.run.path)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and said[0].startswith(f"python -m actors watch: {names}")


def test_a_dead_run_is_judged_by_the_records_that_are_read_already(tmp_path: Path) -> None:
    config, other = make_config(tmp_path), make_config(tmp_path / "other")
    watcher = Watcher(config, config.run.path)
    append(other.run.path, *(record(version) for version in range(1, 41)))
    watcher.records = Records(other.run.path / "metrics.jsonl")
    watcher.look()
    assert watcher.overview.status == "ended"


@in_loop
async def test_a_watcher_that_starts_before_its_run_sees_it_once_the_run_has_keys(
    tmp_path: Path, serve: Callable[[State], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live_watcher, "EVERY_S", 0.02)
    config = make_config(tmp_path, f"buffer.address={serve(state())}")
    shutil.rmtree(config.run.path / "keys")
    early = Watcher(config, config.run.path)
    asking = asyncio.create_task(early._ask())
    await asyncio.sleep(0.1)
    assert early._trouble == "" and not asking.done()
    give_keys(config.run.path)
    await until(lambda: early.state is not None)
    assert early.state is not None
    asking.cancel()
    await asyncio.wait({asking})
