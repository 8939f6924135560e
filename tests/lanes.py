"""`python -m tests.lanes [COMMIT]`: prints how many tests each lane has, and which tests of COMMIT are no longer in any
lane.

The names of tests are compared without their parameters, so a test with other parameters counts as the same test. The
last table lists tests that lost parameters.
"""

import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from configs.inner_command import inner_words

ROOT = Path(__file__).parents[1]


def collected(root: Path, *flags: str) -> Counter[str]:
    """Return the names of tests in the tree at `root`, each with its number of parameters."""
    line = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *flags]
    done = subprocess.run(line, cwd=root, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} in {root}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return Counter(row.partition("[")[0].partition("@")[0] for row in done.stdout.splitlines() if "::" in row)


def before(commit: str) -> Counter[str]:
    """Tests that `make test` ran at `commit`."""
    with tempfile.TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            return collected(tree, "-m", "not gpu")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def main(commit: str | None) -> None:
    fast, long = collected(ROOT, "--lane", "fast"), collected(ROOT, "--lane", "long")
    for name, tests in (("fast", fast), ("long", long)):
        print(f"{name} lane: {tests.total():,} tests, {len(tests):,} names")
    if commit is None:
        return
    old, now = before(commit), fast + long
    print(f"{commit}: {old.total():,} tests, {len(old):,} names")
    left = sorted(name for name in old if name in long)
    print(f"\n{len(left)} names of {commit} are in the long lane now, in all or some of their parameters:")
    print("\n".join(f"  {name}: {long[name]} long, {fast[name]} fast" for name in left))
    gone = sorted(name for name in old if name not in now)
    print(f"\n{len(gone)} names of {commit} are in neither lane:")
    print("\n".join(f"  {name} ({old[name]})" for name in gone))
    fewer = sorted(name for name in old if 0 < now[name] < old[name])
    print(f"\n{len(fewer)} names have fewer parameters than at {commit}:")
    print("\n".join(f"  {name}: {old[name]} -> {now[name]}" for name in fewer))


if __name__ == "__main__":
    inner_words(optional=("COMMIT",))
    main(sys.argv[1] if len(sys.argv) > 1 else None)
