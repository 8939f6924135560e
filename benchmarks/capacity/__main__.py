"""The buffer with 2,048 servers and 256 learner ranks: the real process and wire, without models.

`python -m benchmarks.capacity [--small]` prints one table and writes `benchmarks/results/capacity.json`; four minutes.
All clients are in two processes of this machine (`servers.py`, `ranks.py`), the buffer in a third: on 2 cores they
take turns. First as fast as it goes, which is the limit; then, once what that left is over, at a tenth of it, with the
Takes as they come; then with a batch taken over and over, which is a learner that restarts all the time; last the
buffer is killed and started again. A phase that does not end in time ends the command with its name.
"""

import argparse
import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import psutil
import uvloop

from benchmarks.buffer.peers import on_this_disk
from benchmarks.capacity.crowd import Crowd
from buffer.curve import LOCAL
from buffer.keys import load_client_keys, make_keys
from buffer.wire.message import Message
from buffer.wire.protocol import State, Status
from configs.load import load
from configs.resume import fingerprint

RESULTS = Path(__file__).parents[1] / "results"
FULL = dict(servers=2048, ranks=256, groups=256, staleness=31, samples=16, tokens=8000, rows=10**6, room=4, at_once=64)
SMALL = dict(servers=64, ranks=8, groups=16, staleness=3, samples=4, tokens=8000, rows=10**4, room=4, at_once=16)
LIMIT_S, TENTH_S, AGAIN_S, AFTER_S = 30.0, 90.0, 30.0, 10.0
MARGIN_S, WHOLE_S = 45.0, 350.0
"""What a phase may take beyond its time, and the whole command."""
ROUNDS = 3
"""At a tenth of the limit."""
PUT_MS, RESTART_S = 50.0, 2.0
"""What is wanted."""
T = TypeVar("T")


class NotMeasured(RuntimeError):
    """Nothing was measured; the text says in which phase it ended, and why."""


class CrowdProcess:
    """One of the processes with clients."""

    def __init__(self, name: str, address: str, print_: str, given: dict[str, Any]) -> None:
        self.name = name
        self._arguments = [sys.executable, "-m", f"benchmarks.capacity.{name}", address, print_, json.dumps(given)]
        self._lines: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()

    async def __aenter__(self) -> "CrowdProcess":
        pipe = asyncio.subprocess.PIPE
        self.running = await asyncio.create_subprocess_exec(*self._arguments, stdin=pipe, stdout=pipe, limit=2**28)
        self._reading = asyncio.create_task(self._read())
        try:
            await self.hear()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            self.running.kill()
        await self.running.wait()
        await self._reading

    async def _read(self) -> None:
        assert self.running.stdout
        while line := await self.running.stdout.readline():
            self._lines.put_nowait(json.loads(line))
        self._lines.put_nowait(None)

    async def hear(self) -> dict[str, Any]:
        """The next thing that it says."""
        if (line := await self._lines.get()) is None:
            raise NotMeasured(f"the process of the {self.name} ended; its error stands above")
        return line

    def tell(self, **command: Any) -> None:
        """Have it do something else from now on."""
        assert self.running.stdin
        if self.running.returncode is not None:
            raise NotMeasured(f"the process of the {self.name} ended; its error stands above")
        self.running.stdin.write(json.dumps(command).encode() + b"\n")


