"""The display: what a line and a panel say, with all figures and with few."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from actors.process import Event, Process
from actors.watch.display import Display, time_left, waiting
from actors.watch.metrics_log import Records
from buffer.wire.protocol import Kept, State
from configs.load import load

FULL = {
    "version": 12,
    "reward/mean": 0.4,
    "length/mean": 9.25,
    "tokens_per_s": 11234.0,
    "age/mean": 1.5,
    "age/max": 3,
    "time/wait_s": 0.5,
    "time/version_s": 2.0,
}
BARE: dict[str, Any] = dict(version=0, trained=-1, counts={}, dropped={}, ages={}, bytes_stored=0, waiters=[], errors=0)


def display(folder: Path, terminal: bool = False) -> Display:
    words = [
        f"--run.folder={folder}",
        "--run.name=toy",
        "--model.path=m",
        "--data.train=p.jsonl",
        "--reward.function=math",
    ]
    console = Console(file=io.StringIO(), width=100, soft_wrap=True, highlight=False, force_terminal=terminal)
    return Display(load([*words, "--run.versions=60", "--rollout.servers=2"]), console)


def said(shown: Display) -> str:
    assert isinstance(shown.console.file, io.StringIO)
    return shown.console.file.getvalue()


def write(folder: Path, *records: dict[str, object]) -> None:
    (folder / "toy").mkdir(parents=True, exist_ok=True)
    with open(folder / "toy" / "metrics.jsonl", "a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def test_one_plain_line_a_version(tmp_path: Path) -> None:
    shown = display(tmp_path)
    write(tmp_path, {**FULL, "version": 11, "reward/mean": 0.2}, FULL)
    shown.refresh()
    shown.refresh()
    lines = said(shown).splitlines()
    assert len(lines) == 2
    assert lines[1].startswith("version 12/60  reward 0.400 (last 10: 0.300)  length 9.2  tokens/s 11,234")
    assert "age 1.5 (max 3)  waited 0.5 of 2.0 s  servers 0/2 alive" in lines[1]


def test_missing_figures_are_left_out(tmp_path: Path) -> None:
    shown = display(tmp_path)
    write(tmp_path, {"version": 1, "reward/mean": 0.25})
    shown.refresh()
    assert said(shown) == "version 1/60  reward 0.250 (last 10: 0.250)  servers 0/2 alive\n"


def test_records_of_an_earlier_start_are_no_news(tmp_path: Path) -> None:
    write(tmp_path, FULL)
    shown = display(tmp_path)
    shown.refresh()
    assert said(shown) == ""


def test_a_verdict_of_several_lines_stays_readable(tmp_path: Path) -> None:
    shown = display(tmp_path)
    shown.say("the run was given up after version 0 of 4\n  102 attempts failed: reward: a: b\n  mend what failed")
    lines = ["the run was given up after version 0 of 4", "  102 attempts failed: reward: a: b", "  mend what failed"]
    assert said(shown).splitlines() == lines


def test_lines_of_processes_are_prefixed_and_not_taken_for_markup(tmp_path: Path) -> None:
    shown = display(tmp_path)
    process = Process("rollout-0", "rollout", ("x",), tmp_path / "log")
    shown.show_event(process, Event(1, "started", "pid 7"))
    shown.show_event(process, Event(2, "line", "[bold]loading[/nonsense] \x1b[31mred\x1b[0m"))
    assert said(shown) == "[rollout-0] started: pid 7\n[rollout-0] [bold]loading[/nonsense] red\n"
    assert shown.servers() == "1/2 alive"


def test_what_a_process_says_at_its_start_is_shown_until_a_version_comes(tmp_path: Path) -> None:
    write(tmp_path, FULL)  # of an earlier start of the run
    shown = display(tmp_path)
    learner = Process("learner", "learner", ("x",), tmp_path / "log")
    info = Event(2, "line", "2026-11-22 07:58:23,568 INFO learner: restored")
    shown.show_event(learner, Event(1, "started", "pid 7"))
    shown.show_event(learner, info)
    write(tmp_path, FULL | {"version": 13})
    shown.refresh()
    shown.show_event(learner, info)
    shown.show_event(learner, Event(1, "started", "pid 8"))
    shown.show_event(learner, info)
    words = [line.partition(" ")[0] for line in said(shown).splitlines()]
    assert words == ["[learner]", "[learner]", "the", "version", "[learner]", "[learner]"]


@pytest.mark.parametrize("terminal", [False, True])
def test_a_launch_says_once_how_long_its_first_version_took(terminal: bool, tmp_path: Path) -> None:
    write(tmp_path, FULL)  # of an earlier launch
    shown, learner = display(tmp_path, terminal), Process("learner", "learner", ("x",), tmp_path / "log")
    shown.refresh()
    shown.show_event(learner, Event(1, "started", "pid 7"))
    shown.refresh()
    assert "first version" not in said(shown)
    for version in (13, 14):
        write(tmp_path, FULL | {"version": version})
        shown.show_event(learner, Event(1, "started", "pid 8"))
        shown.refresh()
    assert said(shown).count("the first version of this launch came after 0 s") == 1


def test_how_full_the_servers_are_is_shown(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    full = {"running": 384.0, "places": 512.0, "limit_graphs": 512.0}
    cut = full | {"places": 448.0, "limit_preempted": 448.0, "preempted": 3.0}
    servers = {"rollout-0": {"stats": full}, "rollout-1": {"stats": cut}, "rollout-2": {"stats": {}}}
    rest: dict[str, Any] = {"version": 0, "trained": -1, "counts": {}, "dropped": {}, "ages": {}, "waiters": []}
    shown.state = State(**rest, bytes_stored=0, errors=0, servers=servers)
    assert shown.servers() == "3/2 alive, running 768 of 960"
    shown.console.print(shown.panel())
    assert "running 384 of 512: max_num_seqs, the captured CUDA graphs" in said(shown)
    assert "running 384 of 448: the KV cache was full, 3 preemptions" in said(shown)


def test_a_server_that_fell_silent_runs_nothing(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    full = {"running": 384.0, "places": 512.0, "limit_graphs": 512.0}
    servers = {"rollout-0": {"stats": full, "silent_s": 30.0}, "rollout-1": {"stats": full | {"running": 7.0}}}
    rest: dict[str, Any] = {"version": 0, "trained": -1, "counts": {}, "dropped": {}, "ages": {}, "waiters": []}
    shown.state = State(**rest, bytes_stored=0, errors=0, servers=servers)
    assert shown.servers() == "1/2 alive, running 7 of 512"
    shown.console.print(shown.panel())
    assert "running 384" not in said(shown) and "running 7 of 512" in said(shown)


def test_a_terminal_gets_a_panel(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    with shown.shown():
        write(tmp_path, FULL)
        shown.show_event(Process("learner", "learner", ("x",), tmp_path / "log"), Event(1, "failed", "exit code 1"))
        shown.refresh()
    text = said(shown)
    assert "12/60" in text and "the buffer does not answer" in text and "learner failed" in text and "toy" in text


def test_the_panel_shows_the_first_waits() -> None:
    assert waiting(None) == ["the buffer does not answer"]
    assert waiting([]) == ["nobody"]
    shown = waiting([f"learner for {number}" for number in range(9)])
    assert shown[:6] == [f"learner for {number}" for number in range(6)] and shown[6].startswith("and 3 more")


@pytest.mark.parametrize(("seconds", "text"), [([], ""), ([2.0], "0:01:58"), ([9.0, 2.0, *[3.0] * 19], "0:01:55")])
def test_time_left_follows_the_pace(seconds: list[float], text: str, tmp_path: Path) -> None:
    write(tmp_path, *({"version": 1 + v, "time/version_s": s} for v, s in enumerate(seconds)))
    records = Records(tmp_path / "toy" / "metrics.jsonl")
    assert time_left(records, 60) == text


def test_failures_are_shown_when_their_number_has_doubled(tmp_path: Path) -> None:
    """Also before the first version: a reward function that always raises lets none come."""
    shown = display(tmp_path)
    counts = {"prompt: too long": 1, "reward: KeyError: 'answer'": 2}
    for more in (0, 1, 6):
        counts["reward: KeyError: 'answer'"] += more
        shown.state = state(failed=counts, dropped={"reward: KeyError: 'answer'": 1})
        shown.refresh()
        shown.refresh()
    assert said(shown).splitlines() == [
        "reward failed 67 % of 3 attempts, most often KeyError: 'answer' (2); "
        "prompt failed 33 % of 3 attempts, most often too long (1); "
        "1 items dropped, most often reward: KeyError: 'answer' (1)",
        "reward failed 90 % of 10 attempts, most often KeyError: 'answer' (9); "
        "prompt failed 10 % of 10 attempts, most often too long (1); "
        "1 items dropped, most often reward: KeyError: 'answer' (1)",
    ]


def test_the_panel_and_the_line_of_a_version_count_failures(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    with shown.shown():
        write(tmp_path, {**FULL, "buffer/failed": 12, "buffer/dropped": 3})
        shown.state = state(failed={"reward: [KeyError]": 12}, dropped={})
        shown.refresh()
    text = said(shown)
    assert "reward failed 100 % of 12 attempts, most often [KeyError] (12)" in text
    plain = display(tmp_path / "plain")
    write(tmp_path / "plain", {**FULL, "buffer/failed": 12, "buffer/dropped": 3})
    plain.refresh()
    assert "failed 12  dropped 3" in said(plain)


def state(**fields: dict[str, int]) -> State:
    rest: dict[str, Any] = {"version": 0, "trained": -1, "counts": {}, "ages": {}, "servers": {}, "waiters": []}
    return State(**rest, **fields, bytes_stored=0, errors=0)


EVALUATION = {
    "version": 13,
    "eval/due": 10,
    "eval/version": 11,
    "eval/aime/mean@8": 0.4,
    "eval/aime/error": 0.05,
    "eval/aime/pass@8": 0.75,
    "eval/aime/pass^8": 0.125,
    "eval/aime/reward": 0.42,
    "eval/aime/length": 900.0,
    "eval/aime/failed": 3.0,
    "eval/aime/version": 11,
    "eval/easy/mean@1": 0.9,
    "eval/easy/version": 11,
}
AIME = "aime: mean@8 0.400 (+- 0.050), pass@8 0.750, pass^8 0.125, reward 0.420, 3 attempts failed"


def test_an_evaluation_is_a_line_for_each_set(tmp_path: Path) -> None:
    shown = display(tmp_path)
    write(tmp_path, FULL, EVALUATION)
    shown.refresh()
    shown.refresh()
    _, *lines = said(shown).splitlines()
    assert lines == [f"version 11 evaluated on {AIME}", "version 11 evaluated on easy: mean@1 0.900"]
    assert [record["version"] for record in shown.records.ordered()] == [12], "it is no record of version 13"


def test_an_evaluation_that_was_given_up_is_none(tmp_path: Path) -> None:
    shown = display(tmp_path)
    write(tmp_path, FULL, EVALUATION, {"version": 20, "eval/due": 20, "eval/version": 20})
    shown.refresh()
    assert list(shown.records.evaluations) == [11] and "version 20" not in said(shown)


def test_the_panel_shows_the_last_evaluation_and_the_one_that_is_being_made(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    write(tmp_path, FULL, EVALUATION | {"eval/version": 0, "eval/aime/mean@8": 0.1}, EVALUATION)
    shown.refresh()
    fields = dict(
        version=12, trained=11, counts={}, dropped={}, ages={}, bytes_stored=0, servers={}, waiters=[], errors=0
    )
    shown.state = State(**fields, evaluation="rollout-1 evaluates version 20")  # type: ignore[arg-type]
    shown.console.print(shown.panel())
    text = " ".join(said(shown).split())
    assert "eval 11" in text and "mean@8 0.400" in text and "rollout-1 evaluates version 20" in text


def test_the_servers_are_those_that_are_wanted_now(tmp_path: Path) -> None:
    shown = display(tmp_path)
    servers = {f"rollout-{n}": {"silent_s": 0.1, "stats": {}} for n in range(3)}
    kept = Kept(
        servers={"rollout-0": "started", "rollout-1": "started", "rollout-2": "draining"}, wanted=4, least=1, most=9
    )
    shown.state = State(**{**BARE, "servers": servers}, wanted_servers=4, kept=kept)
    assert shown.servers() == "2/4 alive, 1 draining"
    shown.state = State(**{**BARE, "servers": servers})
    assert shown.servers() == "3/2 alive"


def test_looks_at_the_servers_are_not_kept(tmp_path: Path) -> None:
    shown = display(tmp_path)
    write(tmp_path, {"version": 1}, {"kind": "servers", "time": 5.0})
    shown.refresh()
    assert list(shown.records.by_version) == [1] and not shown.records.servers
