"""How long does a new policy take to reach running servers, and for how long does it interrupt them?

`python -m benchmarks.weights --cases a,b` needs two GPUs for `a` and `b`, three for `e` and `g`, four for `c`, `d` and
`f`, and none for `toy`, `toy2` and `toy3`. With `--shared` fewer are enough, which shows that a case works, not how
fast it is. Commands with one `--turn FILE` may run at once: their ends start side by side, and are measured in turn.
Each case starts the real ends (`ends.py`), keeps 256 sequences running on each server and publishes versions: first
over Headrace's wire, then the same weights by vLLM's own NCCLWeightTransferEngine (packed), which is the peer: same
servers, same load, but paused. The limit is a plain broadcast of 1 GiB between the same GPUs. Prints one table; writes
JSON. The weights are random.
"""

import argparse
import asyncio
import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs.ports import free_port
from benchmarks.weights.shapes import CASES, SHAPES, WeightsCase, folder_of
from benchmarks.weights.sharing import as_host
from benchmarks.weights.table import PROBE_EVERY, ResultRow, progress, rows_of, write

ENGINE = {
    "gpu_memory_utilization": 0.6, "max_num_seqs": 264,
    "weight_transfer_config": {"backend": "nccl"},
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64, 128, 192, 256, 264],
    },
}  # fmt: skip
ENDS = "benchmarks.weights.ends"
TIMEOUT_S, START_S = 60.0, 240.0


class End:
    """A process of `ends.py` on certain GPUs."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    @classmethod
    async def start(
        cls, role: str, given: dict[str, Any], gpus: list[int], log: Path, module: str = ENDS, **env: str
    ) -> "End":
        first = int(os.environ.get("FIRST_GPU", "0"))  # lets two cases run at the same time
        seen = {
            "CUDA_VISIBLE_DEVICES": ",".join(str(first + gpu) for gpu in gpus),
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "MASTER_ADDR": "127.0.0.1",
        }
        argv = (sys.executable, "-m", module, role, json.dumps(given))
        with open(log, "ab") as file:
            process = await asyncio.create_subprocess_exec(
                *argv,
                stdin=-1,
                stdout=-1,
                stderr=file,
                env={**os.environ, **seen, **env},
                limit=1 << 26,
                start_new_session=True,
            )
        return cls(process, log)

    def tell(self, *words: object) -> None:
        """Write one command to its stdin."""
        assert self.process.stdin
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    async def answer(self, key: str, timeout_s: float = 150.0) -> dict[str, Any]:
        """Wait for the answer that has `key`."""
        assert self.process.stdout
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                if line.startswith(b"@") and key in (found := json.loads(line[1:])):
                    return dict(found)
                with open(self.log, "ab") as file:  # vLLM's own output
                    file.write(line)
        raise RuntimeError(f"a process ended before it answered {key}")

    async def end(self) -> None:
        """Kill it and its children."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def config_of(case: WeightsCase, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The part of a run file that matters here."""
    engine = {key: value for key, value in (ENGINE | json.loads(args.engine)).items() if value is not None}
    return {
        "model": {"path": str(folder)},
        "data": {"train": "none.parquet", "max_prompt_tokens": 256},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": args.length},
        "rollout": {"tensor_parallel": case.tensor_parallel, "engine": engine},
        "weights": {"probe_every": PROBE_EVERY, "timeout_s": TIMEOUT_S, "probe_tolerance": args.tolerance,
                    "bucket_mib": args.bucket_mib, "staging": args.staging, "publish": args.publish},
        "learner": {"ranks": case.ranks},
    }  # fmt: skip


def assign_gpus(case: WeightsCase, shared: bool) -> tuple[list[int], list[list[int]], bool]:
    """The learner's GPUs, those of each server, and whether some are shared. Raises RuntimeError if there are too
    few."""
    learner, seen = list(range(case.ranks)), torch.cuda.device_count()
    needed = case.ranks + case.servers * case.tensor_parallel
    servers = [list(range(at, at + case.tensor_parallel)) for at in range(case.ranks, needed, case.tensor_parallel)]
    if not seen or needed <= seen:
        return learner, servers, False
    if not shared or max(case.ranks, case.tensor_parallel) > seen:
        raise RuntimeError(f"needs {needed} GPUs, {seen} are seen; --shared puts several ends on one")
    return learner, [[gpu % seen for gpu in gpus] for gpus in servers], True


