"""metrics.jsonl: one record per version, also after a restart; trackers never delay it."""

import json
import logging
import random
import sys
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest

from buffer.wire.protocol import EvaluationResult
from configs.writing import WriteError
from learner.record import trackers
from learner.record.metrics import Metrics, read
from tests.harness.tracking import Swanlab, Wandb


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_record(tmp_path: Path) -> None:
    clock = Clock()
    metrics = Metrics(tmp_path / "run" / "metrics.jsonl", clock=clock)
    for _ in range(2):
        with metrics.span("train"):
            clock.now += 1.5
    clock.now += 1.0
    metrics.log(1, {"tokens": 800.0, "loss": float("nan")})
    clock.now += 2.0
    metrics.log(2, {})
    first, second = read(tmp_path / "run" / "metrics.jsonl")
    assert (first["version"], first["time/train_s"], first["time/version_s"], first["tokens_per_s"]) == (
        1,
        3.0,
        4.0,
        200.0,
    )
    assert "loss" not in first and first["memory/host_gib"] > 0
    assert "time/train_s" not in second and second["time/version_s"] == 2.0


def test_a_span_that_fails_is_timed(tmp_path: Path) -> None:
    clock = Clock()
    metrics = Metrics(tmp_path / "metrics.jsonl", clock=clock)
    with pytest.raises(OSError), metrics.span("wait"):
        clock.now += 1
        raise OSError
    metrics.log(1, {})
    assert read(tmp_path / "metrics.jsonl")[0]["time/wait_s"] == 1


def test_each_version_appears_once_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"version": version, "loss": 0.0}) + "\n" for version in (1, 2, 3, 4)]
    path.write_text("".join(lines) + '{"version": 5, "lo')  # killed while writing
    metrics = Metrics(path)
    metrics.log(3, {"loss": 1.0})  # restored 2
    metrics.log(4, {"loss": 1.0})
    assert [(record["version"], record["loss"]) for record in read(path)] == [(1, 0.0), (2, 0.0), (3, 1.0), (4, 1.0)]


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    Metrics(None).log(1, {"loss": 1.0})
    assert list(tmp_path.iterdir()) == []


def test_alerts_are_warnings(tmp_path: Path, caplog) -> None:
    with caplog.at_level(logging.WARNING):
        metrics = Metrics(tmp_path / "metrics.jsonl")
        for version in range(7, 30):
            metrics.log(version, {"length/truncated": 0.4})
    warnings = [record.getMessage() for record in caplog.records]
    assert [line.partition(":")[0] for line in warnings] == ["version 7", "version 27"]
    assert "length/truncated is 0.4" in warnings[0]


def test_trackers_get_the_records_and_may_fail_or_hang(tmp_path: Path, caplog, monkeypatch) -> None:
    got, hang = [], threading.Event()

    def broken(folder, run, config):
        raise ModuleNotFoundError("no such service")

    def missing(folder, run, config):
        import nosuchtracker  # noqa: F401

    kinds = {
        "missing": missing,
        "good": lambda *_: nullcontext(got.append),
        "broken": broken,
        "hanging": lambda *_: nullcontext(lambda record: hang.wait()),
    }
    monkeypatch.setattr(trackers, "TRACKERS", kinds)
    monkeypatch.setattr(trackers, "LAST_S", 60.0)
    started = [trackers.Tracker(name, tmp_path, "run", {}) for name in kinds]
    metrics = Metrics(tmp_path / "metrics.jsonl", started)
    with caplog.at_level(logging.WARNING):
        for version in (1, 2):
            metrics.log(version, {"loss": 0.5})
        for tracker in started[:-1]:
            tracker.close()
        monkeypatch.setattr(trackers, "LAST_S", 0.2)
        started[-1].close()
    hang.set()
    assert got == read(tmp_path / "metrics.jsonl") and len(got) == 2
    assert "log.trackers: broken failed" in caplog.text and "no such service" in caplog.text
    assert "nosuchtracker is not installed" in caplog.text and '".[tracking]"' in caplog.text


