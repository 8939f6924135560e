"""The soak: its figures on what was seen at known moments, and a whole one, over stand-ins for learner and servers."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import figures
from benchmarks.soak.audit import Lost, audit
from benchmarks.soak.figures import WINDOW, Death, Span
from benchmarks.soak.observer import PROGRESS, Seen, Sighting, SoakObserver
from configs.load import load
from tests.harness.ports import free_port
from tests.harness.toy import ROOT

CALM = [Span(0.0, 100.0), Span(200.0, 300.0)]


def seen_of(stop: float = 0.0, slow: float = 0.0) -> Seen:
    """A version each second; none for `stop` seconds after second 100, then each two seconds for `slow` seconds."""
    times = [float(second) for second in range(1, 101)]
    while times[-1] < 300:
        now = times[-1]
        times.append(now + (stop + 1 if now == 100 else 2 if now - 100 - stop < slow else 1))
    return Seen(versions=[(at, version + 1) for version, at in enumerate(times)])


def test_without_a_stop_all_time_is_effective() -> None:
    seen = seen_of()
    assert figures.pace_of(seen, CALM) == pytest.approx(1.0)
    assert figures.slowest(seen, CALM) == pytest.approx(WINDOW)
    assert figures.effective(seen, Span(100.0, 200.0), 1.0) == pytest.approx(1.0)
    assert figures.at_pace(seen, Span(100.0, 200.0), WINDOW) == pytest.approx(0.99)


def test_a_stop_and_slow_versions_are_lost() -> None:
    seen = seen_of(stop=20, slow=10)
    assert figures.effective(seen, Span(100.0, 200.0), 1.0) == pytest.approx(0.75, abs=0.01)
    assert figures.at_pace(seen, Span(100.0, 200.0), WINDOW) == pytest.approx(0.69, abs=0.01)


def test_full_speed_is_when_the_process_works_again_and_the_pace_is_back() -> None:
    seen, death = seen_of(stop=20, slow=10), Death("buffer", 100.5, 200.0)
    lines = [(101.0, "--- buffer failed: exit code 137"), (101.5, "--- buffer started: pid 5"),
             (104.0, "run soak: 538 problems, x")]  # fmt: skip
    seen.sights = [Sighting(at, "buffer", line) for at, line in lines]
    found = figures.recovery(seen, death, 1.0, WINDOW)
    assert found.full_speed == pytest.approx(131 - 100.5)
    assert found.pause == pytest.approx(20.5)
    assert found.lost == pytest.approx(24.5)
    seen.versions = [(at if at < 140 else 140 + (at - 140) / 2, version) for at, version in seen.versions]
    assert figures.recovery(seen, death, 1.0, WINDOW).lost > 24.5, "against the pace that follows, not that of before"
    assert list(found.phases.values()) == pytest.approx([0.5, 0.5, 2.5, 17.0])
    assert figures.expected([found, found], 300.0) == pytest.approx(1 - 24.5 / 300)


def test_a_server_is_back_with_its_first_group_however_fast_the_others_are() -> None:
    seen, death = seen_of(), Death("rollout-1", 100.5, 200.0)
    seen.sights = [
        Sighting(101.0, "rollout-0", "--- rollout-0 failed: another one"),
        Sighting(101.0, "rollout-1", "--- rollout-1 failed: exit code 137"),
        Sighting(102.0, "rollout-1", "--- rollout-1 started: pid 5"),
        Sighting(110.0, "rollout-1", "rollout-1 waits for the buffer at"),
        Sighting(120.0, "rollout-1", "weights: the learner is at"),
        Sighting(121.0, "rollout-1", "generating with version 110"),
    ]
    assert figures.recovery(seen, death, 1.0, WINDOW).full_speed is None
    seen.sights.append(Sighting(125.5, "rollout-1", PROGRESS))
    found = figures.recovery(seen, death, 1.0, WINDOW)
    assert found.full_speed == pytest.approx(25.5) and found.lost == pytest.approx(0.0, abs=1)


def test_the_observer_counts_a_version_that_a_learner_repeats_once(tmp_path: Path) -> None:
    def records(numbers: list[int], life: int) -> str:
        return "".join(json.dumps({"version": number, "life": life}) + "\n" for number in numbers)

    path = tmp_path / "metrics.jsonl"
    path.write_text(records([1, 2, 3, 4], 1) + '{"version": 5')
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "buffer.log").write_text("--- buffer started: pid 17\n")
    with SoakObserver(tmp_path) as observer:
        observer.wait("four versions", lambda seen: len(seen.versions) == 4, 60.0)
        assert observer.pid("buffer") == 17
        draft = tmp_path / "draft"
        draft.write_text(records([1, 2], 1) + records([3, 4, 5], 2) + '{"time": 1.0, "kind": "servers"}\n')
        draft.replace(path)
        (tmp_path / "logs" / "buffer.progress").touch()
        observer.wait("version 5", lambda seen: len(seen.versions) == 5, 60.0)
        observer.wait("progress", lambda seen: seen.sights[-1].text == PROGRESS, 60.0)
    assert [version for _, version in observer.seen.versions] == [1, 2, 3, 4, 5]
    assert [version for _, version in observer.seen.repeated] == [3, 4]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_run_with_a_kill_of_each_process_loses_nothing(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps({"problem": str(row), "answer": ""}) + "\n" for row in range(50)))
    settings = {
        "run": {"name": "soaked", "folder": str(tmp_path), "versions": 10**6},
        "model": {"path": "none"},
        "data": {"train": str(data)},
        "reward": {"function": "math"},
        "batch": {"groups": 4, "samples": 2},
        "learner": {"device": "cpu"},
        "rollout": {"device": "cpu", "servers": 2, "heartbeat_s": 2.0, "attempts": 10**6},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}", "keep": "all"},
    }
    (tmp_path / "run.yaml").write_text(json.dumps(settings))
    words: list[str | Path] = ["--run-file", tmp_path / "run.yaml", "--work", tmp_path, "--out", tmp_path / "soak.json"]
    words += ["--minutes", str(4 / 60), "--every-s", "1", "--calm-s", "1"]
    launch = ["--launch", sys.executable, "-m", "tests.benchmarks.soak_stand_ins", "launch"]
    soak = subprocess.run(
        [sys.executable, "-m", "benchmarks.soak", *words, *launch], cwd=ROOT, capture_output=True, text=True
    )
    assert soak.returncode == 0, soak.stdout[-3000:] + soak.stderr[-3000:]
    rows = json.loads((tmp_path / "soak.json").read_text())["rows"]
    found = {(row.get("case", ""), row["what"].strip()): row["value"] for row in rows}
    assert found["", "kills"] == 4
    assert all((role, "kill to full speed") in found for role in ("buffer", "learner", "rollout"))
    assert found["audit", "lost or done twice"] == 0
    assert found["audit", "groups trained, each once"] == 4 * found["audit", "versions trained, each once"] > 0
    records = (tmp_path / "soaked" / "metrics.jsonl").read_text().splitlines()
    (tmp_path / "soaked" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in records[:-1]))
    with pytest.raises(Lost, match="trained batches are not those of the records"):
        audit(load([str(tmp_path / "run.yaml")]))