async def run(case: WeightsCase, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Run one case; returns its raw measurements."""
    given = {"config": config_of(case, folder_of(case.shape, work), args)}
    world = 1 + case.servers * case.tensor_parallel
    gpus_of_learner, gpus_of_servers, shared = assign_gpus(case, args.shared)
    ports = {key: str(free_port()) for key in ("MASTER_PORT", "PEER_PORT")}
    ends: list[End] = []
    try:
        servers: list[End] = []
        for number, gpus in enumerate(gpus_of_servers):
            env = ports | (as_host(f"server-{number}") if shared else {})
            mine = {"name": f"rollout-{number}", "running": args.running, "length": args.length,
                    "offset": 1 + number * case.tensor_parallel}  # fmt: skip
            servers.append(await End.start("server", given | mine, gpus, work / f"server-{number}.log", **env))
        learners = []
        for rank in range(case.ranks):
            env = ports | (as_host("learner") if shared else {})
            env |= {"RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
            learners.append(await End.start("learner", given, gpus_of_learner, work / f"learner-{rank}.log", **env))
        ends = [*servers, *learners]
        hello = await learners[0].answer("address", START_S)
        for server in servers:
            await server.answer("started", START_S)
        async with turn(args.turn):
            found = await measure(case, args, servers, learners, world, hello)
            for end in ends:
                await end.end()
        return found
    finally:
        for end in ends:
            await end.end()


@asynccontextmanager
async def turn(path: Path | None) -> AsyncIterator[None]:
    """Hold the lock of the file at `path` within the block: wait for all other commands that measure."""
    if path is None:
        yield
        return
    with open(path, "a") as file:
        await asyncio.to_thread(fcntl.flock, file, fcntl.LOCK_EX)
        yield


async def measure(
    case: WeightsCase,
    args: argparse.Namespace,
    servers: list[End],
    learners: list[End],
    world: int,
    hello: dict[str, Any],
) -> dict[str, Any]:
    """Measure Headrace's updates, then the peer's. `hello`: the learner's address, and what it publishes."""
    for server in servers:
        server.tell("address", hello["address"])
    for learner in learners:
        learner.tell("mark", len(servers))
    probe = (await asyncio.gather(*(learner.answer("marked") for learner in learners)))[0]["marked"]
    progress(f"{case.shape}: version 0 is on the servers, its probe differs by {probe:.4g} nat")
    for server in servers:
        await server.answer("serving")
    progress(f"{case.shape}: {args.updates} updates under load")
    for learner in learners:
        learner.tell("updates", args.updates, args.gap)
    updates = (await asyncio.gather(*(learner.answer("updates", args.timeout) for learner in learners)))[0]["updates"]
    pushes: list[list[dict[str, float]]] = []
    problem = ""
    try:
        if args.peer and torch.cuda.is_available():
            pushes = await peer(args.updates, servers, learners, world)
    except (TimeoutError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    for server in servers:
        server.tell("stop")
    reports = await asyncio.gather(*(server.answer("events") for server in servers))
    return {
        "bytes": hello["bytes"],
        "probe": probe,
        "updates": updates,
        "servers": list(reports),
        "peer": pushes,
        "problem": problem,
    }


async def peer(updates: int, servers: list[End], learners: list[End], world: int) -> list[list[dict[str, float]]]:
    """Measure the same weights sent by vLLM's own transfer."""
    for end in (*learners, *servers):
        end.tell("peer", world)
    for end in (*learners, *servers):
        await end.answer("joined", 60.0)
    pushes = []
    for _ in range(updates + 1):
        started = time.monotonic()
        for learner in learners:
            learner.tell("push")
        for server in servers:
            server.tell("push", started)
        pushes.append([(await server.answer("pushed", 60.0))["pushed"] for server in servers])
        for learner in learners:
            await learner.answer("sent", 60.0)
        await asyncio.sleep(0.3)
    return pushes[1:]  # the first one warms up


async def measure_limit(world: int, work: Path) -> float:
    """GB/s of a plain broadcast over the first `world` GPUs."""
    ends = [await End.start("limit", {"rank": 0, "world": world, "port": 0}, [0], work / "limit.log")]
    try:
        port = (await ends[0].answer("port", 60.0))["port"]
        for rank in range(1, world):
            given = {"rank": rank, "world": world, "port": port}
            ends.append(await End.start("limit", given, [rank], work / "limit.log"))
        return float((await ends[0].answer("gb_per_s", 60.0))["gb_per_s"])
    finally:
        for end in ends:
            await end.end()


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="a,b")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--gap", type=float, default=7.5, help="seconds between updates: two windows of tokens/s fit")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--length", type=int, default=768, help="tokens per sequence")
    parser.add_argument("--bucket-mib", type=int, default=1024)
    parser.add_argument("--staging", default="auto")
    parser.add_argument("--publish", default="gather", help="rows or gather, for cases of several learner GPUs")
    parser.add_argument("--tolerance", type=float, default=0.2, help="of the probe")
    parser.add_argument("--engine", default="{}", help="JSON of engine arguments that override the benchmark's own")
    parser.add_argument("--shape", choices=SHAPES, help="a shape of shapes.py other than the case's")
    parser.add_argument("--shared", action="store_true", help="let ends share GPUs where there are too few")
    parser.add_argument("--turn", type=Path, help="lock file of several commands; leaves the plain broadcast out")
    parser.add_argument("--peer", type=int, default=1, help="0 leaves vLLM's own transfer out, which needs GPUs")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-weights"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "weights.json")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds a case may take")
    args = parser.parse_args()
    for name in args.cases.split(","):
        if name not in CASES:
            parser.error(f"--cases: {name!r} is not one of {', '.join(CASES)}")
    return args


def main() -> int:
    args = arguments()
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    fastest: dict[int, float] = {}
    failed = 0
    for name in args.cases.split(","):
        case, work = CASES[name], args.work / name
        case = replace(case, shape=args.shape or case.shape)
        work.mkdir(parents=True, exist_ok=True)
        world = 1 + case.servers * case.tensor_parallel
        progress(f"{name}: {case.shape}, logs in {work}")
        try:
            if not args.turn and not assign_gpus(case, args.shared)[2] and world not in fastest:
                fastest[world] = asyncio.run(measure_limit(world, work))
            raw[name] = asyncio.run(asyncio.wait_for(run(case, args, work), args.timeout))
            rows += rows_of(name, case, raw[name], fastest.get(world))
            failed += bool(raw[name]["problem"])
            print(raw[name]["problem"], end="\n" * bool(raw[name]["problem"]), file=sys.stderr)
        except (TimeoutError, RuntimeError) as error:
            failed += 1
            why = f"{type(error).__name__}: {error}; logs in {work}"
            rows.append(ResultRow("FAILED", 0.0, "", why, case=f"{name}: {case.shape}").line())
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.with_suffix(".raw.json").write_text(json.dumps(raw))
        write(args.out, "weights", rows, show=False)
    write(args.out, "weights", rows)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
