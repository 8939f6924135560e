"""Who waits for whom: from a State that a buffer serves over a real socket, and from the files when it is dead."""

import asyncio
import json
import os
import socket
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from actors.scaling.command import lives
from actors.watch import run_state, status
from actors.watch.advice import Alert, find_alerts
from actors.watch.metrics_log import Records
from actors.watch.overview import SERVER_COLUMNS, _server_rows
from actors.watch.run_state import LIMITS, ask, failures, fullness, ledger_lines, servers_lines, silent, waits
from buffer.store.lock import locked
from buffer.store.sql import APPLICATION, SCHEMA, TABLES
from buffer.wire.protocol import Kept, ServerLife, State, Waiter
from configs.certificate import FILE as CERTIFICATE
from configs.certificate import Certificate, judged
from configs.certificate import write as write_certificate
from configs.load import load, write
from configs.schema import Config
from rollout.concurrency import Auto, Fixed, Places
from tests.harness.keys import give_keys
from tests.harness.ports import free_port

LAUNCH = "python -m actors launch"
WAITERS = [
    Waiter(who="learner", kind="Take", why="batch 7 has 20 of 32 groups", seconds=3.25),
    Waiter(who="rollout-1", kind="Ask", why="batch 7 must be formed first", seconds=8.0),
]


def state(waiters: list[Waiter], silent_s: float = 0.5) -> State:
    servers = {
        "rollout-0": {"version": 6, "leases": 12, "silent_s": 0.1, "stats": {"tokens_per_s": 812.0}},
        "rollout-1": {"version": 6, "leases": 0, "silent_s": 0.2, "stats": {}},
        "rollout-2": {"version": 4, "leases": 3, "silent_s": silent_s, "stats": {}},
    }
    return State(
        version=7,
        trained=6,
        counts={"leased": 12, "stored": 20, "trained": 224},
        dropped={"prompt of 2000 tokens": 3},
        failed={"prompt: prompt of 2000 tokens": 3, "reward: [KeyError] 'answer'": 8},
        lengths={"generated": [252, 1008, 20160, 10080, 252], "dropped: prompt of 2000 tokens": [3, 0, 0, 0, 0]},
        ages={0: 100, 1: 124},
        bytes_stored=1000,
        servers=servers,
        waiters=waiters,
        errors=0,
    )


def config(folder: Path, address: str) -> Config:
    words = [
        f"--run.folder={folder}",
        "--run.name=toy",
        "--model.path=m",
        "--data.train=p.jsonl",
        "--reward.function=math",
    ]
    found = load([*words, f"--buffer.address={address}", "--rollout.servers=3", "--run.versions=60"])
    give_keys(found.run.path)
    return found


def test_a_learner_waits_for_servers_with_leases_and_a_server_for_the_learner(tmp_path: Path) -> None:
    found = waits(state(WAITERS), config(tmp_path, "tcp://127.0.0.1:5600"))
    assert found == [
        "rollout-1 for the learner, 8.0 s: batch 7 must be formed first",
        "learner for rollout-0, rollout-2, 3.2 s: batch 7 has 20 of 32 groups",
    ]
    dead = state(WAITERS).model_copy(update={"learner_gone_s": 4.4})
    found = waits(dead, config(tmp_path, "tcp://127.0.0.1:5600"))
    assert found[0] == "rollout-1 for the learner, which ended 4 s ago, 8.0 s: batch 7 must be formed first"


def test_a_line_says_what_samples_wait_for_and_whom_a_failure_is_to_be_blamed_on(tmp_path: Path) -> None:
    settings, now = config(tmp_path, "tcp://127.0.0.1:5600"), state(WAITERS[:1])
    now.servers["rollout-0"]["stats"] = {"generating": 4.0, "scoring": 12.0, "scoring_s": 8.2, "task": 0.0}
    assert waits(now, settings) == [
        "learner for rollout-0 (scoring 12 for 8 s, generating 4), rollout-2, 3.2 s: batch 7 has 20 of 32 groups"
    ]
    now = now.model_copy(update={"recent_failed": {"reward: KeyError": 20}})
    assert waits(now, settings)[0].startswith("learner for rollout-0 (")
    recent = {"reward: KeyError": 11, "reward: ValueError": 10, "prompt: too long": 15}
    now = now.model_copy(update={"recent_failed": recent})
    assert waits(now, settings)[0].startswith("learner for reward.function, which fails, 3.2 s:")


