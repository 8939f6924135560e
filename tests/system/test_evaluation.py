"""Evaluation while a real run trains, with the real vLLM, and SIGKILLs in the middle of evaluations."""

import json
import subprocess
import sys

import pytest

from tests.harness.toy import ROOT, Run, Toy, python
from tests.system.test_run import audit, until

pytestmark = [pytest.mark.long, pytest.mark.vllm, pytest.mark.timeout(900)]


def evaluating(run: Run, version: int) -> bool:
    """Whether the server has begun with a version from `version` on."""
    begun = [line.partition("evaluating version ")[2] for line in run.log("rollout-0").splitlines()]
    return any(int(words.split()[0]) >= version for words in begun if words)


def test_each_evaluation_has_one_result_of_one_version_whatever_is_killed(toy: Toy) -> None:
    """SIGKILL to the buffer in the evaluation of version 0, to the server in that of 4, to the learner as it waits for
    that of the last version. An evaluation is left out once the next one is due. `max_staleness` 2 stops the learner
    before that while the server is away."""
    versions, run = 8, toy.run("evaluated")
    data = toy.folder / "data" / "eval.parquet"
    sets = [f"--data.eval.many.path={data}", "--data.eval.many.samples=80", "--data.eval.many.k=[1, 8]"]
    sets += [f"--data.eval.greedy.path={data}", "--data.eval.greedy.limit=6", "--eval.every=4"]
    settings = toy.settings(
        "evaluated", *sets, f"--run.versions={versions}", "--learner.checkpoint_every=2", "--batch.max_staleness=2"
    )
    command = [sys.executable, "-m", "actors", "launch", *settings]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
        try:
            until(lambda: evaluating(run, 0), "evaluation of version 0")
            assert run.kill("buffer") == 1
            until(lambda: evaluating(run, 4), "evaluation of version 4")
            assert run.kill("rollout") == 1
            until(lambda: evaluating(run, 8), "evaluation of the last version")
            assert run.kill("learner") >= 1
            output, _ = launcher.communicate(timeout=480)
        finally:
            launcher.kill()
    assert launcher.returncode == 0, output[-4000:]
    audit(run, versions, groups=4, staleness=2)
    found = run.evaluations()
    assert [record["eval/due"] for record in found] == [0, 4, 8], "each once, in order"
    made = [record["eval/version"] for record in found]
    assert made[0] == 0 and 4 <= made[1] < 8 and made[2] == 8
    for record in found:
        assert record["eval/many/version"] == record["eval/greedy/version"] == record["eval/version"]
        assert record["eval/many/problems"] == 12 and record["eval/greedy/problems"] == 6
        assert record["eval/many/failed"] == record["eval/greedy/failed"] == 0
        assert 0 <= record["eval/many/pass^8"] <= record["eval/many/mean@80"] <= record["eval/many/pass@8"] <= 1
        assert record["eval/many/mean@80"] == pytest.approx(record["eval/many/pass@1"])
    rows = run.query("select due, state, version, attempts, samples from evaluations order by due")
    assert [row[1] for row in rows] == ["done"] * 3 and [row[2] for row in rows] == made and rows[1][3] == 2
    kept = json.loads(rows[0][4])
    assert (len(kept["many"]), len(kept["greedy"])) == (12, 6) and kept["greedy"][0]["answer"]
    shown = python("actors", "report", run.path).stdout
    assert "many: mean@80" in shown and "greedy: mean@1" in shown
    page = (run.path / "report.html").read_text()
    assert "many pass@8" in page and "Evaluation while training" in page
