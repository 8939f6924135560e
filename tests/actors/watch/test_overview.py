"""A run at a glance: alive, dead, not begun, silent; figures, rows of tables, cost."""

from pathlib import Path

import pytest

from actors.watch.metrics_log import Records
from actors.watch.overview import SERVER_COLUMNS, look_over
from tests.harness.watched import append, look, make_config, record, state

NOW = 2e9


def test_a_live_run(tmp_path: Path) -> None:
    config = make_config(tmp_path, "log.price_per_gpu_hour=2.5")
    run = config.run.path
    append(run, *(record(version) for version in range(1, 21)), look(NOW - 600, 20), look(NOW, 20))
    seen = look_over(config, Records(run / "metrics.jsonl"), state(), NOW, answers=True)
    assert (seen.status, seen.version, seen.versions) == ("running", 20, 40)
    assert seen.figures == {
        "version": "20 / 40",
        "reward, last 20": f"{0.2 + 0.5 * 10.5 / 40:.3f}",
        "learner waits": "62 %",
        "tokens/s": "500",
        "age, mean": "1.5",
        "servers": "1 / 2",
        "time left": "0:03:20",
        "GPU hours": "0.5",
        "cost": "1.25",
        "cost at the end": "1.67",
    }
    assert seen.waits == [("learner-0", "rollout-0", "3.2 s", "batch 7 has 20 of 32 groups")]
    rows = [dict(zip(SERVER_COLUMNS, row, strict=True)) for row in seen.servers]
    assert rows[0] | {"why not more": ""} == {
        "server": "rollout-0", "version": "6", "leases": "12", "tokens/s": "640", "running": "190", "places": "200",
        "waiting": "4", "KV use": "80 %", "preempted": "–", "parked": "–", "last message": "0.1 s ago",
        "why not more": "",
    }  # fmt: skip
    assert rows[1]["last message"] == "240.0 s ago (lost)" and rows[1]["tokens/s"] == "–"
    assert dict(seen.processes)["learner"]["wait"] == pytest.approx(0.62)
    assert dict(seen.processes)["rollout-0"]["generating"] == pytest.approx(0.95)
    assert seen.failures == [('reward: KeyError "answer"', 4)]
    assert any("rollout-1 is lost" in alert.text for alert in seen.alerts)


@pytest.mark.parametrize("records", [0, 3])
def test_a_run_whose_buffer_is_silent(tmp_path: Path, records: int) -> None:
    config = make_config(tmp_path)
    append(config.run.path, *(record(version) for version in range(1, records + 1)))
    seen = look_over(config, Records(config.run.path / "metrics.jsonl"), None, NOW)
    assert (seen.status, seen.version, seen.waits, seen.servers) == ("silent", records, [], [])
    assert "does not answer" in seen.summary and "time left" not in seen.figures
    if records:
        assert f"actors launch {config.run.path / 'config.yaml'}." in seen.advice
        assert [alert.level for alert in seen.alerts][:1] == ["bad"]
    else:
        assert seen.advice.startswith("No version is trained yet")


def test_a_run_without_a_record_says_who_waits(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    seen = look_over(config, Records(config.run.path / "metrics.jsonl"), state(), NOW, answers=True)
    assert seen.status == "waiting" and "learner-0 waits for rollout-0" in seen.advice


def test_a_run_that_ended(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append(config.run.path, *(record(version) for version in range(1, 41)))
    seen = look_over(config, Records(config.run.path / "metrics.jsonl"), state(), NOW, ended="finished at noon")
    assert (seen.status, seen.summary, seen.waits) == ("ended", "finished at noon", [])
    assert not any("lost" in alert.text for alert in seen.alerts)
