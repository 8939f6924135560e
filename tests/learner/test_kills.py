"""Killed at random moments while it writes a checkpoint, the learner always resumes, and its losses are unchanged.

The fast test has 2 kills, the long one 8. HEADRACE_KILLS=50 sets more, HEADRACE_KILLS_SEED other moments.
"""

import json
import os
from pathlib import Path

import pytest

from configs.checkpoint_files import fault, folder_of
from tests.harness import nursery, rank
from tests.harness.world import FORKS, tiny_model

MANY = int(os.environ.get("HEADRACE_KILLS", "8"))
SEED = int(os.environ.get("HEADRACE_KILLS_SEED", "0"))


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("kills", [2, pytest.param(MANY, marks=pytest.mark.long)])
def test_killed_while_writing_it_resumes(tmp_path: Path, mesh, kills: int) -> None:
    tiny_model(tmp_path / "model")
    log = tmp_path / "nursery.log"
    forking = FORKS.Process(target=nursery.run, args=(tmp_path, kills, SEED, log))
    forking.start()
    try:
        forking.join(240 + 10 * kills)
        assert forking.exitcode == 0, log.read_text()[-3000:]
    finally:
        forking.kill()
        forking.join()
    found = json.loads((tmp_path / "kills.json").read_text())
    assert len(found["kills"]) == kills
    hit = sum(bool(kill["writing"]) for kill in found["kills"])
    assert hit >= kills // 2, f"only {hit} of {kills} kills hit a checkpoint during its writing"
    assert fault(folder_of(tmp_path / "checkpoints", found["stop"])) is None
    lines = [json.loads(line) for line in (tmp_path / "losses.jsonl").read_text().splitlines()]
    assert {version for version, _, _ in lines} == set(range(found["stop"]))
    (tmp_path / "whole").mkdir()
    (tmp_path / "model").rename(tmp_path / "whole" / "model")
    whole = rank.run(tmp_path / "whole", mesh, 0, 0, found["stop"], [24])["records"]
    for version, loss, norm in lines:  # also of those trained twice, before and after a kill
        assert (loss, norm) == (whole[version]["loss"], whole[version]["gradient/norm"]), version
    print(f"{kills} kills, {hit} in the writing, {len(lines)} steps for {found['stop']} versions")
