"""The display: what a line and a panel say, with all figures and with few."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from actors.supervise.keeper import Event, Process
from actors.watch.display import Display, TimeLeft, waiting
from actors.watch.status import Wait
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
    (folder / "toy").mkdir(exist_ok=True)
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


def test_lines_of_processes_are_prefixed_and_not_taken_for_markup(tmp_path: Path) -> None:
    shown = display(tmp_path)
    process = Process("rollout-0", "rollout", ("x",), tmp_path / "log")
    shown.tell(process, Event(1, "started", "pid 7"))
    shown.tell(process, Event(2, "line", "[bold]loading[/nonsense] \x1b[31mred\x1b[0m"))
    assert said(shown) == "[rollout-0] started: pid 7\n[rollout-0] [bold]loading[/nonsense] red\n"
    assert shown.servers() == "1/2 alive"


def test_a_terminal_gets_a_panel(tmp_path: Path) -> None:
    shown = display(tmp_path, terminal=True)
    with shown.shown():
        write(tmp_path, FULL)
        shown.tell(Process("learner", "learner", ("x",), tmp_path / "log"), Event(1, "failed", "exit code 1"))
        shown.refresh()
    text = said(shown)
    assert "12/60" in text and "the buffer does not answer" in text and "learner failed" in text and "toy" in text


def test_waits_are_told_in_words() -> None:
    assert waiting([Wait("learner", "rollout-0", "20 of 32", 3.21)]) == ["learner for rollout-0, 3.2 s: 20 of 32"]
    assert waiting([]) == ["nobody"]
    assert waiting([Wait("learner", "any", "", 1.0)] * 9)[-1].startswith("and 3 more")


@pytest.mark.parametrize(
    ("seen", "text"), [([], ""), ([(0, 1)], ""), ([(0, 1), (4, 3)], "0:01:54"), ([(0, 5), (9, 3)], "")]
)
def test_time_left_follows_the_pace(seen: list[tuple[float, int]], text: str) -> None:
    left = TimeLeft(60)
    for now, version in seen:
        left.seen({"version": version}, now)
    assert left.text(3) == text
