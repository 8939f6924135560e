"""`python -m tests.system.nemesis --faults 200 --seed 0`: runs that meet every kind of fault, and a table of the costs.

Buffer, launcher with its guard, keepers, both wires and the loops are the real ones; servers and learner have stand-ins
for vLLM and the model (`server.py`, `learner.py`). The faults are in `faults.py`, what is promised in `checker.py`.
Prints a line for each fault and a table by kind. Exit code 1 if anything was found; then the folders stay. A run takes
one to two cores; `--seed 1,2,3,4,5 --parallel 50 --minutes 7` strikes fifty runs of five seeds at the same time.
"""

import argparse
import json
import math
import os
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.system.chaos_faults import why_no_disk
from tests.system.nemesis.faults import KINDS, Kind, chosen
from tests.system.nemesis.nemesis import Nemesis, Outcome, table
from tests.system.nemesis.parallel import strike_all

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "nemesis.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser("python -m tests.system.nemesis", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=numbers, default=[0], help="one, or several with commas: --faults for each")
    parser.add_argument("--kinds", help="names or families, such as kill,pause,flip-segment-running; all by default")
    parser.add_argument("--out", type=Path, help="write the table into this file too, such as " + str(RESULTS))
    parser.add_argument("--parallel", type=int, default=1, help="runs at the same time")
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault begins later; the last takes up to 3")
    wanted = parser.parse_args(argv)
    try:
        kinds = kinds_of(wanted.kinds)
    except ValueError as error:
        parser.error(f"--kinds: {error}")
    folder, began = Path(tempfile.mkdtemp(prefix="headrace-nemesis-")), time.monotonic()
    deadline = began + 60 * wanted.minutes
    by_seed = struck(folder, kinds, wanted, deadline)
    outcomes = [outcome for some in by_seed.values() for outcome in some]
    show(outcomes, time.monotonic() - began)
    if len(by_seed) > 1:
        show_seeds(by_seed)
    if wanted.out:
        wanted.out.write_text(json.dumps(results(outcomes, command(wanted)), indent=1) + "\n")
    if any(outcome.findings for outcome in outcomes):
        print(f"Everything is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


def struck(
    folder: Path, kinds: Sequence[Kind], wanted: argparse.Namespace, deadline: float
) -> dict[int, list[Outcome]]:
    """What became of all faults, by seed."""

    def say(line: str) -> None:
        print(line, flush=True)

    if wanted.parallel > 1:
        return strike_all(wanted.seed, kinds, wanted.faults, folder, wanted.parallel, deadline, say)
    return {
        seed: Nemesis(folder / f"seed-{seed}", kinds, wanted.faults, seed, say, deadline).go() for seed in wanted.seed
    }


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def command(wanted: argparse.Namespace) -> str:
    """The command, as the file of results names it."""
    seeds = ",".join(map(str, wanted.seed))
    more = f" --parallel {wanted.parallel}" if wanted.parallel > 1 else ""
    return f"python -m tests.system.nemesis --faults {wanted.faults} --seed {seeds}{more}"


def kinds_of(names: str | None) -> list[Kind]:
    """The kinds of the command line, or all. Raises ValueError."""
    kinds = chosen(names) if names else list(KINDS.values())
    if any(kind.name == "disk" for kind in kinds) and (why := why_no_disk()):
        if names:
            raise ValueError(f"disk takes a mounted disk: {why}")
        print(f"no run has a full disk: {why}", flush=True)
        kinds = [kind for kind in kinds if kind.name != "disk"]
    return kinds


def show(outcomes: Sequence[Outcome], took_s: float) -> None:
    """The table."""
    print(f"\n{'kind':<26} {'faults':>6} {'clean':>6} {'median s':>9} {'most s':>9}")
    for kind, count, clean, middle, most in table(outcomes):
        print(f"{kind:<26} {count:>6} {clean:>6} {number(middle):>9} {number(most):>9}")
    clean = sum(not outcome.findings for outcome in outcomes)
    print(f"{len(outcomes)} faults, {clean} clean, in {took_s / 60:.0f} minutes")


def show_seeds(by_seed: dict[int, list[Outcome]]) -> None:
    """How many faults of each seed were clean, and what was found."""
    for seed, outcomes in by_seed.items():
        clean = sum(not outcome.findings for outcome in outcomes)
        kinds = len({outcome.kind for outcome in outcomes})
        print(f"seed {seed}: {len(outcomes)} faults of {kinds} kinds, {clean} clean")
        for outcome in outcomes:
            for finding in outcome.findings:
                print(f"  {outcome.kind}: {finding}")


def number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def results(outcomes: Sequence[Outcome], command: str) -> dict[str, Any]:
    """The table as a file of results."""
    rows = list[dict[str, Any]]()
    for kind, count, clean, middle, most in table(outcomes):
        rows.append({"what": f"{kind}: faults", "value": count, "unit": "", "against": "clean", "against_value": clean})
        if middle is not None and most is not None:
            cost = {"what": f"{kind}: median cost", "value": round(middle, 2), "unit": "s"}
            rows.append(cost | {"against": "most", "against_value": round(most, 2)})
    return {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"CPU, {platform.machine()}, {os.cpu_count()} cores",
        "versions": {"python": platform.python_version()},
        "command": command,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