class Measured:
    """The buffer and everybody around it."""

    def __init__(self, given: dict[str, Any], folder: Path) -> None:
        keys = make_keys(folder / "capacity" / "keys")
        self.observer = load_client_keys(keys, "observer")
        self.given, self.folder = given | {"keys": str(keys)}, folder
        self.address = LOCAL
        with (folder / "train.jsonl").open("w") as file:
            for row in range(given["rows"]):
                file.write(f'{{"problem": "problem {row}: what is {row} + {row}?", "answer": "{2 * row}"}}\n')
        sections = {
            "run": {"name": "capacity", "folder": str(folder), "versions": 10**6},
            "model": {"path": "none"},
            "data": {"train": str(folder / "train.jsonl")},
            "reward": {"function": "math"},
            "batch": {"groups": given["groups"], "samples": given["samples"], "max_staleness": given["staleness"]},
            "rollout": {"servers": given["servers"]},
            "learner": {"ranks": given["ranks"]},
            "buffer": {"address": self.address, "fsync": True, "max_gib": 1e4, "max_message_mib": 1024},
        }
        self.config = folder / "run.yaml"
        self.config.write_text(json.dumps(sections))
        self.fingerprint = fingerprint(load([str(self.config)]))
        self.takes: list[dict[str, Any]] = []
        self.statuses: list[float] = []
        self.awaited: asyncio.Future[State] | None = None
        """The answer to the next Status."""
        self.background: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """The buffer's process."""
        with (self.folder / "buffer.log").open("a") as log:
            self.buffer = subprocess.Popen([sys.executable, "-m", "buffer", str(self.config)], stderr=log)

    def stop(self) -> None:
        """End the buffer's process, however far it is."""
        self.buffer.kill()
        self.buffer.wait()

    async def serving(self) -> float:
        """Seconds until the buffer answers, to the state of the ledger."""
        began, heard = time.perf_counter(), asyncio.Event()

        def on_answer(client: int, number: int, answer: Message, seconds: float, size: int) -> None:
            if isinstance(answer, State):
                heard.set()

        watcher = Crowd(self.address, "", "observer", 1, on_answer, f"probe-{began}", self.observer)
        watcher.start()
        watcher.send(0, Status())
        try:
            await heard.wait()
            return time.perf_counter() - began
        finally:
            watcher.close()

    async def watch(self) -> None:
        """Ask for the state each second, as the launcher does."""

        def on_answer(client: int, number: int, answer: Message, seconds: float, size: int) -> None:
            assert isinstance(answer, State)
            self.statuses.append(seconds)
            if self.awaited and not self.awaited.done():
                self.awaited.set_result(answer)

        watcher = Crowd(self.address, "", "observer", 1, on_answer, "watch", self.observer)
        watcher.start()
        while not watcher.failed.done():
            watcher.send(0, Status())
            await asyncio.sleep(1.0)
        watcher.failed.result()

    async def follow_takes(self, ranks: CrowdProcess, servers: CrowdProcess) -> None:
        """Pass the learner's version on to the servers."""
        while True:
            taken = await ranks.hear()
            self.takes.append(taken)
            if not taken["repeated"]:
                servers.tell(version=taken["version"] + 1)

    async def within(self, seconds: float, what: str, work: Coroutine[Any, Any, T]) -> T:
        """The result of a phase, which may take so long. Raises NotMeasured, which names it."""
        doing = asyncio.create_task(work)
        over, _ = await asyncio.wait({doing, *self.background}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        doing.cancel()
        try:
            for task in over:
                task.result()
        except NotMeasured as error:
            raise NotMeasured(f"{what}: {error}") from None
        if doing in over:
            return doing.result()
        log = (self.folder / "buffer.log").read_text().splitlines()[-5:]
        lives = "lives" if self.buffer.poll() is None else f"ended with {self.buffer.returncode}"
        raise NotMeasured(
            "\n".join([f"{what}: not over after {seconds:g} s; the buffer {lives}; its last lines:", *log])
        )

    async def settle(self, servers: CrowdProcess) -> None:
        """Wait until nothing is under way: no Put, and no batch that could still be formed, taken or trained."""
        servers.tell(rate=0.0)
        busy = True
        while busy:
            servers.tell(report=True)
            under_way = (await servers.hear())["under_way"]
            for _ in range(2):  # the first may have been on its way
                self.awaited = asyncio.get_running_loop().create_future()
                counts = (await self.awaited).counts
            busy = bool(under_way or counts["batched"] or counts["stored"] >= self.given["groups"])

    async def phase(self, servers: CrowdProcess, seconds: float, **command: Any) -> dict[str, Any]:
        """What came of `seconds` under one command."""
        servers.tell(**command, report=True)
        await servers.hear()
        self.takes, self.statuses = [], []
        process = psutil.Process(self.buffer.pid)
        began, used = time.perf_counter(), sum(process.cpu_times()[:2])
        await asyncio.sleep(seconds)
        servers.tell(report=True)
        found = await servers.hear()
        took = time.perf_counter() - began
        if self.buffer.poll() is not None:
            raise NotMeasured(f"the buffer ended with {self.buffer.returncode}")
        found |= {"seconds": took, "cpu": (sum(process.cpu_times()[:2]) - used) / took, "takes": self.takes}
        found |= {"memory": process.memory_info().rss, "files": process.num_fds(), "statuses": self.statuses}
        return found


def together(rounds: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Rounds of one phase as one."""
    found = dict(rounds[-1])
    for name in ("puts", "beats", "asks", "takes", "statuses"):
        found[name] = [one for each in rounds for one in each[name]]
    found["seconds"] = sum(each["seconds"] for each in rounds)
    found["cpu"] = sum(each["cpu"] * each["seconds"] for each in rounds) / found["seconds"]
    return found


def during(puts: Sequence[Sequence[float]], takes: Sequence[dict[str, Any]]) -> list[float]:
    """Seconds of the Puts that were on their way while parts were."""
    return [
        seconds for end, seconds in puts if any(end - seconds < take["last"] and end > take["first"] for take in takes)
    ]


def ms(seconds: Sequence[float], percent: float) -> float | None:
    """A percentile in milliseconds; None of nothing."""
    return round(1000 * float(np.percentile(seconds, percent)), 1) if seconds else None


async def measure(given: dict[str, Any], folder: Path, share: float) -> Sequence[dict[str, Any]]:
    """The rows of the table; phases take `share` of their time. Raises NotMeasured."""
    it = Measured(given, folder)
    it.start()
    async with AsyncExitStack() as ends:
        ends.callback(it.stop)
        first_s = await it.within(MARGIN_S, "start", it.serving())
        rows = [row("start, a file of data never seen before", first_s, "s")]
        began = time.perf_counter()
        crowds = [CrowdProcess(name, it.address, it.fingerprint, it.given) for name in ("servers", "ranks")]
        for one in crowds:
            await it.within(MARGIN_S, f"Hello of all {one.name}", ends.enter_async_context(one))
        rows.append(row("all servers and ranks have said Hello", time.perf_counter() - began, "s"))
        servers, ranks = crowds
        it.background = [asyncio.create_task(it.watch()), asyncio.create_task(it.follow_takes(ranks, servers))]
        ends.callback(lambda: [task.cancel() for task in it.background])
        rows += await phases(it, servers, ranks, share)
    return rows


async def phases(it: Measured, servers: CrowdProcess, ranks: CrowdProcess, share: float) -> list[dict[str, Any]]:
    """Those with all clients there."""

    async def phase(what: str, seconds: float, **command: Any) -> dict[str, Any]:
        return await it.within(seconds + MARGIN_S, what, it.phase(servers, seconds, **command))

    limit = await phase("as fast as it goes", LIMIT_S * share, at_once=it.given["at_once"])
    groups_s = len(limit["puts"]) / limit["seconds"]
    rows = [*rows_of("as fast as it goes", limit, it.given)]
    began = time.perf_counter()
    await it.within(MARGIN_S, "what full load left", it.settle(servers))
    rows.append(row("until what full load left was over", time.perf_counter() - began, "s"))
    what = "at a tenth of that"
    tenths = [await phase(what, TENTH_S * share / ROUNDS, rate=groups_s / 10) for _ in range(ROUNDS)]
    rows += rows_of(what, together(tenths), it.given)
    tails = [tail for one in tenths if (tail := ms([seconds for _, seconds in one["puts"]], 99)) is not None]
    for which, value in (("best", min(tails, default=None)), ("worst", max(tails, default=None))):
        rows.append(row(f"{what}: Put, p99 of the {which} of {ROUNDS} rounds", value, "ms"))
    ranks.tell(again=True)
    what = "at a tenth, a batch taken over and over"
    rows += rows_of(what, await phase(what, AGAIN_S * share, rate=groups_s / 10), it.given)
    ranks.tell(again=False)
    return rows + await restarted(it, servers, groups_s / 10, AFTER_S * share)


async def restarted(it: Measured, servers: CrowdProcess, rate: float, after_s: float) -> list[dict[str, Any]]:
    """Kill the buffer and start it again, with all its clients there."""
    it.stop()
    it.start()
    seconds = await it.within(MARGIN_S, "start after a kill", it.serving())
    after = await it.within(after_s + MARGIN_S, "after a kill", it.phase(servers, after_s, rate=rate))
    it.buffer.send_signal(signal.SIGTERM)
    await it.within(MARGIN_S, "the end of the buffer", asyncio.to_thread(it.buffer.wait, MARGIN_S))
    what = f"p99 of Put in the {after_s:g} s after that, those sent before among them"
    return [
        row("killed and serving again", seconds, "s", "wanted", RESTART_S),
        row(what, ms([seconds for _, seconds in after["puts"]], 99), "ms"),
    ]


def rows_of(what: str, found: dict[str, Any], given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A phase in figures."""
    puts, tokens = [seconds for _, seconds in found["puts"]], given["samples"] * given["tokens"]
    overlapping = during(found["puts"], found["takes"])
    wanted = ("wanted", PUT_MS) if "tenth" in what else ()
    yield row(f"{what}: groups", len(puts) / found["seconds"], "groups/s")
    yield row(f"{what}: tokens", len(puts) / found["seconds"] * tokens / 1e6, "M tokens/s")
    yield row(f"{what}: Put, p50 of {len(puts):,}", ms(puts, 50), "ms")
    yield row(f"{what}: Put, p99", ms(puts, 99), "ms", *wanted)
    yield row(f"{what}: Put during a Take, p99 of {len(overlapping):,}", ms(overlapping, 99), "ms", *wanted)
    yield row(f"{what}: heartbeat, p99 of {len(found['beats']):,}", ms(found["beats"], 99), "ms")
    yield row(f"{what}: Status, largest of {len(found['statuses'])}", ms(found["statuses"], 100), "ms")
    takes = found["takes"]
    if takes:
        spread = [take["last"] - take["first"] for take in takes]
        yield row(f"{what}: Take, first to last rank, median of {len(takes)}", float(np.median(spread)), "s")
        yield row(f"{what}: a batch", takes[0]["bytes"] / 1e6, "MB")
        trained = [seconds for take in takes for seconds in take["trained"]]
        yield row(f"{what}: Trained of each rank, p99 of {len(trained):,}", ms(trained, 99), "ms")
    yield row(f"{what}: buffer's processor time", found["cpu"], "cores")
    yield row(f"{what}: buffer's memory", found["memory"] / 2**20, "MiB")
    yield row(f"{what}: buffer's open files", found["files"], "files")
    yield row(f"{what}: groups on lease at the end", found["leased"], "groups")


def row(
    what: str, value: float | None, unit: str, against: str | None = None, against_value: float | None = None
) -> dict[str, Any]:
    """One line of the table."""
    rounded = None if value is None else float(f"{value:.4g}")
    return {"what": what, "value": rounded, "unit": unit, "against": against, "against_value": against_value}


def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="64 servers and 8 ranks, seconds: whether it works")
    parser.add_argument("--share-prompts", action="store_true", help="batches are cut by whole groups")
    parser.add_argument("--write", type=Path, default=RESULTS / "capacity.json", help="where the figures go")
    options = parser.parse_args(argv)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    given: dict[str, Any] = dict(SMALL if options.small else FULL)
    given |= {"share_prompts": options.share_prompts, "heartbeat_s": 2.0, "start": str(time.time())}
    share = 0.05 if options.small else 1.0
    with on_this_disk() as folder:
        try:
            rows = uvloop.run(asyncio.wait_for(measure(given, Path(folder).absolute(), share), WHOLE_S))
        except NotMeasured as error:
            print(f"python -m benchmarks.capacity: {error}", file=sys.stderr)
            return 1
        except TimeoutError:
            print(f"python -m benchmarks.capacity: not over after {WHOLE_S:g} s in all", file=sys.stderr)
            return 1
    for one in rows:
        value = "none" if one["value"] is None else f"{one['value']:,g}"
        wanted = f"   ({one['against']} {one['against_value']:g})" if one["against"] else ""
        print(f"{one['what']:<72} {value:>12} {one['unit']}{wanted}")
    known = {name: version(name) for name in ("pyzmq", "numpy", "msgpack", "pydantic")}
    hardware = f"{os.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB of memory"
    command = "python -m benchmarks.capacity" + " --small" * options.small + " --share-prompts" * options.share_prompts
    result = {"date": str(date.today()), "hardware": hardware, "versions": known, "command": command, "size": given}
    options.write.write_text(json.dumps(result | {"rows": rows}, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
