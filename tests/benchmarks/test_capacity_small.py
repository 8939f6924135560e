"""`python -m benchmarks.capacity --small` runs to its end: the real buffer, its crowds, a kill."""

import json
import subprocess
import sys
from pathlib import Path

FIGURES = ("groups", "tokens", "Put, p50", "Put, p99", "Put during a Take", "heartbeat", "memory", "open files")


def test_the_benchmark_of_many_clients_works(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.capacity", "--small", "--share-prompts", "--write"]
    done = subprocess.run([*command, str(tmp_path / "capacity.json")], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "capacity.json").read_text())
    assert result["size"]["servers"] == 64 and result["command"].endswith("--small --share-prompts")
    values = {row["what"]: row["value"] for row in result["rows"]}
    for phase in ("as fast as it goes", "at a tenth of that", "at a tenth, a batch taken over and over"):
        for figure in FIGURES:
            assert any(what.startswith(phase) and figure in what for what in values), (phase, figure)
    assert values["as fast as it goes: groups"] > 0
    assert values["killed and serving again"] > 0
    assert all(row["what"] in done.stdout for row in result["rows"])