FULL = {"running": 384.0, "waiting": 2.0, "places": 448.0, "places_taken": 440.0, "preempted": 3.0}


@pytest.mark.parametrize(
    ("name", "stats", "words"),
    [
        ("rollout-0", {"limit_sequences": 448.0}, "running 384 of 448: rollout.sequences"),
        (
            "rollout-0",
            {"limit_learner": 600.0, "limit_graphs": 512.0, "limit_kv": 2000.0, "limit_preempted": 448.0},
            "running 384 of 448: the KV cache was full, 3 preemptions",
        ),
        (
            "rollout-0",
            {"limit_learner": 600.0, "limit_graphs": 512.0, "limit_kv": 448.0},
            "running 384 of 448: the KV cache holds no more of this mean length",
        ),
        ("rollout-0", {"limit_graphs": 448.0}, "running 384 of 448: max_num_seqs, the captured CUDA graphs"),
        (
            "rollout-0",
            {"limit_learner": 448.0, "limit_graphs": 512.0},
            "running 384 of 448: it takes more once the learner waits",
        ),
        ("rollout-0", {"limit_sequences": 448.0, "task": 60.0}, "running 384 of 448: 60 samples are in their task"),
        (
            "rollout-0",
            {"limit_sequences": 448.0, "running": 256.0, "waiting": 184.0},
            "running 256 of 448: 184 wait inside vLLM, for its max_num_seqs or the KV cache",
        ),
        (
            "rollout-0",
            {"limit_kv": 448.0, "limit_graphs": 512.0, "running": 256.0, "waiting": 184.0},
            "running 256 of 448: the KV cache holds no more of this mean length",
        ),
        (
            "rollout-0",
            {"limit_sequences": 448.0, "running": 30.0},
            "running 30 of 448: 408 are on their way to or from vLLM",
        ),
        ("rollout-1", {"limit_sequences": 448.0}, "running 384 of 448: no more work is admitted"),
        ("rollout-0", {}, ""),
    ],
)
def test_a_server_says_how_full_it_is_and_why_not_fuller(name: str, stats: dict[str, float], words: str) -> None:
    now = state(WAITERS)
    now.servers[name]["stats"] = FULL | stats
    assert fullness(now, name) == words


def test_a_server_whose_vllm_is_starting_has_no_leases_that_ended(tmp_path: Path) -> None:
    settings, now = config(tmp_path, "tcp://127.0.0.1:9"), state([])
    now.servers["rollout-0"] |= {"version": None, "silent_s": 50.0}
    now.servers["rollout-1"] |= {"silent_s": 50.0}
    rows = status._servers_table(now, settings)
    assert list(rows.columns[1].cells)[:2] == ["?", "6"]
    first, second = list(rows.columns[3].cells)[:2]
    assert first == "50.0 s ago (has not asked for work yet)" and second == "50.0 s ago (leases ended)"


def test_all_limits_that_a_server_names_have_words() -> None:
    places = Places(16, 16)
    auto = Auto(16, 16, int)
    auto.adapt(1.0, places, FULL, False)
    named = {*auto.limits(places), *Fixed(16).limits(places)}
    assert named == set(LIMITS)


def test_rows_that_are_left_out_are_counted_in_rows_and_named() -> None:
    """Beside the share of attempts, which counts each row several times."""
    problems = {"unseen": 0, "unsolved": 7, "between": 20, "solved": 10, "retired": 4, "left_out": 13}
    lines = [f"train.jsonl line {line}: reward: KeyError: 'unit'" for line in range(1, 11)]
    now = state([]).model_copy(update={"problems": problems, "left_out": lines})
    assert failures(now).endswith("; 13 of 50 rows left out, because every attempt at them failed")
    shown = list(ledger_lines(now))
    assert "problems: unseen 0, unsolved 7, between 20, solved 10, retired 4, left out 13" in shown
    assert "left out: train.jsonl line 1: reward: KeyError: 'unit'" in shown
    assert "left out: 3 more rows; `python -m buffer problems RUN --state left_out` lists all" in shown


def test_failures_are_shares_of_all_attempts() -> None:
    now = state([]).model_copy(update={"retried": 5})
    assert failures(now) == (
        "reward failed 3 % of 263 attempts, most often [KeyError] 'answer' (8); "
        "prompt failed 1.1 % of 263 attempts, most often prompt of 2000 tokens (3); "
        "5 of 252 groups retried; 3 items dropped, most often prompt of 2000 tokens (3)"
    )