@pytest.mark.parametrize(
    ("name", "service", "mode"),
    [
        ("wandb", Wandb(key=True), None),
        ("wandb", Wandb(key=False), "offline"),
        ("swanlab", Swanlab(key=True), None),
        ("swanlab", Swanlab(key=False), "offline"),
        ("swanlab", Swanlab(key=True, refused=True), "offline"),
    ],
)
def test_a_service_has_all_records_once_it_is_closed(name, service, mode, tmp_path: Path, caplog, monkeypatch) -> None:
    """It holds them back until it is finished, and the learner ends without exit hooks."""
    monkeypatch.setitem(sys.modules, name, service)
    tracker = trackers.Tracker(name, tmp_path, "run-7", {"run": {"versions": 9}})
    tracker({"version": 3, "loss": 0.5})
    tracker({"version": 4, "loss": 0.25})
    tracker.close()
    told, logged = json.loads((tmp_path / name / "records.json").read_text())
    assert logged == [[3, {"version": 3, "loss": 0.5}], [4, {"version": 4, "loss": 0.25}]]
    assert (told["project"], told["name"], told["mode"]) == ("headrace", "run-7", mode)
    assert told["config"] == {"run": {"versions": 9}}
    offline = f"{name} is offline, its records are kept below {tmp_path / name}, to be sent with `{name} sync`"
    assert (offline in caplog.text) is bool(mode)


def result(due: int, version: int, mean: float = 0.5) -> EvaluationResult:
    return EvaluationResult(due=due, version=version, server="rollout-0", figures={"aime": {"mean@8": mean}})


def test_an_evaluation_has_a_record_of_its_own(tmp_path: Path) -> None:
    path, seen = tmp_path / "metrics.jsonl", []
    metrics = Metrics(path, [seen.append])
    metrics.log(1, {"loss": 1.0})
    metrics.log_evaluations(1, [result(0, 0)])
    metrics.log(2, {})
    first, evaluation, second = read(path)
    assert (first["version"], second["version"]) == (1, 2) and "eval/version" not in first
    assert evaluation == {
        "version": 1,
        "eval/due": 0,
        "eval/version": 0,
        "eval/aime/mean@8": 0.5,
        "eval/aime/version": 0,
    }
    assert seen[1] == evaluation


