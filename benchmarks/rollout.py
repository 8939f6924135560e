"""How many tokens a second does a rollout server in full operation sample, against bare `LLM.generate`? CPU or GPU.

`python -m benchmarks.rollout --cases 7B,1.5B,long-tail` needs two GPUs, one for servers and one for the learner's
stand-in (`--gpus 1` puts both on one: weights then travel through sockets and the server shares its GPU, so the figures
are a lower bound). A server in full operation is the real processes, started by hand: `python -m buffer`, `python -m
rollout` and `benchmarks/runs/stand_in.py`, which takes each batch, trains nothing and publishes real weights every two
seconds by the real wire. Versions and log-probabilities are on, a reward from a file scores every answer in a worker
process, groups are stored in SQLite with fsync. Counted are the tokens of the groups that reach the learner, between
the first and the last batch of `--seconds`. Lengths are geometric until as many samples as run at a time have come, so
that the ends of answers of one length are spread evenly.

The peers of 7B and 1.5B are `LLM.generate` with its own defaults and with the server's engine arguments, both for as
many sequences of the same lengths, without log-probabilities; how they are counted says `benchmarks/runs/bare.py`. The
limit of `long-tail` (geometric lengths, mean 1,000, cut at 4,096) is the same server at fixed lengths, with as many
sequences as ran in the mean before, and of a length at which a token has as many before it in the mean: attention to
them is work of the GPU that no server saves, and a geometric length of 1,000 has as much of it as a fixed one of 1,800.
`--side-by-side` runs two contenders that need no learner at a time, one on each GPU; with `--gpus 4` the server, its
learner and two peers run at once, so that all bear the same load of the host. Those of `long-tail` run at once on two
GPUs, each with its learner's stand-in on the other's; the fixed length is then that of the distribution, and
`--swapped` tells what part of a ratio is the host's: its processors need not be equally fast. A contender that
fails costs its own rows only. Prints one table; writes JSON after each contender.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from benchmarks.runs.processes import Died, Processes, Watch, engine_keys, run_file, sequences
from benchmarks.weights.table import ResultRow, progress, write
from rollout.engine.arguments import environment

SAMPLES = 16
PUBLISH_EVERY_S = 2.0
STALENESS = 1000
"""Never binds: what is measured is the server, not admission."""
CONTENDERS = {
    "server": "server in full operation",
    "fixed": "the same server, fixed lengths, about the same mean context and running sequences",
    "llm": "LLM.generate, own defaults, no log-probabilities",
    "llm-ours": "LLM.generate, the server's engine arguments, no log-probabilities",
}


@dataclass(frozen=True)
class ServerCase:
    """A shape, its load and its contenders with the least ratio of the server to each. `groups` makes a batch."""

    shape: str
    running: int
    length: int
    groups: int
    mean: float = 0.0
    targets: dict[str, float] = field(default_factory=dict)
    samples: int = SAMPLES


CASES = {
    "7B": ServerCase("Qwen2.5-7B", 512, 512, 4, targets={"llm-ours": 0.97}),
    "1.5B": ServerCase("Qwen2.5-1.5B", 512, 512, 6, targets={"llm": 1.15, "llm-ours": 0.98}),
    "long-tail": ServerCase("Qwen2.5-1.5B", 512, 4096, 3, mean=1000.0, targets={"fixed": 0.95}),
    "speck": ServerCase("speck", 32, 64, 2, targets={"llm": 1.15, "llm-ours": 0.98}),
    "speck-tail": ServerCase("speck", 32, 128, 2, mean=32.0, targets={"fixed": 0.95}),
}
FRONT_SHARE = 0.10


class ServerBenchmark:
    """One case: runs its contenders and keeps what they found, or why they failed."""

    def __init__(self, name: str, args: argparse.Namespace, case: ServerCase | None = None) -> None:
        """`case`: that of this name by default."""
        self.name, self.case, self.args = name, case or CASES[name], args
        self.found: dict[str, dict[str, float]] = {}
        self.failed: dict[str, str] = {}
        self.work: Path = args.work.resolve() / name
        self.work.mkdir(parents=True, exist_ok=True)
        both = "fixed" in self.case.targets and {"server", "fixed"} <= {*args.contenders.split(",")}
        self.at_once: bool = args.side_by_side and args.gpus == 2 and both
        """Both servers of the case run at the same time."""
        self.shared: bool = args.gpus == 1 or self.at_once
        """A server has a learner's stand-in on its GPU: its own, or that of the server beside it."""

    def file(self, contender: str, running: int, length: int) -> Path:
        """The run file of a contender."""
        fresh, work = f"{contender}-{int(time.time())}", self.work / contender if self.at_once else self.work
        work.mkdir(exist_ok=True)  # of its own where both write their model and problems at the same time
        return run_file(
            work, fresh, self.case.shape,
            sampling={"max_tokens": length},
            batch={"groups": self.case.groups, "samples": self.case.samples, "max_staleness": STALENESS},
            rollout={**sequences(running, self.case.samples), "heartbeat_s": 1.0,
                     "engine": engine_keys(self.case.length, self.args.engine, self.shared, self.case.shape)},
            learner={"tokens_per_microbatch": 16384},
        )  # fmt: skip

    def run(self, contender: str, gpu: int | None) -> None:
        """Run one contender; bare ones, and those that share it with their stand-in, on `gpu`."""
        progress(f"{self.name}: {CONTENDERS[contender]}")
        try:
            if contender == "server":
                self.found[contender] = self.serve(contender, self.case.running, self.case.length, self.case.mean, gpu)
            elif contender == "fixed":
                tail = self.found["server"] if not self.at_once else self.expected()
                length = round(2.0 * tail["context"]) + 1
                self.found[contender] = self.serve(contender, round(tail["running"]), length, 0.0, gpu)
            else:
                self.found[contender] = self.bare(contender, gpu)
            progress(f"{self.name}: {contender}: {self.found[contender]}")
        except (Died, TimeoutError, KeyError, OSError, subprocess.SubprocessError, IndexError) as error:
            self.failed[contender] = f"{type(error).__name__}: {error}"
            progress(f"{self.name}: {contender} failed: {self.failed[contender]}")

    def expected(self) -> dict[str, float]:
        """The tail before it is measured: all places taken, and the tokens before one in the mean, which is at position
        n as often as an answer is longer than that."""
        longer = [(1.0 - 1.0 / self.case.mean) ** n for n in range(self.case.length)]
        context = sum(n * share for n, share in enumerate(longer)) / sum(longer)
        return {"running": float(self.case.running), "context": context}

    def serve(self, contender: str, running: int, length: int, mean: float, gpu: int | None) -> dict[str, float]:
        """A server in full operation; on `gpu` where two run at once."""
        gpus: dict[str, int | None] = {"rollout": None, "learner": None}
        if torch.cuda.is_available():
            own = gpu or 0
            gpus = {"rollout": own, "learner": own if self.args.gpus == 1 else 1 - own}
        with Processes(self.file(contender, running, length), gpus) as run:
            run.start("buffer", "buffer")
            run.start("rollout", "rollout")
            words = [PUBLISH_EVERY_S, mean, 0.0 if mean else length, running]
            run.start("learner", "benchmarks.runs.stand_in", *map(str, words))
            run.wait("first batch", lambda: bool(run.records("batches.jsonl")), self.args.start_s)
            run.wait("steady state", lambda: steady_samples(run) > (2.5 if mean else 1.5) * running, self.args.start_s)
            until = time.monotonic() + self.args.seconds
            before = len(run.records("batches.jsonl"))
            with Watch(run) as watch:
                run.wait("the end of the measurement", lambda: time.monotonic() > until, self.args.seconds + 60.0)
            batches = run.records("batches.jsonl")[before:]
            state = run.state()
        first, *rest = batches
        samples, tokens, before = (sum(batch[key] for batch in rest) for key in ("samples", "tokens", "before"))
        rate = tokens / (rest[-1]["at"] - first["at"])
        counts = {"length": tokens / samples, "context": before / tokens}
        counts["failed"] = float(sum(state.failed.values())) if state else -1.0
        return watch.figures() | counts | {"rate": rate, "versions": float(len(rest))}

    def bare(self, contender: str, gpu: int | None) -> dict[str, float]:
        """`LLM.generate` in a process of its own."""
        file = self.file(contender, self.case.running, self.case.length)
        out = file.with_name("found.json")
        with Processes(file, {contender: gpu if torch.cuda.is_available() else None}) as run:
            early = environment(not torch.cuda.is_available())  # torch reads it when it is imported
            run.start(contender, "benchmarks.runs.bare", contender, str(self.args.waves), str(out), **early)
            try:
                run.wait("the end of bare generate", out.exists, self.args.start_s + 4.0 * self.args.seconds)
            except Died:
                if not out.exists():
                    raise
            found: dict[str, float] = json.loads(out.read_text())
        return found

    def rows(self) -> Iterator[ResultRow]:
        """The server against each peer and limit."""
        label = f"{self.name}: {self.case.shape}, {self.case.running} sequences"
        label += ", a learner's stand-in on the server's GPU" * self.shared + ", GPUs swapped" * self.args.swapped
        server = self.found.get("server")
        for contender, why in self.failed.items():
            yield ResultRow(f"FAILED: {contender}", 0.0, "", why, case=label)
        if server is None:
            for contender, peer in list(self.found.items()):
                yield ResultRow("tokens/s", peer["rate"], "1/s", CONTENDERS[contender], case=label)
            return
        yield ResultRow("tokens/s of a server in full operation", server["rate"], "1/s", case=label)
        for contender, peer in list(self.found.items()):
            if contender != "server":
                least = self.case.targets.get(contender)
                against = CONTENDERS[contender] + (f" (limit {least:g})" if least else "")
                yield ResultRow(
                    "tokens/s of the server", server["rate"], "1/s", CONTENDERS[contender], peer["rate"], label
                )
                yield ResultRow("  ratio", server["rate"] / peer["rate"], "", against, case=label)
            if contender == "fixed":
                sampled = server["tokens_per_s"] / peer["tokens_per_s"]
                yield ResultRow("  ratio of what is sampled, finished or not", sampled, "", against, case=label)
        yield ResultRow("front process, share of a CPU", server.get("front", -1.0), "", "limit", FRONT_SHARE, label)
        for contender in ("server", "fixed"):
            for key in (
                "running",
                "tokens_per_s",
                "preempted",
                "length",
                "context",
                "versions",
                "gpu rollout",
                "front",
                "failed",
            ):
                if key in (found := self.found.get(contender, {})):
                    yield ResultRow(f"{contender}: {key}", found[key], "", case=label)


