"""A mixture of experts on GPUs: is it loaded right, how far are its two ends apart, how fast does it learn?

`python -m benchmarks.experts` needs one H200: 8 layers of the shape of Qwen3-30B-A3B, random weights in bfloat16. A
second GPU gets the learner of the first part; on one both ends share it, through sockets, and seconds from published to
swapped are bounds. `--shape tiny` runs on a CPU in a few minutes, the learner not compiled.
`server`: the real engine and, in place of the learner, its policy and sender without an optimizer publish `--updates`
versions: seconds of the first load and of later ones; the probe after each, beside how far a policy that had stayed
would be off; then, for the same prompts and samples, the difference of log-probabilities between server and learner
with and without `rollout.routing_replay`, and how many routes differ. A vLLM that returns no routes is named in the
table. `learner`: whole steps as in `benchmarks.learner`, compiled and not: tokens/s, MFU by the experts that tokens
take, memory beside the estimate. Prints one table; writes JSON.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.learner.__main__ import matmul_tflops, ours_rows, together
from benchmarks.learner.cases import Case
from benchmarks.weights.__main__ import START_S, End
from benchmarks.weights.ends import STALL_S
from benchmarks.weights.shapes import folder_of, text_config
from benchmarks.weights.sharing import two_ends
from benchmarks.weights.table import ResultRow, measured_here, progress, write
from benchmarks.weights.traffic import PROMPT_TOKENS

ENDS = "benchmarks.experts.expert_ends"
PARTS = ("server", "learner")
FAILED = "FAILED"
"""Begins the row of what has no figures, beside those of what has."""


@dataclass(frozen=True)
class MixtureCase:
    """A shape of `shapes.py` and how much is asked of it. `batch`: samples of a learner's step; `ways`: how it runs."""

    shape: str
    samples: int
    length: int
    batch: int
    engine: dict[str, Any]
    ways: tuple[str, ...]


GPU_ENGINE = {"kv_cache_memory_bytes": 8 << 30, "moe_backend": "triton"}
CASES = {
    "middle": MixtureCase("Qwen3-30B-A3B-8", 64, 256, 256, GPU_ENGINE, ("compiled", "eager")),
    "tiny": MixtureCase("tiny-experts", 8, 32, 4, {"kv_cache_memory_bytes": 64 << 20}, ("eager",)),
}


def config_of(args: argparse.Namespace, case: MixtureCase) -> dict[str, Any]:
    """The part of a run file that matters here."""
    return {
        "model": {"path": str(folder_of(case.shape, args.work)), "dtype": "bfloat16"},
        "data": {"train": "none.parquet", "max_prompt_tokens": PROMPT_TOKENS},
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": case.length},
        "rollout": {"sequences": case.samples, "routing_replay": True, "engine": case.engine | args.engine},
        "weights": {"probe_every": 1, "probe_tolerance": args.tolerance, "timeout_s": 120.0, "staging": args.staging},
    }


async def serve(args: argparse.Namespace, case: MixtureCase) -> dict[str, Any]:
    """The part `server`."""
    given, log = {"config": config_of(args, case)}, args.work / "ends.log"
    (first, of_server), (second, of_learner) = two_ends().values()
    file, gap_s = args.work / "samples.msgpack", 2 * STALL_S + 0.5
    ends = [await End.start("server", given | {"samples": case.samples}, [first], log, ENDS, **of_server)]
    try:
        no_routes = (await ends[0].answer("started", START_S))["no_routes"]
        progress(f"server: it has started{f', {no_routes}' if no_routes else ''}")
        ends.append(await End.start("learner", given, [second], log, ENDS, **of_learner))
        hello = await ends[1].answer("address", START_S)
        ends[0].tell("follow", hello["address"])
        ends[1].tell("updates", args.updates, gap_s)
        updates = (await ends[1].answer("updates", START_S + args.updates * (gap_s + 30)))["updates"]
        progress(f"server: {len(updates)} versions are loaded")
        ends[0].tell("report")
        events = (await ends[0].answer("events"))["events"]
        ends[0].tell("sample", file)
        await ends[0].answer("sampled", START_S)
        ends[1].tell("compare", file)
        mismatch: dict[str, Any] = (await ends[1].answer("mismatch", START_S))["mismatch"]
        return {"bytes": hello["bytes"], "no_routes": no_routes, "updates": updates, "events": events, **mismatch}
    finally:
        for end in ends:
            await end.end()


