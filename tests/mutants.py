"""`make mutants`: prints how many small faults in the code the tests find.

mutmut changes one expression at a time (a "mutant") and runs the tests that reach the changed function. One mutant in
ten is tried: those whose number ends with 7. `python -m tests.mutants ledger split` tries two areas only, `--lane fast`
runs the tests of the fast lane only, `--one-in 30` tries those whose number is 17, 47, 77, ... and `--one-in 1` all.
Tests with a real vLLM are left out. Each area is tried in a copy of the tracked files, so that the tree stays as it is.
What was found is in benchmarks/LOG.md. Timeouts count as killed, and their number is shown for a look by hand: mutmut
also reports one where its own process has failed.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
REACHED = ROOT / "tests/harness/reached.py"
LARGEST = 2000
"""More mutants than any function has."""
PLAIN_SETTINGS = (
    "on_dependency_change = ignore",
    "use_git_change_detection = false",
    "process_isolation = forkserver",  # a process that has run torch has threads, and tests in its forks crash
)
ARGUMENTS = (
    *("-p", "no:cacheprovider", "-p", "reached"),
    *("-m", "not gpu and not vllm", "--timeout", "100"),  # an engine takes tens of seconds for each mutant
)


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
            "tests/buffer/ledger/test_quarantine.py",
            *(f"tests/buffer/wire/test_{name}.py" for name in ("server", "scale")),
            "tests/actors/supervise/test_accept.py",
        ),
    ),
    "split": Area(("buffer/wire/batches.py",), ("tests/buffer/wire/test_split.py", "tests/buffer/wire/test_server.py")),
    "algorithms": Area(
        ("learner/algorithms/*",),
        ("tests/learner/algorithms", "tests/learner/critic/test_gae.py", "tests/learner/train"),
    ),
    "train": Area(("learner/train/*",), ("tests/learner/train", "tests/learner/lora")),
    "weights": Area(("learner/weights/plan.py", "learner/weights/buckets.py"), ("tests/learner/weights",)),
    "scheduling": Area(
        ("rollout/engine/scheduling/*",),
        tuple(
            f"tests/rollout/engine/test_{name}.py"
            for name in ("blocks", "ends", "joined_requests", "plain_steps", "stamps")
        ),
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
        "pytest_add_cli_args": [*ARGUMENTS, *(["--lane", lane] if lane else [])],
        "timeout_constant": ["40"],  # seconds more than the tests took, of which `timeout_multiplier` is a multiple
        "timeout_multiplier": ["3"],
    }
    rows = (f"{name} =\n" + "\n".join(f"    {value}" for value in values) for name, values in lists.items())
    return "[mutmut]\n" + "\n".join([*rows, *PLAIN_SETTINGS, ""])


def tracked() -> list[str]:
    return subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()


def sample(one_in: int) -> list[str]:
    """Patterns of the names of the mutants that are tried."""
    return [f"*__mutmut_{number}" for number in range(17 % one_in, LARGEST, one_in)]


class Tried(NamedTuple):
    """A mutant: what became of it (killed, survived, timeout, no tests, ...) and, unless it was killed, its diff."""

    outcome: str
    diff: str

    @property
    def killed(self) -> bool:
        return self.outcome in ("killed", "timeout")


def tried(area: Area, lane: str | None, one_in: int, jobs: int) -> dict[str, Tried]:
    """Return each tried mutant of the area by its name."""
    with tempfile.TemporaryDirectory() as folder:
        for name in tracked():
            target = Path(folder, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
        Path(folder, "setup.cfg").write_text(settings(area, lane))
        mutants, plugin = Path(folder, "mutants"), Path(folder, "plugin")
        mutants.mkdir()  # Python would remember that a folder of PYTHONPATH is absent
        plugin.mkdir()
        for name in ("reached.py", "sitecustomize.py"):
            (plugin / name).write_bytes(REACHED.read_bytes())
        paths = {"PYTHONPATH": f"{plugin}:{mutants}", "MUTANT_HITS": str(plugin / "hits.txt")}
        return run(folder, os.environ | paths, ["--max-children", str(jobs), *sample(one_in)])


def run(folder: str, environment: dict[str, str], flags: list[str]) -> dict[str, Tried]:
    """Run mutmut in `folder`, and read what it found."""
    mutmut = str(Path(sys.executable).with_name("mutmut"))

    def answer(*words: str) -> str:
        return subprocess.check_output([mutmut, *words], cwd=folder, env=environment, text=True)

    if code := subprocess.run([mutmut, "run", *flags], cwd=folder, env=environment).returncode:
        raise SystemExit(f"mutmut ended with exit code {code}")
    found = {}
    for name, outcome in re.findall(r"^\s+(\S+): (.+)$", answer("results", "--all", "true"), re.MULTILINE):
        if outcome != "not checked":
            found[name] = Tried(outcome, "" if Tried(outcome, "").killed else answer("show", name))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.partition("\n")[0])
    parser.add_argument("areas", nargs="*", metavar="AREA", help=f"of {', '.join(AREAS)}; all if none is given")
    parser.add_argument("--lane", choices=("fast", "long"), help="only the tests of this lane")
    parser.add_argument("--one-in", type=int, default=10, metavar="N", help="try one mutant in N, 10 if not given")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="mutants tried at a time")
    flags = parser.parse_args()
    if unknown := [area for area in flags.areas if area not in AREAS]:
        parser.error(f"{unknown[0]}: no such area; there are {', '.join(AREAS)}")
    rows, survivors = [], []
    for name in flags.areas or AREAS:
        found = tried(AREAS[name], flags.lane, flags.one_in, flags.jobs).values()
        survivors += [mutant.diff for mutant in found if not mutant.killed]
        killed, late = sum(mutant.killed for mutant in found), sum(mutant.outcome == "timeout" for mutant in found)
        rows.append((name, len(found), killed, late, 100 * killed / max(len(found), 1)))
    print("\nnot killed:", *survivors, sep="\n")
    print(f"\n{'area':<12}{'mutants':>8}{'killed':>8}{'timeouts':>10}{'share':>9}")
    for row in rows:
        print("{:<12}{:>8}{:>8}{:>10}{:>8.1f}%".format(*row))


if __name__ == "__main__":
    main()
