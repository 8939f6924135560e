"""`python -m tests.system.nemesis --faults 200 --seed 0`: runs that meet every kind of fault, and a table of the costs.

Buffer, launcher with its guard, keepers, both wires and the loops are the real ones; servers and learner have stand-ins
for vLLM and the model (`server.py`, `learner.py`). The faults are in `faults.py`, what is promised in `checker.py`.
Prints a line for each fault and a table by kind. Exit code 1 if anything was found; then the folders stay.
"""

import argparse
import json
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

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "nemesis.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser("python -m tests.system.nemesis", description=__doc__)
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", help="names or families, such as kill,pause,flip-segment-running; all by default")
    parser.add_argument("--out", type=Path, help="write the table into this file too, such as " + str(RESULTS))
    wanted = parser.parse_args(argv)
    try:
        kinds = kinds_of(wanted.kinds)
    except ValueError as error:
        parser.error(f"--kinds: {error}")
    folder, began = Path(tempfile.mkdtemp(prefix="headrace-nemesis-")), time.monotonic()
    outcomes = Nemesis(folder, kinds, wanted.faults, wanted.seed, lambda line: print(line, flush=True)).go()
    show(outcomes, time.monotonic() - began)
    if wanted.out:
        wanted.out.write_text(json.dumps(results(outcomes, wanted.faults, wanted.seed), indent=1) + "\n")
    if any(outcome.findings for outcome in outcomes):
        print(f"Everything is in {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


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


def number(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.1f}"


def results(outcomes: Sequence[Outcome], faults: int, seed: int) -> dict[str, Any]:
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
        "command": f"python -m tests.system.nemesis --faults {faults} --seed {seed}",
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
