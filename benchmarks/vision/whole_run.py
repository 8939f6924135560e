"""A run of real processes on photos: buffer, server and learner. Part of `benchmarks.vision`.

Waits for the processes that it starts by hand, and never longer than it was told.
"""

import time
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.runs.processes import TEXT_ONLY, Processes, Watch
from benchmarks.runs.trained import Record, figures_of, trained_run, versions_of
from benchmarks.vision.cases import SeeingCase
from benchmarks.weights.table import ResultRow, progress

GIB = 2.0**30
PROBE_EVERY = 2
SHOWN = ("sampled tokens/s", "learner works", "waits s/version", "train s/version", "length", "age mean", "age max",
         "running", "front", "gpu rollout", "gpu learner", "dropped", "failed")  # fmt: skip


def measure_run(
    shape: str, case: SeeingCase, versions: int, warm_up: int, work: Path, given: dict[str, Any], budget_s: float
) -> dict[str, Any]:
    """Figures of `versions` after `warm_up`, or of those that came in `budget_s`; raises TimeoutError if too few did.

    `given`: the sections `engine` and `learner`, and `freeze`.
    """
    until = time.monotonic() + budget_s
    learner = {"tokens_per_microbatch": case.microbatch, **given["learner"]}
    run = trained_run(work, f"run-{int(time.time())}", shape, 0.0, case.length, case.running, case.groups, case.samples,
                      given["engine"], learner, {"freeze": given["freeze"]},
                      {"probe_every": PROBE_EVERY, "probe_tolerance": case.tolerance})  # fmt: skip

    def left() -> float:
        return until - time.monotonic()

    with run:
        run.start("buffer", "buffer")
        run.start("rollout", "rollout")
        run.start("learner", "learner")
        run.wait(f"{warm_up} versions of warm-up", lambda: versions_of(run) >= warm_up, left())
        with Watch(run) as watch:
            wanted = warm_up + versions
            run.wait(f"{versions} versions", lambda: versions_of(run) >= wanted or left() < 10.0, left() + 1.0)
    records = run.records()[warm_up - 1 :]
    if len(records) < 2:
        raise TimeoutError(f"no version after {warm_up} of warm-up within {budget_s:.0f} s; raise --budget-s")
    return figures_of(records) | watch.figures() | seen_of(records[1:]) | memory_of(run)


def seen_of(records: list[Record]) -> dict[str, float]:
    """What a learner that sees records besides: utilisation, images, the probe and the pushes."""

    def values(key: str) -> list[float]:
        return [record[key] for record in records if key in record]

    found = {key: mean(values(key)) for key in ("mfu", "mfu/version", "images", "patches", "flops") if values(key)}
    found |= {name: max(values(key)) for key, name in (("memory/gpu_gib", "gpu GiB"), ("memory/host_gib", "host GiB"),
                                                      ("weights/probe", "probe")) if values(key)}  # fmt: skip
    found |= {name: mean(values(key)) for key, name in (("weights/lag_s", "lag s"), ("weights/load_s", "load s"))
              if values(key)}  # fmt: skip
    probed = {record["weights/probe_version"] for record in records if "weights/probe_version" in record}
    return found | {"probed": float(len(probed))}


def memory_of(run: Processes) -> dict[str, Any]:
    """The estimate that the learner made before it loaded anything."""
    from learner.model.gather_choice import choose_gather
    from learner.model.memory import RankRoom, gpu_memory

    model, tokens = run.config.model, run.config.learner.tokens_per_microbatch
    assert isinstance(tokens, int)
    memory = gpu_memory(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    room = RankRoom(1, memory, tokens, sends=1)
    expected = room.estimate(model, choose_gather(model, run.config.learner, room))
    return {"estimate GiB": expected.total(tokens) / GIB, "estimate": expected.describe(tokens), "microbatch": tokens}


def rows_of(found: dict[str, Any], shape: str, case: SeeingCase) -> list[ResultRow]:
    """The run's figures, memory beside its estimate."""
    label = f"run: {shape}, {case.groups} groups of {case.samples} x {case.length} tokens"
    label += ", one GPU for both ends" * (torch.cuda.device_count() == 1)
    rows = [
        ResultRow("versions/h", found["versions/h"], "1/h", "versions counted", found["versions"], label),
        ResultRow("trained tokens/s, prompts counted for each sample", found["tokens/s with prompts"], "1/s",
                  "sampled ones", found["sampled tokens/s"], label),
        ResultRow("images that the learner encodes, per version", found["images"], "", "rows with an image",
                  case.groups * (1.0 - 1.0 / TEXT_ONLY), label),
        ResultRow("patches, per version", found["patches"], "", case=label),
        ResultRow("probe behind a picture, worst", found.get("probe", -1.0), "nat", "versions probed", found["probed"],
                  label),
    ]  # fmt: skip
    if "mfu" in found:
        rows.append(ResultRow("MFU in training, tower counted", found["mfu"], "", "over all time",
                              found["mfu/version"], label))  # fmt: skip
    else:
        speed = found["flops"] / found["train s/version"] / 1e9
        rows.append(ResultRow("FLOPs in training, tower counted", speed, "G/s", case=label))
    if "gpu GiB" in found:
        rows.append(ResultRow("learner's peak memory", found["gpu GiB"], "GiB", f"estimate: {found['estimate']}",
                              found["estimate GiB"], label))  # fmt: skip
    else:
        rows.append(ResultRow("learner's peak memory, of the host", found["host GiB"], "GiB", "estimate for a GPU",
                              found["estimate GiB"], label))  # fmt: skip
    rows += [ResultRow(f"{key} of a push", 1e3 * found[f"{key} s"], "ms", case=label) for key in ("lag", "load")
             if f"{key} s" in found]  # fmt: skip
    return [*rows, *(ResultRow(key, found[key], "", case=label) for key in SHOWN if key in found)]


def report(found: dict[str, Any]) -> None:
    """Say on stderr how it went."""
    progress(f"run: {found}")
