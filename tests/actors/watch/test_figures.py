"""Figures derived from records: shares, pace, GPU hours, against arithmetic done by hand."""

import json
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import pytest

from actors.watch import figures
from actors.watch.metrics_log import FULL_LOOKS, MOST_LOOKS, MOST_VERSIONS, Looks, Position, Record, Records, read_after
from tests.harness.watched import append, evaluation, look, record


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return tmp_path


def records_of(run: Path) -> Records:
    return Records(run / "metrics.jsonl")


def test_shares_of_time_leave_the_start_out(run: Path) -> None:
    append(run, record(1, **{"time/version_s": 1000.0, "time/wait_s": 999.0}), record(2), record(3))
    shares = figures.phase_shares(figures.recent(records_of(run)))
    assert shares == pytest.approx({"wait": 0.62, "train": 0.3, "publish": 0.05, "checkpoint": 0.01, "rest": 0.02})
    assert figures.phase_shares([]) == {} and figures.phase_shares([{"version": 1}]) == {}
    assert figures.tokens_per_s(figures.recent(records_of(run))) == 500.0


def test_rewards_of_the_last_versions_and_of_those_before(run: Path) -> None:
    append(run, *(record(version, **{"reward/mean": float(version > 20)}) for version in range(1, 41)))
    assert figures.rewards(records_of(run)) == (1.0, 0.0)
    assert figures.rewards(Records(run / "nothing")) == (None, None)


def test_what_places_did() -> None:
    stats = {"places": 100.0, "places_taken": 80.0, "running": 50.0, "waiting": 10.0, "task": 5.0}
    shares = figures.place_shares([stats, stats | {"running": 60.0}, {}])
    assert shares == pytest.approx({"generating": 0.55, "queued": 0.1, "in task": 0.05, "moving": 0.1, "free": 0.2})
    assert figures.place_shares([{}]) == {}
    late = figures.place_shares([{"places": 100.0, "places_taken": 10.0, "running": 90.0}])
    assert sum(late.values()) == pytest.approx(1.0), "the mean of a heartbeat and its last moment may differ"


def test_parked_places_are_those_that_servers_count_else_the_free_ones() -> None:
    assert figures.parked_share([{"slots": 64.0, "parked": 16.0, "places": 512.0, "places_taken": 0.0}]) == 0.25
    assert figures.parked_share([{"places": 100.0, "places_taken": 70.0}, {}]) == pytest.approx(0.3)
    assert figures.parked_share([{}]) is None


def test_gpu_hours_count_while_the_run_is_alive() -> None:
    looks = looks_of([look(0, 1), look(600, 2, gpus=5), look(1200, 3), look(90_000, 4), look(90_360, 5)])
    assert figures.gpu_hours(looks) == pytest.approx((600 * 3 + 600 * 5 + 360 * 3) / 3600)
    assert figures.gpu_hours(looks_of([look(0, 1, gpus=0), look(60, 1, gpus=0)])) is None
    assert figures.gpu_hours(Looks()) is None


def looks_of(several: Iterable[Record]) -> Looks:
    looks = Looks()
    for one in several:
        looks.take_up(one)
    return looks


def test_of_a_long_run_the_last_looks_are_whole_and_the_others_few_and_short() -> None:
    last = 10 * MOST_LOOKS
    looks = looks_of(look(15.0 * number, number) for number in range(last + 1))
    times = sorted(looks)
    assert MOST_LOOKS / 2 < len(looks) <= MOST_LOOKS and times[0] == 0
    assert times[-FULL_LOOKS:] == [15.0 * number for number in range(last - FULL_LOOKS + 1, last + 1)]
    assert all(looks[time] == look(time, int(time / 15)) for time in times[-FULL_LOOKS:])
    old = times[:-FULL_LOOKS]
    assert {after - before for before, after in pairwise(old)} == {15.0 * 16}, "evenly spread"
    assert all("server/rollout-0/places" not in looks[time] for time in old) and "servers/places" in looks[0]
    assert figures.gpu_hours(looks) == pytest.approx(15 * last * 3 / 3600), "of those left out too"


def test_looks_out_of_order_are_no_trouble() -> None:
    several = [look(time, 1) for time in (*range(MOST_LOOKS, 0, -1), *range(-100, 200), *[7] * 50)]
    assert len(looks_of(several)) <= MOST_LOOKS and figures.gpu_hours(looks_of(several)) is not None


def test_who_needs_no_looks_keeps_none(run: Path) -> None:
    append(run, look(5.0, 1), record(1))
    lean = Records(run / "metrics.jsonl", looks=False)
    assert list(lean.by_version) == [1] and not lean.servers
    append(run, look(6.0, 1), record(2))
    assert [one["version"] for one in lean.read()] == [2] and not lean.servers


def test_looks_at_servers_are_no_versions(run: Path) -> None:
    append(run, look(5.0, 1), record(1), evaluation(0, 0.5))
    found = records_of(run)
    assert list(found.by_version) == [1] and list(found.servers) == [5.0] and list(found.evaluations) == [0]
    append(run, look(6.0, 1), {"kind": "servers", "time": "now"})
    assert found.read() == [] and list(found.servers) == [5.0, 6.0]
    assert figures.stats_of(look(5.0, 3))["rollout-1"]["running"] == 190.0


def test_reading_goes_on_where_it_stopped_and_tells_of_another_file(run: Path) -> None:
    path = run / "metrics.jsonl"
    assert read_after(path, Position()) == ([], Position(), False)
    append(run, record(1))
    first, position, replaced = read_after(path, Position())
    assert len(first) == 1 and replaced and Position.parse(str(position)) == position
    with path.open("a") as file:
        file.write('{"version": 2')
    assert read_after(path, position) == ([], position, False)
    with path.open("a") as file:
        file.write("}\n")
    assert read_after(path, position)[0] == [{"version": 2}]
    (run / "new").write_text('{"version": 1}\n')
    (run / "new").replace(path)
    again, _, replaced = read_after(path, position)
    assert again == [{"version": 1}] and replaced
    assert Position.parse("nonsense") == Position.parse("") == Position()


def test_looks_at_servers_do_not_hide_that_versions_stopped(run: Path) -> None:
    append(run, record(1, time=1000.0), look(5000.0, 1))
    assert figures.seconds_since(records_of(run), 5010.0) == 4010.0
    assert figures.seconds_since(Records(run / "nothing"), 5010.0) is None


def test_who_watches_for_days_keeps_a_bounded_number_of_records(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"

    def write(versions: range, to: Path) -> None:
        with to.open("a") as lines:
            lines.writelines(json.dumps({"version": version, "reward/mean": 1.0}) + "\n" for version in versions)

    write(range(1, 9001), file)
    records, whole = Records(file, bounded=True), Records(file)
    found = sorted(records.by_version)
    assert len(found) <= MOST_VERSIONS and len(whole.by_version) == 9000
    assert found[:20] == list(range(1, 21)) and found[-2000:] == list(range(7001, 9001))
    write(range(9001, 9003), file)
    assert [one["version"] for one in records.read()] == [9001, 9002]
    write(range(1, 8001), tmp_path / "new")  # the learner goes back
    (tmp_path / "new").replace(file)
    assert records.read() == [] and max(records.by_version) == 8000, "no news"
    write(range(8001, 8002), file)
    assert [one["version"] for one in records.read()] == [8001]
