"""`make mutants`: prints how many small faults in the code the tests find.

mutmut changes one expression at a time (a "mutant") and runs the tests that reach the changed function. One mutant in
ten is tried: those whose number ends with 7. `python -m tests.mutants ledger split` tries two areas only, `--lane fast`
runs the tests of the fast lane only, `--all` tries every mutant. Each area is tried in a copy of the tracked files, so
that the tree stays as it is.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SAMPLE = "*__mutmut_*7"


class Area(NamedTuple):
    """Files that are changed, as patterns, and the tests that may find the change."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


AREAS = {
    "ledger": Area(("buffer/ledger/*",), ("tests/buffer/ledger", "tests/buffer/wire/test_server.py")),
    "store": Area(
        ("buffer/store/*",),
        (
            "tests/buffer/store",
            *(f"tests/buffer/wire/test_{name}.py" for name in ("server", "scale")),
            "tests/actors/supervise/test_accept.py",
        ),
    ),
    "split": Area(("buffer/wire/split.py",), ("tests/buffer/wire/test_split.py", "tests/buffer/wire/test_server.py")),
    "algorithms": Area(("learner/algorithms/*",), ("tests/learner/algorithms", "tests/learner/train")),
    "train": Area(("learner/train/*",), ("tests/learner/train", "tests/learner/lora")),
    "weights": Area(("learner/weights/plan.py", "learner/weights/buckets.py"), ("tests/learner/weights",)),
    "scheduling": Area(
        ("rollout/engine/scheduling/*",),
        tuple(f"tests/rollout/engine/test_{name}.py" for name in ("blocks", "ends", "joined_requests", "plain_steps")),
    ),
}


def settings(area: Area, lane: str | None) -> str:
    """mutmut's settings for one area, as setup.cfg."""
    package = area.files[0].partition("/")[0]
    copied = {line.partition("/")[0] for line in tracked()} - {package, "tests"}
    lists = {
        "source_paths": [f"{package}/"],
        "only_mutate": area.files,
        "also_copy": sorted(copied),
        "pytest_add_cli_args_test_selection": area.tests,
        "pytest_add_cli_args": ["-p", "no:cacheprovider", *(["--lane", lane] if lane else ["-m", "not gpu"])],
    }
    rows = (f"{name} =\n" + "\n".join(f"    {value}" for value in values) for name, values in lists.items())
    return "[mutmut]\n" + "\n".join(rows) + "\non_dependency_change = ignore\nuse_git_change_detection = false\n"


def tracked() -> list[str]:
    return subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()


def outcomes(area: Area, lane: str | None, every: bool) -> dict[str, str]:
    """Return the result of each tried mutant: killed, survived, timeout, no tests, ..."""
    with tempfile.TemporaryDirectory() as folder:
        for name in tracked():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
        Path(folder, "setup.cfg").write_text(settings(area, lane))
        mutmut = [str(Path(sys.executable).with_name("mutmut"))]
        environment = os.environ | {"PYTHONPATH": ""}
        ran = subprocess.run([*mutmut, "run", *(() if every else (SAMPLE,))], cwd=folder, env=environment)
        if ran.returncode:
            raise SystemExit(f"mutmut ended with exit code {ran.returncode}")
        text = subprocess.check_output([*mutmut, "results", "--all", "true"], cwd=folder, env=environment, text=True)
    found = dict(re.findall(r"^\s+(\S+): (.+)$", text, re.MULTILINE))
    return {name: outcome for name, outcome in found.items() if outcome != "not checked"}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all if none is given")
    parser.add_argument("--lane", choices=("fast", "long"), help="only the tests of this lane")
    parser.add_argument("--all", action="store_true", help="every mutant, not one in ten")
    flags = parser.parse_args()
    if unknown := [area for area in flags.areas if area not in AREAS]:
        parser.error(f"{unknown[0]}: no such area; there are {', '.join(AREAS)}")
    rows, survivors = [], []
    for name in flags.areas or AREAS:
        found = outcomes(AREAS[name], flags.lane, flags.all)
        counts = Counter(found.values())
        killed = counts["killed"] + counts["timeout"]
        rows.append((name, len(found), killed, 100 * killed / max(len(found), 1)))
        survivors += [
            f"  {name}: {mutant} ({what})" for mutant, what in found.items() if what not in ("killed", "timeout")
        ]
    print("\nnot killed:", *survivors, sep="\n")
    print(f"\n{'area':<12}{'mutants':>8}{'killed':>8}{'share':>9}")
    for name, tried, killed, share in rows:
        print(f"{name:<12}{tried:>8}{killed:>8}{share:>8.1f}%")


if __name__ == "__main__":
    main()
