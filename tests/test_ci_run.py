"""`.ci/run` with stand-ins for make and sleep: a mirror that is away costs the test in a browser, nothing else."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = """#!/bin/sh
echo "make $* ${HEADRACE_BROWSER-}" >> LOG
[ "$1" != browser ] || [ "$(grep -c 'make browser' LOG)" -gt AWAY ]
"""


COMMITS = int(subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT, text=True))
SHARD = f"SHARD={COMMITS % 5 + 1}/5"


def ran(folder: Path, away: int) -> tuple[list[str], str]:
    """What was called, and what was said, while a mirror is away for so many tries."""
    log = folder / "log"
    for name, text in (("make", MAKE), ("sleep", '#!/bin/sh\necho "sleep $1" >> LOG\n')):
        (folder / name).write_text(text.replace("LOG", str(log)).replace("AWAY", str(away)))
        (folder / name).chmod(0o755)
    env = {key: value for key, value in os.environ.items() if key != "HEADRACE_BROWSER"}
    env["PATH"] = f"{folder}:{env['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env=env, capture_output=True, text=True, check=True)
    return log.read_text().splitlines(), done.stdout


@pytest.mark.parametrize("away", [0, 1, 4])
def test_the_browser_is_required_once_it_is_there(tmp_path: Path, away: int) -> None:
    calls, said = ran(tmp_path, away)
    commands = ("check", "docs", "test", f"test-long {SHARD}")
    assert calls[-4:] == [f"make {command} required" for command in commands] and said == ""
    assert sum(call.startswith("make browser") for call in calls) == away + 1


def test_without_a_mirror_all_else_is_tested_and_it_is_said(tmp_path: Path) -> None:
    calls, said = ran(tmp_path, 1000)
    pauses = [int(call.split()[1]) for call in calls if call.startswith("sleep")]
    assert pauses == sorted(pauses) and sum(pauses) == 300
    assert calls[-4:] == ["make check ", "make docs ", "make test ", f"make test-long {SHARD} "]
    assert "skipped" in said and len(said.splitlines()) == 1
