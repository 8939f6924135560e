"""`python -m buffer problems RUN`: what the ledger's file knows of each problem is what the live ledger knows."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer import inspect, problem_list
from buffer.__main__ import restored
from buffer.ledger import reasons
from buffer.ledger.rules import Ledger
from buffer.ledger.types import SampleStats, Transaction
from buffer.problems import load_problems
from buffer.store import sql
from buffer.store.sqlite import Store, reading
from buffer.wire.server import ListeningClock
from configs.load import load, write
from configs.resume import settings as settings_of
from configs.schema import Config
from tests.buffer.store.test_damage import as_schema_3, as_schema_4

REWARDS = {"none": (0.0, 0.0), "some": (1.0, 0.0), "all": (1.0, 1.0)}


def run_of(folder: Path, *more: str) -> Config:
    """A run over six lines, of which the second is blank."""
    lines = [json.dumps({"problem": f"{n} + 1", "answer": str(n)}) for n in range(6)]
    (folder / "train.jsonl").write_text("\n\n".join(lines[:2]) + "\n" + "\n".join(lines[2:]) + "\n")
    words = [f"model.path={folder}", f"data.train={folder}/train.jsonl", "reward.function=math", f"run.folder={folder}"]
    words += ["batch.groups=2", "batch.max_staleness=0", "rollout.attempts=2", "data.shuffle=false", *more]
    return load([f"--{word}" for word in words])


def play(config: Config, kinds: dict[int, str], versions: int) -> Ledger:
    """Make and train batches, with a restart before each; a row of kind `fails` fails."""
    problems = load_problems(config.data.train, config.data)
    config.run.path.mkdir(parents=True, exist_ok=True)
    write(config, config.run.path / "config.yaml")
    for version in range(versions):
        file = config.run.path / "buffer.sqlite"
        with Store(file, False, problems, problems.digest, problems.place) as store:
            store.record_settings(settings_of(config), [])
            ledger = restored(config, store, problems, ListeningClock())
            ledger.batches.rewind(ledger.state.version)
            while work := ledger.ask("s#1", ledger.state.version, 9, 0.0, ledger.state.next_lease + 1):
                for it in work:
                    if (kind := kinds.get(it.index, "some")) == "fails":
                        ledger.fail("s#1", it.item, it.lease, "score raised KeyError: 'unit'", 0.0, kind="reward")
                    else:
                        group = tuple(SampleStats(4, 2, reward) for reward in REWARDS[kind])
                        ledger.put("s#1", it.item, it.lease, group, 0.0)
            if ledger.batches.take(version) is not None:
                ledger.batches.trained(version)
            store.commit(Transaction(ledger.drain()))
    return ledger


def printed(config: Config, capsys: pytest.CaptureFixture[str], *more: str) -> list[str]:
    assert inspect.main(["problems", *more, str(config.run.path)]) == 0
    return capsys.readouterr().out.splitlines()


def test_each_problem_has_a_line_with_its_figures_and_where_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_of(tmp_path)
    play(config, {0: "none", 1: "fails", 2: "all"}, 3)
    head, _, *lines = printed(config, capsys)
    assert head == "6 problems: 0 unseen, 1 unsolved, 3 between, 1 solved, 1 left out"
    assert lines[0].split() == ["0", "0.000", "4", "2", "0", "2", "unsolved", f"{tmp_path}/train.jsonl", "line", "1"]
    assert lines[1].split()[:5] == ["1", "0", "0", "2", "1"]
    assert lines[1].endswith(f"left out  {tmp_path}/train.jsonl line 3: reward: score raised KeyError: 'unit'")
    assert lines[2].split()[:2] == ["2", "1.000"] and "solved" in lines[2] and lines[2].endswith("line 4")
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3", "4", "5"]
    assert [line.split()[0] for line in printed(config, capsys, "--state", "between")[2:]] == ["3", "4", "5"]
    with pytest.raises(SystemExit):
        inspect.main(["problems", "--state", "tricky", str(config.run.path)])
    assert "tricky" in capsys.readouterr().err


@settings(max_examples=12, deadline=None)
@given(
    st.dictionaries(st.integers(0, 5), st.sampled_from([*REWARDS, "fails"])),
    st.integers(1, 6),
    st.sampled_from(["null", "{}", "{groups: 1, rest: 1, return_after: 2, solved_at: 0.5}"]),
)
def test_the_file_says_what_the_live_ledger_says(
    tmp_path_factory: pytest.TempPathFactory, kinds: dict[int, str], versions: int, difficulty: str
) -> None:
    config = run_of(tmp_path_factory.mktemp("run"), f"data.difficulty={difficulty}")
    ledger = play(config, kinds, versions)
    ledger.upcoming(1)
    with closing(reading(config.run.path / "buffer.sqlite")) as db:
        counts, left_out = problem_list.counts(db)
    assert counts == ledger.view.problems_by_state() and left_out == reasons.left_out(ledger)
    assert set(ledger.view.left_out()) == {row for row, kind in kinds.items() if kind == "fails"} & set(
        ledger.state.rows.records
    )


@pytest.mark.parametrize("older", [as_schema_3, as_schema_4])
def test_a_run_of_an_earlier_release_goes_on_and_is_counted_from_then(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], older: Any
) -> None:
    config = run_of(tmp_path)
    play(config, {}, 2)
    file = config.run.path / "buffer.sqlite"
    older(file)
    assert printed(config, capsys)[0] == "6 problems: 6 unseen, 0 unsolved, 0 between, 0 solved, 0 left out"
    play(config, {1: "none"}, 4)
    head, since, _, *lines = printed(config, capsys)
    assert "counted from item 4 on" in since and len(lines) == 4
    assert head == "6 problems: 2 unseen, 1 unsolved, 3 between, 0 solved, 0 left out"
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA user_version").fetchone() == (sql.SCHEMA,)
