"""Every sentence that status, page and report say of real runs while they start, stop and go on.

Both are recordings of the quickstart's model on a CPU with one server (`tests/harness/recorded_run.py`).
`short_run.jsonl` has 4 versions, from its launch to its end. `resumed.jsonl` lost its server after version 22, was
stopped by Ctrl-C after version 35, launched again after a pause of more than three minutes, with 80 versions in place
of 60, and lost its learner after version 55.
"""

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from actors.report import summary
from actors.watch import status
from actors.watch.overview import Overview, look_over
from buffer.wire.protocol import State
from configs.schema import Config
from tests.harness.recorded_run import LOOK, Look, lines_of, replay
from tests.harness.watched import make_config

HERE = Path(__file__).parent
FIRST = "batch 0 has 0 of 8 groups; no rollout server asks for work"
LATER = "batch 35 has 0 of 16 groups; no rollout server asks for work"
BOUND = "because of the bound on age. Raise batch.max_staleness (now 4) or batch.groups; more servers would not help."
POLICY = "cannot be trained within 4 versions: the server must get a newer policy first"
NEVER = "rollout-0 is not connected to the buffer, and the learner asks for no batch"
SHORT = {
    "launched": ["waiting: no version yet", f"No version is trained yet: {NEVER}."],
    "the learner is there": [
        "waiting: no version yet",
        f"No version is trained yet: learner-0 waits for rollout-0, which is not connected to the buffer ({FIRST}).",
        f"learner-0 waits for rollout-0, which is not connected to the buffer: {FIRST}",
    ],
    "vLLM starts": [
        "waiting: no version yet",
        f"No version is trained yet: learner-0 waits for rollout-0, which is starting ({FIRST}).",
        f"learner-0 waits for rollout-0, which is starting: {FIRST}",
    ],
    "vLLM is silent": [
        "waiting: no version yet",
        f"No version is trained yet: learner-0 waits for rollout-0, which is starting, silent for 13 s ({FIRST}).",
        f"learner-0 waits for rollout-0, which is starting, silent for 13 s: {FIRST}",
    ],
    "the server works": [
        "waiting: no version yet",
        "No version is trained yet: learner-0 waits for rollout-0 "
        "(batch 0 has 0 of 8 groups; 8 are open at rollout-0 (8)).",
        "learner-0 waits for rollout-0: batch 0 has 0 of 8 groups; 8 are open at rollout-0 (8)",
    ],
    "the last version": [
        "running: last version 0:00:00 ago",
        "There are too few versions yet to recommend anything.",
    ],
    "ended": ["ended: finished", "The run had too few versions to recommend anything."],
}
RESUMED = {
    "one server works": [
        "running: last version 0:00:00 ago",
        f"The learner waits 24 % of the time and 100 % of the servers' places get no work, {BOUND}",
    ],
    "the server is killed": [
        "running: last version 0:00:02 ago",
        f"The learner waits 25 % of the time and 50 % of the servers' places get no work, {BOUND}",
        "bad: rollout-0 is lost: it ended 2 s ago; its leases have ended and its problems are dispatched again. "
        "See logs/rollout-0.log",
        "learner-0 waits for rollout-0, which ended 2 s ago: batch 22 has 0 of 16 groups; nothing is open: a group of "
        f"version 17 {POLICY}",
    ],
    "the server starts again": [
        "running: last version 0:00:21 ago",
        f"The learner waits 25 % of the time and 50 % of the servers' places get no work, {BOUND}",
        "learner-0 waits for rollout-0, which is starting: batch 22 has 0 of 16 groups; "
        "no rollout server asks for work",
    ],
    "stopped": [
        "silent: the buffer does not answer; last version 0:00:05 ago",
        "No process of the run answers. If the launcher is gone too, go on with: python -m actors launch "
        "FOLDER/config.yaml.",
        "bad: the buffer does not answer; last version 0:00:05 ago; see logs/buffer.log",
    ],
    "launched again": [
        "running: launched 0:00:02 ago; last version 0:03:32 ago",
        f"No version is trained since the last launch: {NEVER}.",
    ],
    "vLLM starts": [
        "running: launched 0:00:18 ago; last version 0:03:47 ago",
        f"No version is trained since the last launch: learner-0 waits for rollout-0, which is starting ({LATER}).",
        f"learner-0 waits for rollout-0, which is starting: {LATER}",
    ],
    "the server works": [
        "running: launched 0:00:35 ago; last version 0:04:04 ago",
        "No version is trained since the last launch.",
    ],
    "versions come": [
        "running: last version 0:00:01 ago",
        "The learner waits 8 % of the time: nothing has to change.",
    ],
    "the learner is killed": [
        "running: last version 0:00:03 ago",
        f"The learner waits 24 % of the time and 60 % of the servers' places get no work, {BOUND}",
        "bad: the learner ended 3 s ago, and nothing is trained: its launcher starts it again, unless the run is being "
        "stopped; see logs/learner.log",
        "rollout-0 waits for the learner, which ended 3 s ago: no learner is connected but the one at ADDRESS",
        f"rollout-0 waits for the learner, which ended 3 s ago: a group of version 55 {POLICY}",
    ],
    "the learner starts again": [
        "running: last version 0:00:06 ago",
        f"The learner waits 24 % of the time and 60 % of the servers' places get no work, {BOUND}",
        "bad: the learner ended 6 s ago, and nothing is trained: its launcher starts it again, unless the run is being "
        "stopped; see logs/learner.log",
        "rollout-0 waits for the learner, which ended 6 s ago: no learner is connected but the one at ADDRESS",
        f"rollout-0 waits for the learner, which ended 6 s ago: a group of version 55 {POLICY}",
    ],
    "ended": [
        "ended: finished",
        f"The learner waited 32 % of the time and 60 % of the servers' places got no work, {BOUND}",
    ],
}


