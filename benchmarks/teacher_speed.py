"""How many tokens/s can one teacher server score, asked as the run's own server and by vLLM's API?

`python -m benchmarks.teacher_speed` starts `python -m rollout teacher` with random weights (`--shape`) and asks it for
groups of 16 texts, eight groups at a time, both ways in turn, with `teacher.top_k` and without. It shows the median of
`--rounds` rounds, and the processor time a token of the process that answers HTTP and of this one, which asks as a
rollout server does. Prints one table and writes JSON. `--shape speck` is the small form for CPU, and the default there.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import yaml

from benchmarks.runs.ports import free_port
from benchmarks.runs.processes import Processes
from benchmarks.runs.trained import trained_run
from benchmarks.weights.shapes import SHAPES
from benchmarks.weights.table import ResultRow, progress, write
from buffer.keys import load_token, make_keys
from rollout.rewards.models.own_servers import answers
from rollout.teachers.teacher_client import OwnTeacher, TeacherClient

GROUP, AT_ONCE, TOKENS, PROMPT = 16, 8, 384, 128
WAYS: dict[str, type[OwnTeacher | TeacherClient]] = {"the run's own": OwnTeacher, "vLLM's API": TeacherClient}
SHOWN = {"tokens/s": "1/s", "server, processor time a token": "us", "client, processor time a token": "us"}
Groups = list[list[list[int]]]


def server(args: argparse.Namespace) -> Processes:
    """A run with a teacher, whose processes are not started."""
    run = trained_run(
        args.work.resolve(), f"speed-{int(time.time())}", args.shape, 0.0, TOKENS - PROMPT, 64, 4, 4, {}, {}
    )
    config = yaml.safe_load(run.file.read_text(encoding="utf-8"))
    engine = {key: value for key, value in config["rollout"]["engine"].items() if key != "max_num_seqs"}
    teacher = {"model": config["model"]["path"], "servers": 1, "port": free_port(), "top_k": args.top_k}
    config["teacher"] = teacher | {"engine": engine | {"max_model_len": TOKENS + 1}}
    run.file.write_text(yaml.safe_dump(config, sort_keys=False))
    return Processes(run.file, {"teacher-0": 0} if torch.cuda.is_available() else {})


async def asked(args: argparse.Namespace, run: Processes) -> list[ResultRow]:
    """Ask both ways in turn."""
    url, key = run.config.teacher.urls_of("")[0], load_token(run.folder / "keys")
    sampled, draw = np.arange(TOKENS) >= PROMPT, np.random.default_rng(0)
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    clients = {
        (name, top_k): kind(url=url, model=run.config.teacher.model, top_k=top_k or None, timeout_s=600.0)
        for top_k in (0, args.top_k)
        for name, kind in WAYS.items()
    }
    for number in range(args.rounds + 1):  # the first one compiles kernels
        for case, client in clients.items():
            client.show(key)
            groups = draw.integers(0, SHAPES[args.shape]["vocab_size"], (AT_ONCE, GROUP, TOKENS)).tolist()
            figures = await one_round(run, client, groups, sampled)
            if number:
                found.setdefault(case, []).append(figures)
            progress(f"{case}: {figures}")
    for client in clients.values():
        await client.close()
    return list(rows_of(found))


async def one_round(
    run: Processes, client: OwnTeacher | TeacherClient, groups: Groups, sampled: np.ndarray
) -> dict[str, float]:
    """Ask about all groups at once."""
    number, places = AT_ONCE * GROUP * TOKENS, [sampled] * GROUP
    own, theirs, began = time.process_time(), run.cpu_s("teacher-0") or 0.0, time.monotonic()
    await asyncio.gather(*(client.opinions(texts, places) for texts in groups))
    seconds = time.monotonic() - began
    spent = (run.cpu_s("teacher-0") or 0.0) - theirs, time.process_time() - own
    return dict(zip(SHOWN, (number / seconds, *(1e6 * each / number for each in spent)), strict=True))


def rows_of(found: dict[tuple[str, int], list[dict[str, float]]]) -> Sequence[ResultRow]:
    """Medians of the rounds, each beside vLLM's API."""
    own, peer = WAYS
    rows = []
    for name, top_k in found:
        if name == own:
            for what, unit in SHOWN.items():
                ours, theirs = (median(each[what] for each in found[way, top_k]) for way in (own, peer))
                rows.append(ResultRow(what, ours, unit, peer, theirs, f"top_k {top_k}"))
    return rows


async def ready(url: str, timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while not await answers(url):
            await asyncio.sleep(0.5)


async def measured(args: argparse.Namespace, run: Processes) -> list[ResultRow]:
    await ready(run.config.teacher.urls_of("")[0], args.start_s)
    return await asked(args, run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    shape = "SmolLM2-135M" if torch.cuda.is_available() else "speck"
    parser.add_argument("--shape", choices=SHAPES, default=shape)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--start-s", type=float, default=300.0, help="longest time of the server's start")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark-teacher-speed"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "teacher_speed.json")
    args: Any = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    run = server(args)
    make_keys(run.folder / "keys")
    with run:
        run.start("teacher-0", "rollout teacher")
        rows = asyncio.run(measured(args, run))
    write(args.out, "teacher_speed", [row.line() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