def server_rows(found: dict[str, Any], label: str) -> Iterator[ResultRow]:
    """Loads and probes by version, then the mismatch."""
    updates = {update["version"]: update for update in found["updates"]}
    later = [event for event in found["events"] if event["version"] > 0]
    first = next(event for event in found["events"] if event["version"] == 0)
    yield ResultRow("a version on the wire", found["bytes"] / 1e9, "GB", case=label)
    yield ResultRow("the call that loads, first version", first["load_s"], "s", case=label)
    for word, of in (("median", median), ("worst", max)) if later else ():
        loads = [event["load_s"] for event in later]
        lags = [event["swapped"] - updates[event["version"]]["started"] for event in later]
        yield ResultRow(f"the call that loads, later ones, {word}", of(loads), "s", case=label)
        yield ResultRow(f"published to swapped, {word}", of(lags), "s", case=label)
    for version, update in updates.items():
        stayed, stale = ("had the weights before stayed", update["stale"]) if version else ("", None)
        yield ResultRow(f"probe of version {version}", update["weights/probe"], "nat", stayed, stale, label)
    replayed = "replayed/dlogp" in found
    against = (
        "with routing replay" if replayed else f"with routing replay: NOT MEASURED, {vllm_here()} returns no routes"
    )
    for key, what in (("dlogp", "server to learner, mean difference of log-probabilities"), ("k3", "  k3")):
        yield ResultRow(what, found[f"live/{key}"], "nat", against, found.get(f"replayed/{key}"), label)
    if not replayed:
        yield ResultRow("routes: NONE RETURNED", 0.0, "", f"{vllm_here()}: {found['no_routes']}", case=label)
        return
    for key, what in (("tokens", "tokens"), ("layers", "layers of tokens"), ("choices", "choices")):
        yield ResultRow(f"{what} whose route is not the learner's", 100.0 * found[key], "%", case=label)


def vllm_here() -> str:
    """As `vllm 0.26.0`, with the device."""
    known = measured_here()
    name = next((f"{name} {number}" for name, number in known["versions"].items() if "vllm" in name), "no vLLM")
    return f"{name} on {known['hardware']}"


def learn(args: argparse.Namespace, case: MixtureCase) -> dict[str, Any]:
    """The part `learner`: `benchmarks.learner` on this shape, by the name of each way."""
    ways = {f"ours-{way}": {"compile": way == "compiled"} for way in case.ways}
    cases = {
        name: Case("ours", case.shape, samples=case.batch, steps=args.steps, learner=keys | args.learner)
        for name, keys in ways.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        answers = together(cases, Path(folder), 1, args.limit_s)
    missing = sorted(cases.keys() - answers.keys())
    return {"answers": answers, "missing": missing, "tflops": matmul_tflops()}


def learner_rows(found: dict[str, Any], label: str) -> Iterator[ResultRow]:
    """As in `benchmarks.learner`, of which the target is left out: it is that of dense models."""
    for name, answer in found["answers"].items():
        for line in ours_rows(name, answer, None, found["tflops"]):
            target = line["against"] == "target" or line["against_value"] is None
            yield ResultRow(**line | ({"against": "", "against_value": None} if target else {}), case=label)
    for name in found["missing"]:
        yield ResultRow(f"{FAILED}: learner, {name}", 0.0, "", "no answer, its output is above", case=label)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=CASES, default="middle" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    parser.add_argument("--updates", type=int, default=5, help="versions that are published")
    parser.add_argument("--staging", default="auto", help="weights.staging")
    parser.add_argument("--tolerance", type=float, default=0.3, help="of the probe, in nats")
    parser.add_argument("--steps", type=int, default=2, help="of the learner, after two small ones")
    parser.add_argument("--limit-s", type=float, default=240.0, help="longest time of each way to learn")
    parser.add_argument("--engine", type=json.loads, default={}, help="rollout.engine, as JSON")
    parser.add_argument("--learner", type=json.loads, default={}, help="keys of the section learner, as JSON")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-experts"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "experts.json")
    args = parser.parse_args()
    args.parts = args.parts.split(",")
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"--parts: {min(unknown)!r} is not one of {', '.join(PARTS)}")
    args.work = args.work.resolve()
    args.work.mkdir(parents=True, exist_ok=True)
    return args


def main() -> int:
    args = arguments()
    case, rows = CASES[args.shape], list[ResultRow]()
    layers = text_config(case.shape)["num_hidden_layers"]
    label = f"{case.shape}, {layers} layers, bfloat16"
    for part in args.parts:
        progress(f"{part}: {label}, logs in {args.work}")
        try:
            if part == "server":
                rows += server_rows(asyncio.run(serve(args, case)), label)
            else:
                rows += learner_rows(learn(args, case), label)
        except (TimeoutError, RuntimeError, OSError, KeyError, subprocess.SubprocessError) as error:
            why = f"{type(error).__name__}: {error}; logs in {args.work}"
            rows.append(ResultRow(f"{FAILED}: {part}", 0.0, "", why, case=label))
        write(args.out, "experts", [row.line() for row in rows], show=False)
    write(args.out, "experts", [row.line() for row in rows])
    return 1 if any(row.what.startswith(FAILED) for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