def steady_samples(run: Processes) -> int:
    """Samples that have come since the lengths are those of the case."""
    return sum(batch["samples"] for batch in run.records("batches.jsonl") if batch["steady"])


def measure(benchmark: ServerBenchmark) -> Iterator[None]:
    """Run the contenders of a case that are wanted; yields when one has ended."""
    args, wanted = benchmark.args, benchmark.args.contenders.split(",")
    mine = [name for name in CONTENDERS if name in wanted and name in ("server", *benchmark.case.targets)]
    servers = [name for name in mine if name in ("server", "fixed")]
    bare = [name for name in mine if name not in servers]
    at_a_time = 2 if args.side_by_side and args.gpus > 1 else 1
    first = 2 if args.side_by_side and args.gpus == 4 else 0
    with ThreadPoolExecutor(2 if benchmark.at_once else 1) as lane, ThreadPoolExecutor(at_a_time) as peers:
        places = [1, 0] if args.swapped else [0, 1]
        running = [
            lane.submit(benchmark.run, name, gpu if benchmark.at_once else 0)
            for name, gpu in zip(servers, places, strict=False)
        ]
        if not first:
            wait(running)
        running += [peers.submit(benchmark.run, name, first + at % at_a_time) for at, name in enumerate(bare)]
        for contender in running:
            contender.result()
            yield


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="speck,speck-tail", help=f"of {', '.join(CASES)}")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help="of those that a case has")
    parser.add_argument("--seconds", type=float, default=40.0, help="of each server's measurement")
    parser.add_argument("--waves", type=int, default=6, help="requests for each sequence of bare generate")
    parser.add_argument("--start-s", type=float, default=240.0, help="longest start of a contender")
    parser.add_argument("--gpus", type=int, choices=(1, 2, 4), default=min(2, max(1, torch.cuda.device_count())))
    parser.add_argument(
        "--side-by-side", action="store_true", help="contenders two at a time, or all of them on four GPUs"
    )
    parser.add_argument("--swapped", action="store_true", help="the servers of `long-tail` on each other's GPU")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-rollout"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "rollout.json")
    args = parser.parse_args()
    for name in args.cases.split(","):
        if name not in CASES:
            parser.error(f"--cases: {name!r} is not one of {', '.join(CASES)}")
    benchmarks = [ServerBenchmark(name, args) for name in args.cases.split(",")]
    if args.swapped and not all(benchmark.at_once for benchmark in benchmarks):
        parser.error("--swapped: needs two servers at once; add --side-by-side --gpus 2, with --cases long-tail alone")

    def rows() -> list[dict[str, Any]]:
        return [row.line() for benchmark in benchmarks for row in benchmark.rows()]

    for benchmark in benchmarks:
        for _ in measure(benchmark):
            write(args.out, "rollout", rows(), show=False)
    write(args.out, "rollout", rows())
    return 1 if any(benchmark.failed for benchmark in benchmarks) else 0


if __name__ == "__main__":
    sys.exit(main())
