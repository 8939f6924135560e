"""Calls of users' functions end in words, whatever the functions do, and leave nothing behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import msgpack
import numpy as np
import psutil
import pytest
import uvloop

from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.cage.frames import BAD_BYTES, encode
from rollout.cage.process_table import has_signal
from rollout.cage.warden import DUMP_SIGNAL
from tests.harness.children import children
from tests.harness.lanes import long_but
from tests.harness.pace import paced

LOADER = "tests.rollout.cage.user_rewards:load"


def cage(name: str, *arguments: object, workers: int = 1, **options: object) -> Cage:
    return Cage(
        CagedFunction(name, LOADER, [name, *arguments], **({"timeout_s": 100.0, "grace_s": 0.5} | options)), workers
    )


async def error_of(call) -> CagedError:
    with pytest.raises(CagedError) as caught:
        await asyncio.wait_for(call, 120)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 600
    assert len(caught.value.detail) < 120_000
    return caught.value


def wards() -> list[psutil.Process]:
    return children(recursive=True)


async def gone(pid: int) -> None:
    """Until the process is gone: `pidfd` becomes readable."""
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    over = asyncio.Event()
    asyncio.get_running_loop().add_reader(fd, over.set)
    try:
        await asyncio.wait_for(over.wait(), 120)
    finally:
        asyncio.get_running_loop().remove_reader(fd)
        os.close(fd)


async def file_with_text(path: Path) -> str:
    async with asyncio.timeout(120):
        while not path.exists() or not path.read_text():
            await asyncio.sleep(0.01)
    return path.read_text()


async def test_values_travel_both_ways():
    async with cage("echo") as pool:
        value = {"a": [1, 2.5, None, True, "text"], "b": b"bytes"}
        assert await pool.call(value) == value
        assert await asyncio.gather(*(pool.call(i) for i in range(100))) == list(range(100))
    assert wards() == []


def test_numbers_of_all_kinds_count_as_plain():
    given = [Decimal("0.5"), Fraction(1, 4), np.float32(2), np.arange(2)]
    assert msgpack.unpackb(encode(given)) == [0.5, 0.25, 2.0, [0, 1]]
    for wrong in (1j, Decimal("sNaN"), 2**64):
        with pytest.raises(BAD_BYTES):
            encode(wrong)


async def test_a_loaded_function_says_what_it_is():
    async with cage("load_with_about") as pool:
        assert pool.about == {"batch": True}


async def test_calls_run_in_all_workers_at_once():
    async with cage("pid", workers=2) as pool:
        async with asyncio.timeout(120):
            found: set[int] = set()
            while len(found) < 2:
                found |= set(await asyncio.gather(*(pool.call() for _ in range(8))))
    assert os.getpid() not in found


@pytest.mark.parametrize(
    ("name", "arguments", "origin", "reason"),
    long_but(
        [
            ("raises", ["target"], "KeyError", "raises raised KeyError: 'target'"),
            ("exits", [0], "SystemExit", "exits called sys.exit(0)"),
            ("exits", ["text"], "SystemExit", "exits called sys.exit('text')"),
            ("quits", [3], "died", "quits ended its process (exit code 3)"),
            ("crashes", [], "died", "crashes ended its process (killed by SIGSEGV)"),
            ("kills_itself", [], "died", "kills_itself ended its process (killed by SIGKILL)"),
            ("kills_its_group", [], "died", "kills_its_group ended its process (killed by SIGKILL)"),
            ("interrupts", [], "KeyboardInterrupt", "interrupts raised KeyboardInterrupt"),
            ("raises_base", [], "Odd", "raises_base raised Odd: <Odd whose text cannot be made>"),
            ("raises_long", [], "ValueError", "raises_long raised ValueError: long long"),
            ("recurses", [], "RecursionError", "recurses raised RecursionError"),
            ("removes_itself", [], "", ""),
            ("changes_its_world", [], "", ""),
            ("closes_output", [], "", ""),
            ("leaves_thread", [], "", ""),
            ("leaves_alarm", [], "", ""),
            ("reads_stdin", [], "", ""),
            ("returns", ["nan"], "", ""),
            ("returns", ["large"], "unanswerable", "result of type str that cannot be sent: ValueError: 64.0 MiB"),
            ("returns", ["object"], "unanswerable", "a value of type Evil cannot travel"),
            ("returns", ["lambda"], "unanswerable", "result of type function that cannot be sent"),
            ("returns", ["big_int"], "unanswerable", "result of type int that cannot be sent: OverflowError"),
            ("returns", ["surrogate"], "unanswerable", "result of type str that cannot be sent: UnicodeEncodeError"),
            ("returns", ["nested"], "unanswerable", "result of type list that cannot be sent"),
        ],
        0,
        1,
        4,
        6,
        8,
        12,
        14,
        18,
        19,
    ),
)
async def test_a_call_ends_in_words_and_the_next_one_is_served(name, arguments, origin, reason):
    async with cage(name) as pool:
        if origin:
            error = await error_of(pool.call(*arguments))
            assert error.origin == origin and reason in str(error)
        else:
            await asyncio.wait_for(pool.call(*arguments), 120)
        with contextlib.suppress(CagedError):
            await asyncio.wait_for(pool.call(*arguments), 120)
    assert wards() == []


async def test_details_are_the_users_frames_and_the_last_output():
    async with cage("raises") as pool:
        error = await error_of(pool.call("target"))
    assert error.detail.startswith("Traceback") and error.detail.count("File ") == 1
    assert 'user_rewards.py", line' in error.detail and error.detail.endswith("last output ---\nprinted before\n")
    async with cage("crashes") as pool:
        assert "Segmentation fault" in (await error_of(pool.call())).detail


async def test_output_of_all_kinds_is_captured(capfd):
    async with cage("prints_everywhere") as pool:
        error = await error_of(pool.call())
    for words in ("from print", "from stderr", "from C", "from a child"):
        assert words in error.detail
    assert capfd.readouterr() == ("", "")


@pytest.mark.long
async def test_a_gibibyte_of_output_fills_nothing_and_blocks_nothing(capfd):
    async with cage("prints", timeout_s=240.0) as pool:
        assert await pool.call(1024) == 1024
        assert all(process.memory_info().rss < 100 * 2**20 for process in wards())
    assert capfd.readouterr() == ("", "")


async def test_log_files_are_rotated(tmp_path: Path):
    async with cage("prints", log=str(tmp_path / "logs/rollout-0-reward")) as pool:
        await pool.call(0)
        await pool.call(32)
    logs = sorted((tmp_path / "logs").iterdir())
    assert [path.name for path in logs] == ["rollout-0-reward-0.log", "rollout-0-reward-0.log.1"]
    assert all(path.stat().st_size <= 2**21 for path in logs)
    assert b"the end\n" in (logs[0].read_bytes() or logs[1].read_bytes())


async def test_a_function_that_prints_without_end_is_stopped_in_time():
    async with cage("prints_without_end", timeout_s=0.5) as pool:
        error = await error_of(pool.call())
    assert error.origin == "timed_out" and "again and again" in error.detail and len(error.detail) < 2**17


@pytest.mark.parametrize("name", long_but(["loops", "sleeps", "holds_the_gil"], 1, 2))
async def test_the_time_limit_kills(name):
    async with cage(name, timeout_s=0.5) as pool:
        began = time.monotonic()
        error = await error_of(pool.call(*([600] if name == "sleeps" else [])))
        assert time.monotonic() - began > 0.4
        assert str(error) == f"{name} took longer than reward.timeout_s (0.5 s); its process was killed"
        assert error.origin == "timed_out" and f"in {name}" in error.detail  # where it was
        assert (await error_of(pool.call(*([600] if name == "sleeps" else [])))).origin == "timed_out"


async def test_a_worker_that_gets_no_processor_at_its_limit_still_says_where_it_was(tmp_path: Path):
    async with cage("sleeps", timeout_s=0.5) as pool:
        call = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        worker = int(await file_with_text(tmp_path / "pid"))
        os.kill(worker, signal.SIGSTOP)
        async with asyncio.timeout(120):
            while not has_signal(worker, DUMP_SIGNAL):
                await asyncio.sleep(0.01)
        await asyncio.sleep(0.6)
        os.kill(worker, signal.SIGCONT)
        assert "in sleeps" in (await error_of(call)).detail


async def test_the_time_limit_counts_from_the_start_of_the_call():
    limit_s = paced(1.5)
    async with cage("sleeps", timeout_s=limit_s) as pool:
        assert await asyncio.gather(*(pool.call(limit_s * 0.27) for _ in range(4))) == ["awake"] * 4


async def test_a_server_that_stalls_costs_no_call():
    limit_s = paced(1.0)
    async with cage("sleeps", timeout_s=limit_s) as pool:
        call = asyncio.create_task(pool.call(0.1))
        await asyncio.sleep(0)
        time.sleep(1.2 * limit_s)  # the server's event loop is busy
        assert await call == "awake"


async def test_a_leak_is_killed_at_the_memory_limit():
    async with cage("leaks", memory_gib=0.25) as pool:
        error = await error_of(pool.call())
        assert error.origin == "out_of_memory"
        assert "used more memory than reward.memory_gib (0.25 GiB); its process was killed" in str(error)


async def test_an_allocation_beyond_all_bounds_fails_at_once():
    async with cage("allocates", memory_gib=0.25) as pool:
        error = await error_of(pool.call(8))
        assert error.origin == "MemoryError" and "raised MemoryError" in str(error) and "allocates" in error.detail
        assert await pool.call(0.01) > 0


async def test_memory_of_child_processes_counts():
    async with cage("child_leaks", memory_gib=0.3) as pool:
        error = await error_of(pool.call())
        assert error.origin == "out_of_memory"


async def test_memory_counts_while_processes_come_and_go():
    async with cage("storms", memory_gib=0.3) as pool:
        error = await error_of(pool.call())
        assert error.origin == "out_of_memory"


async def test_workers_are_recycled_after_max_calls():
    async with cage("pid", max_calls=3) as pool:
        pids = [await pool.call() for _ in range(9)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3]


async def test_a_worker_killed_while_idle_fails_no_call():
    async with cage("pid") as pool:
        first = await pool.call()
        os.kill(first, signal.SIGKILL)
        second = await asyncio.wait_for(pool.call(), 120)  # the pool may not know yet
        assert second != first
        for warden in children():
            warden.kill()
        await asyncio.gather(gone(second), *(asyncio.shield(worker.end) for worker in pool._workers))
        assert await asyncio.wait_for(pool.call(), 120) not in (first, second)


async def test_a_worker_killed_in_a_call_fails_this_call_only(tmp_path: Path):
    async with cage("sleeps") as pool:
        call = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        queued = asyncio.create_task(pool.call(0))
        os.kill(int(await file_with_text(tmp_path / "pid")), signal.SIGKILL)
        assert str(await error_of(call)) == "sleeps ended its process (killed by SIGKILL)"
        assert await asyncio.wait_for(queued, 120) == "awake"


async def test_a_warden_killed_in_a_call_takes_its_worker_along(tmp_path: Path):
    async with cage("sleeps") as pool:
        call = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        worker = int(await file_with_text(tmp_path / "pid"))
        psutil.Process(worker).parent().kill()
        assert (await error_of(call)).origin == "died"
        await gone(worker)
        assert await asyncio.wait_for(pool.call(0), 120) == "awake"


async def test_a_worker_killed_once_while_it_starts_fails_no_call(tmp_path: Path):
    async with cage("load_killed", str(tmp_path), 1) as pool:
        assert await asyncio.wait_for(pool.call(5), 120) == 5


async def test_a_worker_that_always_dies_while_it_starts_is_unloadable(tmp_path: Path):
    error = await error_of(cage("load_killed", str(tmp_path), 1000).__aenter__())
    assert error.origin == "unloadable" and wards() == []
    assert str(error) == "load_killed cannot be loaded: it ended its process (killed by SIGKILL)"
    assert len(list(tmp_path.iterdir())) < 5  # no hot loop


@pytest.mark.parametrize(
    ("name", "arguments", "reason"),
    long_but(
        [
            ("load_exits", [0], "load_exits cannot be loaded: SystemExit: 0"),
            ("load_hangs", [], "load_hangs cannot be loaded: it took longer than 0.5 s; its process was killed"),
            ("load_refused", [], "reward.function: nowhere.py: no such file"),
            ("absent", [], "absent cannot be loaded: KeyError: 'absent'"),
        ],
        0,
        1,
    ),
)
async def test_a_function_that_cannot_be_loaded(name, arguments, reason):
    load_timeout_s = 0.5 if name == "load_hangs" else 100.0
    error = await error_of(cage(name, *arguments, load_timeout_s=load_timeout_s).__aenter__())
    assert error.origin == "unloadable" and str(error) == reason and wards() == []


async def test_sys_exit_at_import_is_unloadable(tmp_path: Path):
    (tmp_path / "score.py").write_text("import sys\nprint('goodbye')\nsys.exit('no GPU')\n")
    arguments = ["reward.function", f"{tmp_path}/score.py:score"]
    function = CagedFunction("score.py:score", "configs.user_file:load_function", arguments, 20.0)
    error = await error_of(Cage(function).__aenter__())
    assert error.origin == "unloadable" and "goodbye" in error.detail
    assert str(error) == f"reward.function: {tmp_path}/score.py cannot be imported: SystemExit: no GPU"


async def test_a_function_that_cannot_be_loaded_again_fails_calls_until_it_can(tmp_path: Path):
    async with cage("load_once", str(tmp_path), max_calls=1) as pool:
        assert await pool.call(1) == 1
        error = await error_of(pool.call(2))
        assert error.origin == "unloadable" and "load_once cannot be called: load_once cannot be loaded" in str(error)
        (tmp_path / "mended").touch()
        async with asyncio.timeout(120):
            while True:
                with contextlib.suppress(CagedError):
                    assert await pool.call(3) == 3
                    break


async def test_a_worker_that_was_told_to_end_is_told_nothing_more():
    async with cage("echo") as pool:
        (worker,) = pool._workers
        worker.kill()
        worker.send(["call", 1, [1]])
        assert await worker.last_output() == ""
        assert await asyncio.wait_for(pool.call(2), 120) == 2


async def test_arguments_that_cannot_travel():
    async with cage("echo") as pool:
        assert (await error_of(pool.call(object()))).origin == "unanswerable"
        assert await pool.call(1) == 1


@pytest.mark.parametrize("then", long_but(["return", "quit", "hang"], 0, 1))
async def test_child_processes_end_with_their_worker(tmp_path: Path, then: str):
    async with cage("children", timeout_s=paced(4.0) if then == "hang" else 60.0) as pool:
        if then == "return":
            await pool.call(str(tmp_path), then)
        else:
            await error_of(pool.call(str(tmp_path), then))
            assert all(not psutil.pid_exists(int(path.name)) for path in tmp_path.iterdir())
    pids = [int(path.name) for path in tmp_path.iterdir()]
    assert len(pids) == 2 and not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("name", long_but(["bomb", "forks_without_end"], 1))
async def test_a_fork_bomb_is_killed(name, tmp_path: Path):
    async with cage(name) as pool:
        error = await error_of(pool.call(*([str(tmp_path)] if name != "bomb" else [])))
        assert error.origin == "died" and "started too many processes" in str(error)
        assert len(wards()) <= 4


async def test_a_function_that_forks_and_returns_answers_once():
    async with cage("returns_from_fork") as pool:
        assert len({await pool.call() for _ in range(5)}) == 1


@pytest.mark.parametrize("name", long_but(["closes_everything", "writes_to_its_socket"], 0))
async def test_a_function_that_spoils_its_connection_fails_alone(name):
    async with cage(name) as pool:
        assert (await error_of(pool.call())).origin == "died"
        assert (await error_of(pool.call())).origin == "died"


async def test_a_cancelled_call_frees_its_worker_and_a_waiting_one_its_place(tmp_path: Path):
    async with cage("sleeps") as pool:
        running = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        waiting = [asyncio.create_task(pool.call(600, str(tmp_path / "never"))) for _ in range(3)]
        last = asyncio.create_task(pool.call(0))
        worker = int(await file_with_text(tmp_path / "pid"))
        for task in (*waiting, running):
            task.cancel()
        assert await asyncio.wait_for(last, 120) == "awake"
        assert not psutil.pid_exists(worker) and not (tmp_path / "never").exists()


async def test_a_cancelled_call_that_ends_by_itself_costs_no_worker(tmp_path: Path):
    async with cage("sleeps", grace_s=1.0) as pool:
        running = asyncio.create_task(pool.call(0.1, str(tmp_path / "pid")))
        worker = int(await file_with_text(tmp_path / "pid"))
        running.cancel()
        assert await asyncio.wait_for(pool.call(0), 120) == "awake"
        await asyncio.sleep(1.0)
        assert psutil.pid_exists(worker) and await pool.call(0) == "awake"


async def sent_ahead(pool: Cage) -> int:
    """Make short calls until several are sent ahead; how many of twelve at once its one worker then has."""
    [worker] = pool._workers
    async with asyncio.timeout(120):
        while worker.ahead < 4:
            assert await pool.call(0) == "awake"
        calls = [asyncio.create_task(pool.call(0)) for _ in range(12)]
        await asyncio.sleep(0)
        sent = len(worker.calls)
        assert await asyncio.gather(*calls) == ["awake"] * 12
        while worker.ahead < 4:  # one of them was held up
            assert await pool.call(0) == "awake"
    return sent


def wait_for_text(path: Path) -> str:
    """The text of the file once it has some. Meanwhile the event loop stands, and the server reads no result."""
    until = time.monotonic() + 120
    while not path.exists() or not path.read_text():
        assert time.monotonic() < until
        time.sleep(0.01)
    return path.read_text()


async def test_short_calls_are_sent_ahead_and_after_a_long_one_they_wait_in_the_server():
    async with cage("sleeps") as pool:
        first = [asyncio.create_task(pool.call(0)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [len(worker.calls) for worker in pool._workers] == [1]  # nobody knows yet
        assert await asyncio.gather(*first) == ["awake"] * 4
        assert await sent_ahead(pool) >= 4
        await pool.call(0.1)
        waiting = [asyncio.create_task(pool.call(0)) for _ in range(4)]
        await asyncio.sleep(0)
        assert [len(worker.calls) for worker in pool._workers] == [1]
        assert await asyncio.gather(*waiting) == ["awake"] * 4


async def test_of_calls_sent_ahead_only_the_one_that_ends_its_worker_fails(tmp_path: Path):
    async with cage("sleeps") as pool:
        await sent_ahead(pool)
        guilty = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        behind = [asyncio.create_task(pool.call(0)) for _ in range(3)]
        pid = int(await file_with_text(tmp_path / "pid"))
        assert [len(worker.calls) for worker in pool._workers] == [4]
        os.kill(pid, signal.SIGKILL)
        assert str(await error_of(guilty)) == "sleeps ended its process (killed by SIGKILL)"
        assert await asyncio.wait_for(asyncio.gather(*behind), 120) == ["awake"] * 3


async def test_results_that_are_lost_with_the_connection_are_no_failures(tmp_path: Path):
    async with cage("sleeps") as pool:
        await sent_ahead(pool)
        [worker] = pool._workers
        calls = [asyncio.create_task(pool.call(*given)) for given in [(0,), (0,), (600, str(tmp_path / "pid"))]]
        await asyncio.sleep(0)
        os.kill(int(wait_for_text(tmp_path / "pid")), signal.SIGKILL)
        psutil.wait_procs(wards(), timeout=60)
        after = asyncio.create_task(pool.call(0))  # sent to a process that is gone
        *before, guilty = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
        assert isinstance(guilty, CagedError) and not guilty.returned
        assert [getattr(found, "returned", found) for found in before] in ([True, True], ["awake", "awake"])
        assert await asyncio.wait_for(after, 120) == "awake" and worker.calls == {}


async def test_only_the_call_that_spoils_its_connection_fails(tmp_path: Path):
    async with cage("spoils_or_sleeps") as pool:
        [worker] = pool._workers
        async with asyncio.timeout(120):
            while worker.ahead < 2:
                await pool.call(False)
        calls = [asyncio.create_task(pool.call(*given)) for given in [(True,), (False, str(tmp_path / "pid"))]]
        await asyncio.sleep(0)
        wait_for_text(tmp_path / "pid")  # the second call has begun, and was the last one
        spoils, behind = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 120)
        assert [spoils.returned, behind.returned] == [False, True]
        assert await asyncio.wait_for(pool.call(False), 120) == "awake"


async def test_a_call_sent_ahead_and_cancelled_does_not_end_the_one_before_it(tmp_path: Path):
    async with cage("sleeps", grace_s=0.1) as pool:
        await sent_ahead(pool)
        long = asyncio.create_task(pool.call(0.8, str(tmp_path / "pid")))
        behind = asyncio.create_task(pool.call(600))
        worker = int(await file_with_text(tmp_path / "pid"))
        behind.cancel()
        assert await asyncio.wait_for(long, 120) == "awake"
        await gone(worker)  # the next one runs there, and nobody waits for it
        assert await asyncio.wait_for(pool.call(0), 120) == "awake"


async def test_many_cancellations_at_any_moment_leave_a_pool_that_works():
    async with cage("sleeps", workers=2) as pool:
        for wave in range(8):
            calls = [asyncio.create_task(pool.call(0.01)) for _ in range(8)]
            await asyncio.sleep(0.005 * wave)
            for call in calls[::2]:
                call.cancel()
            results = await asyncio.gather(*calls, return_exceptions=True)
            assert results[1::2] == ["awake"] * 4


async def test_closing_ends_calls_in_words_and_all_processes(tmp_path: Path):
    async with cage("sleeps") as pool:
        running = asyncio.create_task(pool.call(600, str(tmp_path / "pid")))
        waiting = asyncio.create_task(pool.call(600))
        await file_with_text(tmp_path / "pid")
    assert (await error_of(running)).origin == "died" and (await error_of(waiting)).origin == "died"
    assert (await error_of(pool.call(0))).origin == "died"
    assert wards() == []


@pytest.mark.parametrize("then", long_but(["sleep", "hang"], 1))
def test_a_killed_server_leaves_nothing(tmp_path: Path, then: str):
    """Neither workers nor what they started, even where a worker never releases the GIL."""
    (tmp_path / "pids").mkdir()
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio, os
        from rollout.cage.cage import Cage
        from rollout.cage import CagedFunction

        async def main():
            function = CagedFunction("children", {LOADER!r}, ["children"], 100.0)
            async with Cage(function) as pool:
                call = asyncio.create_task(pool.call({str(tmp_path / "pids")!r}, {then!r}))
                while len(os.listdir({str(tmp_path / "pids")!r})) < 2:
                    await asyncio.sleep(0.01)
                print("ready", flush=True)
                await asyncio.sleep(600)

        asyncio.run(main())
        """)
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    ) as server:
        assert server.stdout is not None and server.stdout.readline() == "ready\n"
        started = psutil.Process(server.pid).children(recursive=True)
        assert len(started) >= 4
        server.send_signal(signal.SIGKILL)
        server.wait()
    _, alive = psutil.wait_procs(started, timeout=120)
    assert alive == []


async def test_workers_import_nothing_heavy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(
        "LD_PRELOAD", raising=False
    )  # vLLM's CPU build, if this process has imported it, has libgomp there
    async with cage("pid") as pool:
        maps = Path(f"/proc/{await pool.call()}/maps").read_text().splitlines()
        assert [line for line in maps if any(name in line for name in ("torch", "numpy", "vllm"))] == []


def test_the_servers_own_event_loop_will_do():
    async def main() -> None:
        async with cage("quits") as pool:
            assert (await error_of(pool.call(3))).origin == "died"
        async with cage("sleeps", timeout_s=1.0) as pool:
            assert await pool.call(0) == "awake"
            assert (await error_of(pool.call(600))).origin == "timed_out"

    uvloop.run(main())
    assert wards() == []
