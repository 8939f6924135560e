"""Pushes to a server that shows photos, with everything trained and with a frozen tower. Part of `benchmarks.vision`.

Waits for the two ends that it starts (`push_ends.py`), one GPU each if there are two, never longer than it was told.
"""

import asyncio
import time
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from benchmarks.runs.processes import data_of, engine_keys, sequences
from benchmarks.vision.cases import SeeingCase
from benchmarks.weights.__main__ import End
from benchmarks.weights.shapes import folder_of
from benchmarks.weights.sharing import two_ends
from benchmarks.weights.table import ResultRow, progress

ENDS = "benchmarks.vision.push_ends"
WAYS: dict[str, list[str]] = {"trained": [], "frozen": ["vision", "projector"]}
"""`model.freeze` of each way to push."""
WORDS = {"trained": "tower trained", "frozen": "tower frozen"}


def config_of(shape: str, case: SeeingCase, freeze: list[str], work: Path, engine: dict[str, Any]) -> dict[str, Any]:
    """The part of a run file that matters to the two ends."""
    folder = folder_of(shape, work)
    return {
        "run": {"name": f"pushes-{int(time.time())}", "folder": str(work)},
        "model": {"path": str(folder), "freeze": freeze},
        "data": data_of(shape, work, folder),
        "reward": {"function": "countdown"},
        "sampling": {"max_tokens": case.length},
        "batch": {"samples": case.samples},
        "rollout": {**sequences(case.running, case.samples),
                    "engine": engine_keys(case.length, engine, torch.cuda.device_count() == 1, shape)},
        "weights": {"probe_every": 1, "timeout_s": 60.0, "probe_tolerance": case.tolerance},
    }  # fmt: skip


async def push(config: dict[str, Any], case: SeeingCase, updates: int, gap_s: float, logs: Path) -> dict[str, Any]:
    """Start both ends, compare the probes of version 0, and push `updates` versions under load."""
    logs.mkdir(parents=True, exist_ok=True)
    ends: list[End] = []
    (first, of_server), (second, of_learner) = two_ends().values()
    try:
        mine = {"config": config, "name": "rollout-0", "running": case.running, "length": case.length}
        server = await End.start("server", mine, [first], logs / "server.log", ENDS, **of_server)
        ends.append(server)
        learner = await End.start("learner", {"config": config}, [second], logs / "learner.log", ENDS, **of_learner)
        ends.append(learner)
        hello = await learner.answer("address", 240.0)
        await server.answer("started", 300.0)
        server.tell("address", hello["address"])
        learner.tell("served")
        first = (await learner.answer("served"))["served"]
        for end in ends:
            end.tell("probes")
        found = [(await end.answer("probes"))["probes"] for end in ends]
        progress(f"version 0 is on the server, its probe differs by {first:.4g} nat; {updates} updates under load")
        server.tell("load")
        await server.answer("serving")
        learner.tell("updates", updates, gap_s)
        pushed = (await learner.answer("updates", 60.0 + updates * (gap_s + 20.0)))["updates"]
        server.tell("stop")
        report = await server.answer("events")
    finally:
        for end in ends:
            await end.end()
    return {
        "bytes": hello["bytes"], "whole": hello["whole"], "events": events_of(report, pushed),
        "updates": pushed, "probes": differences(*found), "probe": first,
        "finished": report["finished"], "lost": report["lost"],
    }  # fmt: skip


def events_of(report: dict[str, Any], updates: list[dict[str, float]]) -> list[dict[str, Any]]:
    """The server's swaps, each with the time since its version was published."""
    started = {update["version"]: update["started"] for update in updates}
    events = [event for event in report["events"] if event["version"] in started]
    return [event | {"lag_s": event["swapped"] - started[event["version"]]} for event in events]


def differences(server: dict[str, list[float]], learner: dict[str, list[float]]) -> dict[str, float]:
    """Mean absolute differences of the probes; `other`: the server sees another picture than the learner."""
    pairs = {"text": ("text", "text"), "picture": ("picture", "picture"), "other": ("other", "picture")}
    return {
        name: mean(abs(a - b) for a, b in zip(server[ours], learner[theirs], strict=True))
        for name, (ours, theirs) in pairs.items()
    }


def measure_pushes(
    shape: str,
    case: SeeingCase,
    updates: int,
    gap_s: float,
    work: Path,
    engine: dict[str, Any],
    budget_s: float,
    found: dict[str, Any],
) -> None:
    """Both ways, one after the other, into `found`. Raises TimeoutError beyond `budget_s`."""
    until = time.monotonic() + budget_s
    for way, freeze in WAYS.items():
        progress(f"pushes, {WORDS[way]}: logs in {work / way}")
        config = config_of(shape, case, freeze, work, engine)
        run = push(config, case, updates, gap_s, work / way)
        try:
            found[way] = asyncio.run(asyncio.wait_for(run, max(1.0, until - time.monotonic())))
        except TimeoutError as error:
            late = str(error) or f"not within {budget_s:.0f} s, see {work / way}; raise --budget-s"
            raise TimeoutError(f"pushes, {WORDS[way]}: {late}") from None


def rows_of(found: dict[str, Any], shape: str) -> list[ResultRow]:
    """The frozen tower's pushes against those of everything, then what else was seen of each way."""
    case, rows = f"frozen: {shape}, pushes", list[ResultRow]()

    def compared(what: str, unit: str, values: dict[str, float]) -> None:
        if len(values) == len(WAYS):
            rows.append(ResultRow(f"{what}, {WORDS['frozen']}", values["frozen"], unit, WORDS["trained"],
                                  values["trained"], case))  # fmt: skip
        else:
            rows.extend(ResultRow(f"{what}, {WORDS[way]}", value, unit, case=case) for way, value in values.items())

    compared("sent for a version", "GB", {way: each["bytes"] / 1e9 for way, each in found.items()})
    for key, what in (("lag_s", "published to swapped"), ("interrupted_s", "interrupted: silence less the usual step"),
                      ("load_s", "the call that swaps")):  # fmt: skip
        for word, of in (("median", median), ("worst", max)):
            values = {way: 1e3 * of(event[key] for event in each["events"]) for way, each in found.items()}
            compared(f"{what}, {word}", "ms", values)
    for key, what in (("publish_s", "publish, as the learner waits for it"), ("weights/span_s", "broadcast")):
        values = {way: 1e3 * median(update.get(key, 0.0) for update in each["updates"]) for way, each in found.items()}
        compared(f"{what}, median", "ms", values)
    for way, each in found.items():
        rows += way_rows(each, WORDS[way], case)
    return rows


def way_rows(each: dict[str, Any], word: str, case: str) -> list[ResultRow]:
    """What was seen of one way."""
    probes, events = each["probes"], [event for event in each["events"] if event["before"] and event["after"]]
    after = [update["weights/probe"] for update in each["updates"] if "weights/probe" in update]
    rows = [
        ResultRow(f"{word}: probe of a text", probes["text"], "nat", case=case),
        ResultRow(f"{word}: probe behind a picture", probes["picture"], "nat", "behind another picture",
                  probes["other"], case),
        ResultRow(f"{word}: probe after pushes, worst", max(after, default=-1.0), "nat", "pushes probed",
                  len(after), case),
        ResultRow(f"{word}: requests lost", each["lost"], "", "finished", each["finished"], case),
    ]  # fmt: skip
    if events:
        before, behind = (median(event[key] for event in events) for key in ("before", "after"))
        rows.append(ResultRow(f"{word}: tokens/s after a push", behind, "1/s", "before", before, case))
    return rows