def config_of(name: str, folder: Path, *more: str) -> Config:
    versions, groups = (4, 8) if name == "short_run" else (80, 16)
    words = [f"run.versions={versions}", f"batch.groups={groups}", "batch.samples=4", "batch.max_staleness=4"]
    return make_config(folder, *words, "rollout.servers=1", *more)


def seen_at(config: Config, look: Look) -> Overview:
    over = not look.answers and max(look.records.by_version, default=0) == config.run.versions
    ended = "finished" if over else ""
    return look_over(config, look.records, look.state, look.time, ended, look.answers, look.launched)


def sentences(config: Config, seen: Overview) -> list[str]:
    lines = [f"{seen.status}: {seen.summary}", seen.advice, *(f"{one.level}: {one.text}" for one in seen.alerts)]
    lines += [f"{who} waits for {whom}: {why}" for who, whom, _, why in seen.waits]
    return [re.sub(r"tcp://\S+", "ADDRESS", line).replace(str(config.run.path), "FOLDER") for line in lines]


@pytest.mark.parametrize(("name", "expected"), [("short_run", SHORT), ("resumed", RESUMED)])
def test_every_sentence_of_the_page(name: str, expected: dict[str, list[str]], tmp_path: Path) -> None:
    config = config_of(name, tmp_path)
    looks = replay(HERE / f"{name}.jsonl", config.run.path / "metrics.jsonl")
    found = {moment: sentences(config, seen_at(config, look)) for moment, look in zip(expected, looks, strict=True)}
    assert found == expected


def test_figures_of_the_page_follow_a_start(tmp_path: Path) -> None:
    """A server counts once it can work, a dead run shows none, and a short one has a mean of what there is."""
    config = config_of("resumed", tmp_path)
    looks = replay(HERE / "resumed.jsonl", config.run.path / "metrics.jsonl")
    found = {moment: seen_at(config, look).figures for moment, look in zip(RESUMED, looks, strict=True)}
    servers = [figures.get("servers") for figures in found.values()]
    assert servers == ["1 / 1", "0 / 1", "0 / 1", None, "0 / 1", "0 / 1", "1 / 1", "1 / 1", "1 / 1", "1 / 1", None]
    assert found["one server works"]["reward, last 12"] == "0.311"
    assert found["launched again"]["time left"] == "0:00:15" and found["launched again"]["version"] == "35 / 80"
    assert found["the server is killed"]["2 before"] == "0.204" and "time left" not in found["stopped"]


WAITS = {
    "launched": [f"nobody: {NEVER}"],
    "the learner is there": [f"learner-0 for rollout-0, which is not connected to the buffer, 2.8 s: {FIRST}"],
    "vLLM starts": [f"learner-0 for rollout-0, which is starting, 11.7 s: {FIRST}"],
    "vLLM is silent": [f"learner-0 for rollout-0, which is starting, silent for 13 s, 22.9 s: {FIRST}"],
    "the server works": ["learner-0 for rollout-0, 30.8 s: batch 0 has 0 of 8 groups; 8 are open at rollout-0 (8)"],
    "the last version": [f"nobody: {NEVER}"],
}
RUNS = {name: "not connected to the buffer: rollout-0" for name in ("launched", "the learner is there")} | {
    "vLLM starts": "starting: rollout-0",
    "vLLM is silent": "starting: rollout-0 (silent for 13 s)",
    "the last version": "not connected to the buffer: rollout-0",
}


@pytest.mark.parametrize("moment", list(WAITS))
def test_status_says_whom_a_start_waits_for(
    moment: str, serve: Callable[[State], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config_of("short_run", tmp_path).run.path
    looks = replay(HERE / "short_run.jsonl", run / "metrics.jsonl")
    look = next(look for name, look in zip(SHORT, looks, strict=False) if name == moment)
    assert look.state is not None
    config_of("short_run", tmp_path, f"buffer.address={serve(look.state)}")
    assert status.main([str(run)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.removeprefix("waits: ") for line in said if line.startswith("waits: ")] == WAITS[moment]
    others = f"0 run; {RUNS[moment]}" if moment in RUNS else "1 run"
    assert [line for line in said if line.startswith("servers: ")] == [f"servers: 1 wanted, {others}"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "short_run",
            [
                "The run had too few versions to recommend anything.",
                "reward: mean of 4 versions 0.227",
                "largest age 3 (batch.max_staleness 4)",
            ],
        ),
        (
            "resumed",
            [
                f"The learner waited 32 % of the time and 60 % of the servers' places got no work, {BOUND}",
                "reward: first 5 versions 0.221, last 20 versions 0.688",
                "largest age 4 (batch.max_staleness 4)",
                "the servers ran 9 sequences at a time in the mean, 7% of their places (rollout.sequences)",
            ],
        ),
    ],
)
def test_every_sentence_of_the_report(
    name: str, words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = config_of(name, tmp_path).run.path
    records = [line for line in lines_of(HERE / f"{name}.jsonl") if LOOK not in line]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    os.utime(run / "metrics.jsonl", (time.time(), time.time()))
    assert summary.main([str(run)]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line and not line.startswith("report: ")]
    assert said == words