@pytest.mark.parametrize(
    ("version", "trained", "ended", "code", "words"),
    [
        pytest.param(
            60, 60, "finished: all 60 batches are formed", 0, "version 60 of 60, finished at 20", marks=pytest.mark.long
        ),
        (3, 3, "the data ended after version 3 of 60", 0, "version 3 of 60, ended at 20"),
        pytest.param(2, 2, "the data ended after version 3 of 60", 1, "dead since 20", marks=pytest.mark.long),
        pytest.param(59, 59, "finished: all 60 batches are formed", 1, "dead since 20", marks=pytest.mark.long),
        (3, 3, "", 1, "dead since 20"),
    ],
)
def test_a_run_that_ended_by_itself_does_not_look_dead(
    version: int, trained: int, ended: str, code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    write(settings, settings.run.path / "config.yaml")
    (settings.run.path / "metrics.jsonl").write_text(json.dumps({"version": version}) + "\n")
    formed = 60 if "60 batches" in ended else 3
    with closing(sqlite3.connect(settings.run.path / "buffer.sqlite")) as db:
        db.executescript(f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};" + TABLES)
        db.executemany("INSERT INTO batches VALUES (?, ?, 1, 2)", [(v, v < trained) for v in range(formed)])
        db.execute("INSERT INTO meta VALUES ('ended', ?)", [ended])
        db.commit()
    assert status.main([str(settings.run.path)]) == code
    said = capsys.readouterr().out
    assert words in said and ("does not answer" in said) is (code == 1)


def test_nobody_waits_for_a_server_that_fell_silent(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:5600")
    assert silent(state([], silent_s=10.5), settings) == ["rollout-2"]
    assert [line.partition(",")[0] for line in waits(state(WAITERS[:1], silent_s=10.5), settings)] == [
        "learner for rollout-0"
    ]


def test_a_learner_waits_for_the_server_that_has_ended_and_then_for_its_next_start(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:5600")
    ended = {"rollout-0": {"version": 6, "leases": 4, "silent_s": 1.5, "gone_s": 1.4, "stats": {}}}
    now = state(WAITERS[:1]).model_copy(update={"servers": ended})
    assert silent(now, settings) == ["rollout-0"]
    assert waits(now, settings) == ["learner for rollout-0, which ended 1 s ago, 3.2 s: batch 7 has 20 of 32 groups"]
    rows = status._servers_table(now, settings)
    assert list(rows.columns[3].cells) == ["1.5 s ago (it ended 1 s ago)"]
    starting = {"rollout-0": {"version": None, "leases": 0, "silent_s": 15.0, "stats": {}}}
    now = now.model_copy(update={"servers": starting})
    assert waits(now, settings)[0].startswith("learner for rollout-0, which is starting, silent for 15 s, 3.2 s: ")


@pytest.mark.parametrize(
    ("server", "why"),
    [
        ({"version": 6, "silent_s": 20.5}, "has been silent for 20 s"),
        ({"version": 6, "silent_s": 20.5, "gone_s": 20.4}, "ended 20 s ago"),
        ({"version": None, "silent_s": 9.5}, "is starting"),
        ({"version": None, "silent_s": 4000.4}, "is starting, silent for 4000 s"),
        ({}, "is not connected to the buffer"),
    ],
)
def test_where_no_server_works_the_learner_waits_for_the_one_that_is_missing(
    server: dict[str, Any], why: str, tmp_path: Path
) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:5600")
    kept = Kept(servers={"rollout-0": "started"}, wanted=1, least=1, most=1)
    servers = {"rollout-0": {"leases": 0, "stats": {}} | server} if server else {}
    update = {"servers": servers, "kept": kept, "recent_failed": {"reward: KeyError": 99}}
    lines = waits(state(WAITERS[:1]).model_copy(update=update), settings)
    assert lines == [f"learner for rollout-0, which {why}, 3.2 s: batch 7 has 20 of 32 groups"]


@pytest.mark.parametrize(
    ("life", "launcher_gone_s", "whom"),
    [
        ("placing", None, "rollout-1, which is being placed; rollout-0, which ended 3 s ago"),
        ("gave_up", None, "rollout-1, which gave up; rollout-0, which ended 3 s ago"),
        ("draining", None, "rollout-1, which is being drained; rollout-0, which ended 3 s ago"),
        ("started", 7.4, "rollout-0, which ended 3 s ago"),
    ],
)
def test_a_server_not_heard_of_is_missing_by_what_a_live_launcher_does_with_it(
    life: ServerLife, launcher_gone_s: float | None, whom: str, tmp_path: Path
) -> None:
    kept = Kept(servers={"rollout-0": "started", "rollout-1": life}, wanted=2, least=1, most=2)
    servers = {"rollout-0": {"version": 6, "leases": 4, "silent_s": 3.1, "gone_s": 3.0, "stats": {}}}
    update = {"servers": servers, "kept": kept, "launcher_gone_s": launcher_gone_s}
    now, settings = state(WAITERS[:1]).model_copy(update=update), config(tmp_path, "tcp://127.0.0.1:5600")
    assert waits(now, settings) == [f"learner for {whom}, 3.2 s: batch 7 has 20 of 32 groups"]
    assert lives(now, settings)["rollout-1"] == life, "a server that nobody has heard of does not generate"


@pytest.mark.parametrize("life", ["placing", "gave_up", "started"])
def test_where_some_server_is_there_a_missing_one_is_not_to_blame(life: ServerLife, tmp_path: Path) -> None:
    kept = Kept(servers={"rollout-0": "started", "rollout-1": life}, wanted=2, least=1, most=2)
    servers = {"rollout-0": {"version": 6, "leases": 0, "silent_s": 0.1, "stats": {}}}
    now = state(WAITERS[:1]).model_copy(update={"servers": servers, "kept": kept})
    (line,) = waits(now, config(tmp_path, "tcp://127.0.0.1:5600"))
    assert line == "learner for any rollout server, 3.2 s: batch 7 has 20 of 32 groups"


def test_a_server_that_has_ended_waits_for_nobody(tmp_path: Path) -> None:
    settings, now = config(tmp_path, "tcp://127.0.0.1:5600"), state(WAITERS)
    now.servers["rollout-1"] |= {"gone_s": 3.2}
    assert waits(now, settings) == ["learner for rollout-0, rollout-2, 3.2 s: batch 7 has 20 of 32 groups"]


def test_what_a_dead_server_said_last_is_not_shown_as_if_it_were_so(tmp_path: Path) -> None:
    settings, now = config(tmp_path, "tcp://127.0.0.1:5600"), state([], silent_s=10.5)
    now.servers["rollout-0"] |= {"gone_s": 3.2}
    now.servers["rollout-1"]["stats"] = now.servers["rollout-2"]["stats"] = {"tokens_per_s": 700.0}
    figures = list(status._servers_table(now, settings).columns[5].cells)
    assert figures == ["", "tokens_per_s 700", ""], "one has ended, one works, one is silent"
    rows = _server_rows(settings, now)
    assert [row[SERVER_COLUMNS.index("tokens/s")] for row in rows] == ["–", "700", "–"]
    alerts = [alert.text for alert in find_alerts(settings, Records(tmp_path / "none"), now, None, live=True)]
    assert any(text.startswith("rollout-0 is lost: it ended 3 s ago") for text in alerts)
    now.servers["rollout-0"]["version"] = None
    assert next(row[-2] for row in _server_rows(settings, now)) == "0.1 s ago (lost)"


@pytest.mark.parametrize("kept", [None, Kept(servers={"rollout-0": "started"}, wanted=1, least=1, most=8)])
def test_a_launcher_that_is_gone_is_told_and_not_the_servers_that_it_kept(kept: Kept | None, tmp_path: Path) -> None:
    now = state([]).model_copy(update={"kept": kept, "wanted_servers": 1, "launcher_gone_s": 7.4})
    line = "servers: the launcher ended 7 s ago: nobody starts, drains or restarts them"
    settings = config(tmp_path, "tcp://127.0.0.1:5600")
    assert list(servers_lines(now, settings)) == [line]
    assert Alert("bad", line) in find_alerts(settings, Records(tmp_path / "none"), now, None, live=True)


def test_status_of_a_live_run(
    serve: Callable[[State], str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, serve(state(WAITERS)))
    write(settings, settings.run.path / "config.yaml")
    assert status.main([str(settings.run.path)]) == 0
    said = capsys.readouterr().out
    assert "version 0 of 60" in said and "batch 7 is next, 7 trained" in said
    assert "rollout-0, rollout-2" in said and "3.2 s" in said and "batch 7 has 20 of 32 groups" in said
    assert "dropped 3: prompt of 2000 tokens" in said
    assert "failed attempts 8: reward: [KeyError] 'answer'" in said
    assert "generated: 252 groups, 1008 samples, mean 20.0 tokens, 10.0 sampled, 25.0 % cut at the limit" in said
    assert "ages of trained groups: 0 100, 1 124" in said
    assert "tokens_per_s 812" in said


def test_status_of_a_dead_run_tells_what_the_files_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    write(settings, tmp_path / "run.yaml")
    (settings.run.path / "logs").mkdir(parents=True)
    (settings.run.path / "checkpoints" / "v000020").mkdir(parents=True)
    (settings.run.path / "logs" / "learner.log").write_text("first\nout of memory\n")
    record = {"version": 21, "reward/mean": 0.5, "tokens_per_s": 100.0}
    (settings.run.path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert status.main([str(tmp_path / "run.yaml")]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "does not answer" in said and "version 21 of 60" in said and "reward/mean 0.5" in said
    assert "v000020" in said and "learner.log" in said and "out of memory" in said


def test_status_of_a_dead_run_reads_the_ledgers_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    write(settings, settings.run.path / "config.yaml")
    with closing(sqlite3.connect(settings.run.path / "buffer.sqlite")) as db:
        db.executescript(f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {SCHEMA};" + TABLES)
        db.executescript("""
            INSERT INTO batches VALUES (0, 1, 1, 2), (1, 0, 3, NULL);
            INSERT INTO items VALUES (0, 0, 0, 'trained', '', 0, 's#1', 1, 1, 1, 0, 4, 80, 40, 1, 0, 0, 0, 0);
            INSERT INTO items VALUES (1, 1, 0, 'leased', '', 1, 'rollout-0#f00', 2, 1, 1, -1, 0, 0, 0, 0, 0, 0, 0, 0);
            INSERT INTO items VALUES (2, 2, 0, 'stored', '', 1, 's#1', 3, 1, 1, -1, 4, 80, 40, 1, 0, 0, 0, 1234);
            INSERT INTO totals VALUES ('generated', '', 2, 8, 160, 80, 2), ('dropped', 'KeyError', 1, 0, 0, 0, 0);
            INSERT INTO totals VALUES ('failed', 'reward: KeyError', 4, 0, 0, 0, 0), ('age', '0', 1, 4, 80, 40, 1);
        """)
        db.commit()
    assert status.main([str(settings.run.path)]) == 1
    said = capsys.readouterr().out
    assert "batch 2 is next, 1 trained; 1,234 bytes" in said
    assert "items: leased 1, stored 1, trained 1" in said and "ages of trained groups: 0 1" in said
    assert "failed attempts 4: reward: KeyError" in said and "dropped 1: KeyError" in said
    assert "generated: 2 groups, 8 samples, mean 20.0 tokens, 10.0 sampled, 25.0 % cut" in said
    assert "rollout-0 " in said and "oldest_lease_s" in said
    assert "servers with leases when the buffer was last alive; whether they run is not known:" in said
    assert f"No launcher of this machine runs it, so nothing starts it again. Go on with: {LAUNCH} " in said
    held = locked(settings.run.path / "launch.lock")
    assert status.main([str(settings.run.path)]) == 1
    os.close(held)
    assert f"Its launcher, process {os.getpid()}, runs" in capsys.readouterr().out


def test_status_shows_the_certificate_of_the_model(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")

    def lines() -> list[str]:
        return [
            line for line in status._folder_lines(settings, settings.run.path, "") if line.startswith("certificate")
        ]

    assert lines() == []
    check = judged("two ranks = one", 0.5, 1e-4, fault="its LlamaAttention differs")
    made = Certificate(model="m", kind="llama", checks=(check,), remedy="take another")
    write_certificate(made, settings.run.path / CERTIFICATE)
    summary, fault = lines()
    assert summary.startswith("certificate: 0 of 1 comparisons of llama hold")
    assert fault == "certificate: two ranks = one: its LlamaAttention differs; take another"


def test_a_file_that_is_no_ledger_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    write(settings, settings.run.path / "config.yaml")
    (settings.run.path / "buffer.sqlite").write_text("no ledger, but long enough to be looked at " * 9)
    assert status.main([str(settings.run.path)]) == 1
    assert "buffer.sqlite" in capsys.readouterr().out


def test_status_of_nothing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for nothing in (tmp_path, tmp_path / "nope.yaml"):
        with pytest.raises(SystemExit) as ended:
            status.main([str(nothing)])
        assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "no config.yaml" in said and "nope.yaml: no such file" in said


def test_status_of_a_run_whose_file_was_edited_warns_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    file = settings.run.path / "config.yaml"
    write(settings, file)
    file.write_text(file.read_text().replace("versions: 60", "versions: 61"))
    assert status.main([str(settings.run.path)]) == 1
    shown = capsys.readouterr()
    assert "version 0 of 61" in shown.out and shown.err.startswith(f"warning: {file}: its text does not fit")


def test_status_shows_what_the_alerts_find(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:9")
    rows = [
        {"version": 1 + n, "age/share_4-7": 1.0, "offpolicy/k3_age_4-7": 6e-3 if n == 9 else 1e-3} for n in range(10)
    ]
    (settings.run.path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [*status._folder_lines(settings, settings.run.path, "")]
    assert [line for line in lines if line.startswith("alert: offpolicy/k3_age_4-7 is 0.006, 0.001 in the median of 9")]


def test_a_buffer_that_answers_late_is_silent(tmp_path: Path) -> None:
    assert asyncio.run(ask(config(tmp_path, "tcp://127.0.0.1:9"), 0.2)) is None


def test_how_many_servers_are_wanted_and_what_the_others_do(tmp_path: Path) -> None:
    settings = config(tmp_path, "tcp://127.0.0.1:5600")
    servers: dict[str, ServerLife] = {"rollout-0": "started", "rollout-2": "placing", "rollout-1": "gave_up"}
    kept = Kept(servers=servers, wanted=3, least=1, most=8, advice="the learner waits: raise batch.max_staleness (0)")
    now = state(WAITERS).model_copy(update={"kept": kept, "wanted_servers": 3, "wanted_by_person": True})
    assert list(servers_lines(now, settings)) == [
        "servers: 3 wanted by hand, 1 run; placing: rollout-2; gave up: rollout-1",
        "servers: the learner waits: raise batch.max_staleness (0)",
    ]
    assert list(servers_lines(state(WAITERS), settings)) == []


def test_a_server_that_its_keeper_has_started_does_not_run_before_it_asks_for_work(tmp_path: Path) -> None:
    settings, names = config(tmp_path, "tcp://127.0.0.1:5600"), [f"rollout-{number}" for number in range(7)]
    kept = Kept(servers=dict.fromkeys(names, "started"), wanted=7, least=1, most=8)
    now = state([], silent_s=20.5).model_copy(update={"kept": kept, "wanted_servers": 7})
    now.servers["rollout-0"] |= {"gone_s": 3.2}
    now.servers["rollout-3"] = {"version": None, "leases": 0, "silent_s": 4.0, "stats": {}}
    now.servers["rollout-4"] = {"version": None, "leases": 0, "silent_s": 40.0, "stats": {}}
    others = (
        "ended 3 s ago: rollout-0; has been silent for 20 s: rollout-2; "
        "starting: rollout-3, rollout-4 (silent for 40 s); not connected to the buffer: rollout-5, rollout-6"
    )
    assert list(servers_lines(now, settings)) == [f"servers: 7 wanted, 1 run; {others}"]


def test_status_says_which_teacher_servers_answer(tmp_path: Path) -> None:
    port = free_port()
    sources = "[{data_source: math, model: small, servers: 1}]"
    given = [f"--run.folder={tmp_path}", "--model.path=m", "--data.train=d.jsonl", f"--teacher.port={port}"]
    taught = load([*given, f"--teacher.by_source={sources}"])
    line = f"teacher server teacher-0 (small for rows of math) at http://127.0.0.1:{port}: "
    with socket.create_server(("127.0.0.1", port)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            connection.recv(4096)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            connection.close()

        thread = threading.Thread(target=answer)
        thread.start()
        assert list(status.teacher_lines(taught)) == [line + "answers"]
        thread.join()
    assert list(status.teacher_lines(taught)) == [line + "does not answer"]


def test_samples_that_wait_for_a_teacher_are_a_stage() -> None:
    stats = {"generating": 4.0, "teacher": 12.0, "teacher_s": 8.2, "scoring": 0.0}
    assert run_state._stages({"stats": stats}) == " (teacher 12 for 8 s, generating 4)"
