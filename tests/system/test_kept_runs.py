"""Servers, buffer and learner are killed in the middle of evaluations, and a reward server while answers are scored.

Stand-ins for vLLM and the model (`failures/stand_ins.py`); everything else except Ray is real. The same with the real
vLLM: `test_evaluation.py` and `test_reward_server.py`, in the long lane.
"""

import asyncio
import json
from pathlib import Path

import pytest

from buffer.wire.sample import Sample
from tests.harness.ports import free_port
from tests.system.failures.cases import Case
from tests.system.failures.stand_ins import EvaluationLog, liking
from tests.system.failures.story import run_file
from tests.system.kept import KeptRun

pytestmark = pytest.mark.timeout(300)


def test_each_evaluation_has_one_result_of_one_version_whatever_is_killed(tmp_path: Path) -> None:
    """SIGKILL to the buffer in the evaluation of version 0, to the server in the evaluation of version 4, and to the
    learner while it waits for the evaluation of the last version."""
    rows = [{"problem": f"{number} +", "answer": str(number)} for number in range(6)]
    (tmp_path / "eval.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "eval.jsonl")
    sets = {"many": {"path": path, "samples": 8, "k": [1, 8]}, "few": {"path": path, "limit": 4}}
    settings = {
        "run": {"versions": 8},
        "data": {"eval": sets},
        "eval": {"every": 4},
        "learner": {"checkpoint_every": 2},
        "buffer": {"keep": "all"},
    }
    run = KeptRun(run_file(Case("evaluated", "", 0, "", settings=settings), tmp_path))
    (tmp_path / "calm").unlink()  # the engine takes its time, so that kills hit unfinished evaluations

    def evaluating(version: int) -> bool:
        begun = [line.partition("evaluating version ")[2] for line in run.log("rollout-0").splitlines()]
        return any(int(words.split()[0]) >= version for words in begun if words)

    async def scene() -> None:
        await run.until(lambda: evaluating(0), "evaluation of version 0")
        run.kill("buffer")
        await run.until(lambda: evaluating(4), "evaluation of version 4")
        run.kill("rollout")
        await run.until(lambda: evaluating(8), "evaluation of the last version")
        run.kill("learner")

    assert asyncio.run(run.run(scene())) == 0, run.terminal.getvalue()
    records = EvaluationLog(tmp_path / "evaluations.jsonl").records()
    assert [record["due"] for record in records] == [0, 4, 8], "each once, in order"
    made = [record["version"] for record in records]
    assert made[0] == 0 and 4 <= made[1] < 8 and made[2] == 8
    for record in records:
        many, few = record["figures"]["many"], record["figures"]["few"]
        assert (many["problems"], few["problems"]) == (6, 4) and many["failed"] == few["failed"] == 0
        assert 0 <= many["pass^8"] <= many["mean@8"] <= many["pass@8"] <= 1
    stored = run.query("select state, version, attempts, samples from evaluations order by due")
    assert [row[:2] for row in stored] == [("done", version) for version in made] and stored[1][2] == 2
    kept = json.loads(stored[0][3])
    assert (len(kept["many"]), len(kept["few"])) == (6, 4) and kept["few"][0]["answer"]
    assert run.query("select version, trained from batches order by version") == [(v, 1) for v in range(8)]
    for name in ("buffer", "rollout-0", "learner"):
        assert run.log(name).count("failed: exit code 137") == 1, name


def test_a_killed_reward_server_costs_time_and_no_sample(tmp_path: Path) -> None:
    """Scoring waits for the restart, and every sample gets its own reward."""
    versions, port, gate = 16, free_port(), tmp_path / "gate-reward"
    liked = {"function": "reward_model", "weight": 0.01, "name": "liked", "kwargs": {"template": "{{ answer }}"}}
    reward = {
        "function": [{"function": f"{tmp_path}/user.py:score"}, liked],
        "model": "none",
        "servers": 1,
        "port": port,
    }
    settings = {
        "run": {"versions": versions},
        "reward": reward,
        "rollout": {"attempts": 1},
        "buffer": {"keep": "all"},
    }
    run = KeptRun(run_file(Case("rewarded", "", 0, "", settings=settings), tmp_path))

    async def scene() -> None:
        await run.until(lambda: run.trained() >= 3, "third version")
        waits = run.log("rollout-0").count("scoring waits for a reward server at")
        gate.touch()
        run.kill("reward")
        await run.until(lambda: run.log("rollout-0").count("scoring waits for a reward server at") > waits, "wait")
        assert run.trained() < versions
        gate.unlink()

    assert asyncio.run(run.run(scene())) == 0, run.terminal.getvalue()
    assert run.trained() == versions
    assert "--- reward-0 failed: exit code 137" in run.log("reward-0")
    assert run.log("reward-0").count("--- reward-0 started") == 2
    assert (run.config.run.path / "logs" / "reward-0.progress").exists()
    assert run.query("select item from items where state = 'dropped'") == []
    rows = run.query("select data_of(segment, position, samples.bytes) from items join samples using (item)")
    samples = [Sample.unpack(data) for (data,) in rows]
    assert len(samples) >= versions * 16 and len({sample.metrics["liked"] for sample in samples}) > 20
    for sample in samples:
        assert sample.metrics["liked"] == pytest.approx(liking(sample.answer))
        assert sample.reward == pytest.approx(len(sample.answer) % 2 + 0.01 * sample.metrics["liked"])
