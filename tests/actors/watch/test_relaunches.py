"""Figures, advice and alerts over starts, on the records of a real run (`relaunched.jsonl`, times to the millisecond).

Version 1 waited 52 s for vLLM. The learner was killed after version 2 and started again: 31 s passed, of which
version 3 took 2. The server was killed after version 8: version 9 waited 67 s for another vLLM. All others took about
a second.
"""

import os
import shutil
from pathlib import Path

import pytest

from actors.live.watcher import Watcher
from actors.watch import figures
from actors.watch.advice import Situation, recommend, situation
from actors.watch.metrics_log import Records
from actors.watch.overview import look_over
from actors.watch.run_state import find_run, fullness
from configs.load import load, write
from configs.schema import Config
from tests.harness.watched import append, look, make_config, record, state

RECORDED = Path(__file__).parent / "relaunched.jsonl"


@pytest.fixture
def config(tmp_path: Path) -> Config:
    made = make_config(tmp_path, "batch.max_staleness=4")
    shutil.copy(RECORDED, made.run.path / "metrics.jsonl")
    return made


@pytest.fixture
def records(config: Config) -> Records:
    return Records(config.run.path / "metrics.jsonl")


def test_times_of_starts_count_as_no_usual_ones(records: Records) -> None:
    assert [one["version"] for one in figures.recent(records)] == [2, 4, 5, 6, 7, 8, 10, 11, 12]
    pace_s = figures.pace_s(records)
    assert pace_s == pytest.approx(0.78, abs=0.05), "the mean of all would be 10.9 s"
    assert figures.time_left(records, 100) == "0:01:09"


def test_no_advice_comes_from_the_start_of_vllm(config: Config, records: Records) -> None:
    now = situation(config, records, state(servers={}))
    assert now.waits < 0.4, "with the starts it is .93"
    assert "max_staleness" not in recommend(now)


def test_the_page_s_age_is_of_the_last_versions_and_not_of_the_last_batch(config: Config) -> None:
    (config.run.path / "metrics.jsonl").unlink()
    append(config.run.path, *(record(version, **{"age/mean": float(version % 2)}) for version in range(1, 42)))
    seen = look_over(config, Records(config.run.path / "metrics.jsonl"), state(servers={}), 2e9, answers=True)
    assert seen.figures["age, mean"] == "0.5"


@pytest.mark.parametrize("prog", ["python -m actors report", "python -m actors status", "python -m actors watch"])
def test_help_of_a_command_that_looks_at_a_run_is_short(prog: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The keys of the run file are those of `python -m configs --keys`, which it names."""
    with pytest.raises(SystemExit) as end:
        find_run(["--help"], prog)
    shown = capsys.readouterr().out
    assert end.value.code == 0 and shown.startswith(f"usage: {prog} RUN") and len(shown.splitlines()) < 8
    assert "`python -m configs --keys`" in shown


def test_a_version_that_always_takes_so_long_is_no_start(config: Config) -> None:
    (config.run.path / "metrics.jsonl").unlink()
    slow = {"time/version_s": 900.0, "time/wait_s": 800.0}
    append(config.run.path, *(record(version, **slow, time=1e9 + 900.0 * version) for version in range(1, 9)))
    records = Records(config.run.path / "metrics.jsonl")
    assert len(figures.recent(records)) == 7 and figures.pace_s(records) == 900.0
    assert situation(config, records, None).waits == pytest.approx(800 / 900)


def last_time(records: Records) -> float:
    return float(records.by_version[12]["time"])


def alerts_of(config: Config, records: Records, now: float, launched: float) -> list[str]:
    seen = look_over(config, records, state(servers={}), now, answers=True, launched=launched)
    return [alert.text for alert in seen.alerts if alert.text.startswith("no version for")]


def test_the_time_between_two_launches_is_no_stall(config: Config, records: Records) -> None:
    end = last_time(records)
    assert alerts_of(config, records, end + 233.0, launched=end + 220.0) == []
    assert alerts_of(config, records, end + 233.0, launched=0.0)[0].startswith("no version for 233 s")
    (late,) = alerts_of(config, records, end + 10_000.0 + 300.0, launched=end + 10_000.0)
    assert late.startswith("no version for 300 s, one usually takes 0.8 s"), "a start that hangs is one"


def test_a_learner_that_was_started_again_alone_begins_anew_too(config: Config, records: Records) -> None:
    """Its first look at the servers comes after a pause; looks that go on without versions are a stall."""
    end, every_s = last_time(records), config.log.servers_every_s
    append(config.run.path, *(look(end + 500.0 + every_s * number, 12) for number in range(5)))
    records = Records(config.run.path / "metrics.jsonl")
    assert figures.seconds_stalled(records, end + 580.0, 0.0, every_s) == pytest.approx(80.0)
    append(config.run.path, *(look(end + 500.0 + every_s * number, 12) for number in range(5, 40)))
    records = Records(config.run.path / "metrics.jsonl")
    now = end + 500.0 + every_s * 40
    assert figures.seconds_stalled(records, now, 0.0, every_s) == pytest.approx(now - end)
    assert figures.seconds_stalled(Records(config.run.path / "none"), 1e9, 0.0, every_s) is None


@pytest.mark.parametrize("parked", [0.5, 0.95, 1.0])
def test_one_server_is_never_one_too_many(parked: float) -> None:
    alone = Situation(versions=50, waits=0.02, parked=parked, servers=1, max_staleness=4, gradient=0.1, gain=0.1)
    assert recommend(alone) == "The learner waits 2 % of the time: nothing has to change."
    assert "one server fewer would do." in recommend(Situation(**(alone.__dict__ | {"servers": 2, "parked": 0.95})))


def test_a_server_whose_places_are_parked_is_not_limited_by_its_places() -> None:
    """Also in the moments in which it does not ask."""
    now = state()
    stats = {"running": 2.0, "places": 128.0, "places_taken": 2.0, "parked": 126.0, "limit_sequences": 128.0}
    now.servers["rollout-0"]["stats"] = stats
    assert fullness(now, "rollout-0") == "running 2 of 128: no more work is admitted"


def test_the_page_takes_up_what_a_relaunch_changes(config: Config) -> None:
    watcher = Watcher(config, config.run.path, ["--log.price_per_gpu_hour=2.5"])
    assert watcher.overview.figures["version"] == "12 / 40"
    again = load([str(config.run.path / "config.yaml"), "--run.versions=4000", "--buffer.address=tcp://127.0.0.1:7777"])
    write(again, config.run.path / "config.yaml")
    os.utime(config.run.path / "config.yaml", (2e9, 2e9))
    watcher.look()
    assert watcher.overview.figures["version"] == "12 / 4000" and watcher.overview.versions == 4000
    assert watcher.config.buffer.address == "tcp://127.0.0.1:7777" and watcher.config.log.price_per_gpu_hour == 2.5
    (config.run.path / "config.yaml").write_text("run: {versions: none}")
    watcher.look()
    assert watcher.overview.versions == 4000, "a file that is refused changes nothing"