def test_a_restarted_learner_knows_what_it_recorded(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for version in (1, 2, 3, 4):
        metrics.log(version, {"loss": 1.0})
        metrics.log_evaluations(version, [result(version, version)] if version % 2 == 0 else [])
    again = Metrics(path)
    assert again.evaluations(3) == [2] and again.evaluations(4) == [2, 4]
    again.log(3, {})
    again.log_evaluations(3, [result(4, 4)])
    assert [(record["version"], record.get("eval/due")) for record in read(path)] == [
        (1, None),
        (2, None),
        (2, 2),
        (3, None),
        (3, 4),
    ]


def test_evaluations_are_found_without_reading_all_else(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    Metrics(path).log_evaluations(2, [result(2, 2)])
    with path.open("a") as file:
        file.write("a look that must not be parsed\n" + '{"version": 2, "eval/due": 4')
    assert Metrics(path).evaluations(2) == [2]


def test_the_last_evaluation_is_recorded_by_a_learner_that_only_waits_for_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.log(1, {})
    metrics.log(2, {})
    Metrics(path).log_evaluations(2, [result(2, 2)])
    assert [record["version"] for record in read(path)] == [1, 2, 2]


def test_one_that_was_given_up_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given_up = EvaluationResult(due=4, version=6, server="rollout-0", figures={}, reason="its server was lost 5 times")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    metrics.log_evaluations(7, [given_up])
    assert "the evaluation due at version 4 was given up: its server was lost 5 times" in caplog.text
    assert metrics.evaluations(7) == [4]


LOOK = {"kind": "servers", "time": 5.0, "servers/heard": 2}


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_looks_at_the_servers_outlive_a_learner_that_restores(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    for version in (1, 2, 3):
        metrics.log_servers(LOOK | {"time": float(version)})
        metrics.log(version, {"loss": 0.0})
    again = Metrics(path)
    again.log_servers(LOOK | {"time": 4.0})  # before it knows what it restored
    again.log(2, {"loss": 1.0})
    assert [one.get("version", one.get("time")) for one in lines(path)] == [1.0, 1, 2.0, 3.0, 4.0, 2]
    assert [(record["version"], record["loss"]) for record in read(path)] == [(1, 0.0), (2, 1.0)]


def test_no_line_is_torn_by_a_kill_or_by_two_threads(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"version": 1}) + "\n" + '{"version": 2, "lo')  # killed while writing
    metrics = Metrics(path)
    metrics.log_servers(LOOK)
    assert lines(path) == [{"version": 1}, LOOK]
    wide = LOOK | {f"server/rollout-{number}/running": 1.0 for number in range(1000)}
    writers = [threading.Thread(target=lambda: [metrics.log_servers(wide) for _ in range(30)]) for _ in range(2)]
    for writer in writers:
        writer.start()
    for version in range(2, 40):
        metrics.log(version, {"loss": 1.0})
    for writer in writers:
        writer.join()
    found = lines(path)
    assert len(found) == 2 + 60 + 38 and sum(one == wide for one in found) == 60


def records(path: Path) -> list[tuple[float, float]]:
    return [(record["version"], record["loss"]) for record in read(path)]


def test_a_full_disk_ends_no_training_and_costs_no_record(tmp_path: Path, caplog) -> None:
    path, seen = tmp_path / "metrics.jsonl", list[dict[str, float]]()
    metrics = Metrics(path, [seen.append])
    metrics.log(1, {"loss": 0.5})
    path.rename(tmp_path / "kept")
    path.symlink_to("/dev/full")
    for version in (2, 3):
        metrics.log(version, {"loss": 0.5})
    with pytest.raises(OSError, match="No space left"):
        metrics.log_servers(LOOK)
    with pytest.raises(WriteError, match=r"metrics\.jsonl: No space left on device; make room on its disk"):
        metrics.close()
    (tmp_path / "kept").replace(path)
    metrics.log_servers(LOOK)
    assert records(path) == [(1, 0.5), (2, 0.5), (3, 0.5)] and [one["version"] for one in seen] == [1, 2, 3, 3]
    assert caplog.text.count("make room on its disk; until then the records of versions are kept in memory") == 1


def test_a_learner_that_starts_again_on_a_full_disk_replaces_what_it_repeats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for version in (1, 2):
        Metrics(path).log(version, {"loss": 0.5})
    again = Metrics(path)
    (tmp_path / "metrics.tmp").symlink_to("/dev/full")
    again.log(2, {"loss": 1.0})
    assert records(path) == [(1, 0.5), (2, 0.5)] and not (tmp_path / "metrics.tmp").is_symlink()
    again.log(3, {"loss": 1.0})
    assert records(path) == [(1, 0.5), (2, 1.0), (3, 1.0)]


def test_trackers_get_the_looks_at_the_version_of_the_day(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []
    metrics = Metrics(tmp_path / "metrics.jsonl", [seen.append])
    metrics.log(7, {})
    metrics.log_servers(LOOK)
    assert seen[1] == {"version": 7, "time": 5.0, "servers/heard": 2}
    Metrics(None).log_servers(LOOK)


def test_a_line_that_a_disk_has_damaged_does_not_end_a_learner_that_starts_again(tmp_path: Path, caplog) -> None:
    path = tmp_path / "metrics.jsonl"
    first, draw = Metrics(path), random.Random(0)
    for version in range(3):
        first.log(version, {"loss": 0.5})
        first.log_evaluations(version, [result(version, version)])
    whole = path.read_bytes()
    for _ in range(100):
        data, bit = bytearray(whole), draw.randrange(8 * len(whole))
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        again = Metrics(path)
        assert len(again.evaluations(3)) >= 2
        again.log(3, {"loss": 0.5})
        assert len(read(path)) >= 5
    assert f"{path}: line " in caplog.text and "is damaged, and is left out" in caplog.text
