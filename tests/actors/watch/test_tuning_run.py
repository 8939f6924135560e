"""Status, page and report of a run of supervised fine-tuning, which has no buffer to ask."""

import json
import os
from pathlib import Path

import pytest

from actors.report import summary
from actors.watch import status, tuning
from actors.watch.metrics_log import Records
from actors.watch.overview import look_over
from buffer.store.lock import locked
from configs.load import load, write
from configs.schema import Config
from configs.sft import LOCK
from tests.harness.watched import append

NOW = 2e9


@pytest.fixture
def config(tmp_path: Path) -> Config:
    """A run with 10 of 20 versions, whose held-out loss rises again."""
    words = [f"run.folder={tmp_path}", "run.name=toy", "run.versions=20", "model.path=m", "data.train=t.jsonl"]
    made = load([f"--{word}" for word in [*words, "data.eval=h.jsonl", "sft.rows=8"]])
    write(made, made.run.path / "config.yaml")
    versions = [
        {"version": v, "loss": 4.0 / v, "epoch": v / 5, "tokens": 500.0, "tokens_trained": 90.0, "time": NOW - 10 + v,
         "time/version_s": 1.0, "time/train_s": 0.9}
        for v in range(1, 11)
    ]  # fmt: skip
    held = [
        {"version": v, "eval/due": v, "eval/version": v, "eval/eval/loss": loss}
        for v, loss in ((0, 4.5), (5, 1.25), (10, 1.5))
    ]
    append(made.run.path, *versions, *held)
    return made


def overview(config: Config, live: bool, ended: str = ""):
    return look_over(config, Records(config.run.path / "metrics.jsonl"), None, NOW, ended, live)


def test_a_live_run_shows_its_loss(config: Config) -> None:
    seen = overview(config, live=True)
    assert (seen.status, seen.version, seen.alerts) == ("running", 10, [])
    assert seen.figures == {
        "version": "10 / 20",
        "loss": "0.400",
        "epoch": "2.00",
        "tokens/s": "500",
        "time left": "0:00:10",
    }
    assert seen.advice.startswith("The loss on eval rises again, 1.500 at version 10, 1.250 at version 5: take")


def test_a_dead_run_says_how_it_goes_on(config: Config) -> None:
    seen = overview(config, live=False)
    command = f"python -m learner sft {config.run.path / 'config.yaml'}"
    assert seen.status == "silent" and seen.advice.endswith(command) and "time left" not in seen.figures
    assert not any("buffer" in text for text in (seen.summary, *(alert.text for alert in seen.alerts)))


def test_status_knows_the_process(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    run = config.run.path
    assert status.main([str(run)]) == 1
    assert f"Go on with: python -m learner sft {run / 'config.yaml'}" in capsys.readouterr().out
    held = locked(run / LOCK)
    try:
        assert tuning.tuner(config, run) == str(os.getpid()) and status.main([str(run)]) == 0
        said = capsys.readouterr().out
        assert f"process {os.getpid()} trains it" in said and "loss 0.4" in said and "eval: loss 1.500" in said
    finally:
        os.close(held)
    append(run, *({"version": v, "loss": 0.2} for v in range(11, 21)))
    assert status.main([str(run)]) == 0 and "finished at" in capsys.readouterr().out


def test_the_report_has_the_losses(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    assert summary.main([str(config.run.path)]) == 0
    said = capsys.readouterr().out
    assert "loss: first 5 versions 1.827, last 5 versions 0.517" in said and "largest age" not in said
    html = (config.run.path / "report.html").read_text()
    data = json.loads(html.partition('<script type="application/json" id="data">')[2].partition("</script>")[0])
    assert data["evaluations"][-1] == {"version": 10, "figures": {"eval loss": 1.5}}
    assert data["columns"]["loss"][-1] == 0.4 and data["columns"]["tokens_trained"]
