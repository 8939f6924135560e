"""Killed at random moments while it writes a checkpoint, the learner always resumes, and its losses are unchanged.

8 kills; HEADRACE_KILLS=50 for the long form, HEADRACE_KILLS_SEED for other moments.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from learner.saved.manifest import fault, folder_of
from tests.harness import rank
from tests.harness.world import ROOT, tiny_model

KILLS = int(os.environ.get("HEADRACE_KILLS", "8"))
SEED = os.environ.get("HEADRACE_KILLS_SEED", "0")


def test_killed_while_writing_it_resumes(tmp_path: Path, mesh) -> None:
    tiny_model(tmp_path / "model")
    command = [sys.executable, "-m", "tests.harness.nursery", str(tmp_path), str(KILLS), SEED]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60 + 10 * KILLS)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == KILLS
    hit = sum(bool(kill["writing"]) for kill in found["kills"])
    assert hit >= KILLS // 2, f"only {hit} of {KILLS} kills hit a checkpoint in the writing"
    assert fault(folder_of(tmp_path / "checkpoints", found["stop"])) is None
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert {version for version, _, _ in lines} == set(range(found["stop"]))
    (tmp_path / "whole").mkdir()
    (tmp_path / "model").rename(tmp_path / "whole" / "model")
    whole = rank.run(tmp_path / "whole", mesh, 0, 0, found["stop"], [24])["records"]
    for version, loss, norm in lines:  # also of those trained twice, before and after a kill
        assert (loss, norm) == (whole[version]["loss"], whole[version]["gradient/norm"]), version
    print(f"{KILLS} kills, {hit} in the writing, {len(lines)} steps for {found['stop']} versions")
