"""Each place that shows texts of users' code or a policy makes them safe and bounds their length."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest
from rich.console import Console

from actors.live.prometheus import exposition
from actors.live.screen import screen
from actors.process import Event, Process
from actors.report.page import embedded
from actors.supervise.keeper import SHOWN_CHARACTERS, Keeper
from actors.watch.metrics_log import Records, evaluation_lines
from actors.watch.overview import look_over
from actors.watch.status import main as status
from configs.entrypoint import configure_logging
from configs.plain_text import MOST_CHARS, MOST_LOGGED
from tests.actors.watch.test_display import display, said
from tests.configs.test_plain_text import shown_plainly
from tests.harness.watched import append, make_config, record, state

BAD = "x\x1b[2J\x00\u202e\ud83d" + "y" * 100_000
MARK = "\\u001b[2J\\u0000\\u202e\\ud83d"


def safe(text: str, most: int) -> bool:
    """Whether `text` has the hostile text made visible, and each line is bounded."""
    return MARK in text and shown_plainly(text) and max(map(len, text.splitlines())) <= most


def test_the_log(capfd: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, root.handlers = root.handlers, []
    try:
        configure_logging("[3]")
        try:
            raise ValueError(BAD)
        except ValueError:
            root.warning("an answer: %s", BAD, exc_info=True)
    finally:
        root.handlers = before
    found = capfd.readouterr().err
    assert safe(found, MOST_LOGGED) and len(found) <= MOST_LOGGED + 1 and "WARNING root[3]: an answer: x" in found


def test_the_display_and_its_panel(tmp_path: Path) -> None:
    """Also a reward of 1e41, which once had 42 digits in a line of figures."""
    shown = display(tmp_path)
    shown.say(BAD)
    shown.show_event(Process("rollout-0", "rollout", ("x",), tmp_path / "log"), Event(1, "line", BAD))
    assert safe(said(shown), MOST_CHARS + 20)
    (tmp_path / "toy").mkdir()
    append(tmp_path / "toy", record(1, **{"reward/mean": 1e41, "length/mean": 1e41, "tokens_per_s": 1e41}))
    shown.refresh()
    assert "reward 1e+41 (last 10: 1e+41)" in said(shown).splitlines()[-1] and len(said(shown).splitlines()[-1]) < 250
    shown.state = state(failed={f"reward: {BAD}": 3})
    console = Console(file=io.StringIO(), width=100, highlight=False)
    console.print(shown.panel())
    assert MARK in console.file.getvalue() and len(console.file.getvalue()) < 20_000  # type: ignore[attr-defined]


def test_status(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = make_config(tmp_path)
    run = config.run.path
    append(run, record(1, **{"reward/mean": 1e41}))
    (run / "logs").mkdir(parents=True, exist_ok=True)
    (run / "logs" / "rollout-0.log").write_bytes(BAD.encode(errors="surrogatepass")[:3000] + b"\xff\x00\n")
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json")))
    status([str(run), "--buffer.address=tcp://127.0.0.1:9"])
    found = capsys.readouterr().out
    assert "\\u001b[2J\\u0000\\u202e" in found and shown_plainly(found) and "reward/mean 1e+41" in found


def test_the_page_the_screen_and_prometheus(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    append(config.run.path, record(1, **{"reward/mean": 1e41}))
    records, now = Records(config.run.path / "metrics.jsonl"), state(failed={f"task: {BAD}": 1})
    overview = look_over(config, records, now, 2e9, answers=True)
    page = json.loads(embedded({"failures": overview.failures, "answer": BAD}))
    assert MARK in page["answer"] and MARK in page["failures"][0][0] and len(page["answer"]) <= 8000
    console = Console(file=io.StringIO(), width=200, highlight=False)
    console.print(screen(overview, records))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "\\u001b[2J" in shown and shown_plainly(shown)
    metrics = exposition(records, now, overview)
    assert shown_plainly(metrics) and max(map(len, metrics.splitlines())) < 1000
    assert all(len(value) <= 14 for name, value in overview.figures.items() if "reward" in name)


def test_evaluations_have_a_bounded_width() -> None:
    (line,) = evaluation_lines({"version": 1, "eval/version": 1, "eval/aime/mean@1": 1e41, "eval/aime/error": 1e40})
    assert line == "aime: mean@1 1e+41 (+- 1e+40)"


def test_what_a_process_prints(tmp_path: Path) -> None:
    """The log file stays text, whatever a reward function prints. Each state of a progress bar is a line."""
    bad = r"import sys; sys.stdout.buffer.write(b'x\x1b[2J\x00\xff \x1b[31mred\x1b[0m\n1 %\r2 %\n')"
    process = Process("rollout-0", "rollout", (sys.executable, "-c", bad), tmp_path / "rollout-0.log")
    keeper = Keeper(process)
    events, after = list[Event](), 0
    while not (events and events[-1].kind == "ended"):
        events += keeper.events(after, 30.0)
        after = events[-1].number
    lines = [event.text for event in events if event.kind == "line"]
    assert lines == ["x\\u001b[2J\\u0000\ufffd red", "2 %"] and all(len(line) <= SHOWN_CHARACTERS for line in lines)
    log = (tmp_path / "rollout-0.log").read_text()
    printed = "".join(line for line in log.splitlines(keepends=True) if not line.startswith("--- "))
    assert printed == "x\\u001b[2J\\u0000\ufffd red\n1 %\n2 %\n" and shown_plainly(log)
