"""Rows and scores of reasoning-gym: the package's own, wherever an entry is made, and no wait for slow sets."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgpack
import psutil
import pytest

from buffer.data.entry_maker import EntryError, EntryMaker, GeneratedRows, MakerEnded, entry_maker
from buffer.problems import READ_AHEAD, ProblemsError, load_problems
from configs.data.sources import count_rows, generated
from configs.schema import DataConfig, RewardConfig
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer
from rollout.rewards.workers import RewardPool
from tests.harness.lanes import long_but

BY_HASH_SEED = ["isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"]
"""Sets that make other entries, or other answers, under another hash seed."""
BY_GLOBAL_SEED = ["list_functions"]
TUPLES = ["arc_agi", "rearc"]
"""Sets that score by tuples, which no message keeps."""
OTHERS = ["leg_counting", "countdown", "chain_sum", "maze", "sudoku", "basic_arithmetic", "tower_of_hanoi", "syllogism"]
UNSHOWN = ["graph_color", "rubiks_cube", "rush_hour", "boxnet", "propositional_logic"]
"""Sets without an answer to show."""


@pytest.fixture(scope="module")
def other() -> Iterator[EntryMaker]:
    """A second process that makes entries, as another machine would."""
    maker = EntryMaker()
    yield maker
    maker.close()


def problems(source: str):
    return load_problems(source, DataConfig(train=source))


@pytest.mark.parametrize("name", long_but([*BY_HASH_SEED, *BY_GLOBAL_SEED, *TUPLES, *OTHERS], 0, 1, 9, 10, 15))
def test_the_answer_that_is_shown_scores_1_in_another_process(name: str, other: EntryMaker) -> None:
    rows = problems(f"reasoning_gym:{name}?size=20&seed=8")  # whose knight_swap takes 2 s at most
    rows.expect(lambda: range(4))
    for index in (3, 0):  # not in the order in which they were made
        row = msgpack.unpackb(msgpack.packb(rows[index]))
        entry = row["extra_info"]["reasoning_gym"]
        named = name, json.dumps(entry["config"], sort_keys=True), index, entry["question_sha256"]
        text = f"So: <answer>no</answer> <answer>{row['answer']}</answer>"
        assert other.ask("score", *named, text).result() == {"score": 1.0, "formed": 1.0}
        assert other.ask("score", *named, row["answer"]).result()["formed"] == 0.0


def own_score(made: Any, text: str, entry: dict[str, Any]) -> tuple[float, float]:
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(text)
    try:
        return float(made.score_answer(answer, entry)), float(answer is not None)
    except Exception:  # boxnet raises for "7"
        return float(made.score_answer(None, entry)), 0.0


@pytest.mark.parametrize("name", [*OTHERS, *UNSHOWN])
def test_scores_are_those_of_the_package(name: str) -> None:
    import reasoning_gym  # slow to import: other files must not wait for it

    rows = problems(f"reasoning_gym:{name}?size=20&seed=3")
    reward, made = (
        load_reward(RewardConfig(function="reasoning_gym")),
        reasoning_gym.create_dataset(name, size=20, seed=3),
    )
    assert ("answer" in rows[1]) == (name not in UNSHOWN)
    for index in range(3):
        entry, row = made[index], rows[index]
        assert row["problem"] == entry["question"] and row["data_source"] == f"reasoning_gym/{name}"
        answer = entry["answer"] or "1 2"
        for text in (answer, f"<answer>{answer}</answer>", f"<answer>{answer[:-1]}</answer>", "<answer>\n7 </answer>"):
            (score,) = reward.score([Answer(text, 9, row)])
            own, formed = own_score(made, text, entry)
            assert score.reward == pytest.approx(own) and score.metrics == {"formed": formed, "gave_up": 0.0}


def test_the_reward_scores_in_its_worker_and_names_another_entry() -> None:
    row = problems("reasoning_gym:leg_counting?size=20&seed=3")[5]
    changed = {"name": "leg_counting", "config": {"size": 20, "seed": 4}, "index": 5, "question_sha256": "0" * 64}
    other = row | {"extra_info": {"reasoning_gym": changed}}

    async def score() -> None:
        async with RewardPool(RewardConfig(function="reasoning_gym")) as pool:
            answers = [Answer(f"<answer>{text}</answer>", 3, row) for text in (row["answer"], "no")]
            assert [score.reward for score in await pool.score(answers)] == [1.0, 0.0]
            with pytest.raises(RewardError, match="entry 5 of leg_counting is another than in the row"):
                await pool.score([Answer("", 0, other)])

    asyncio.run(score())


def test_sources_that_cannot_be_made_are_refused_in_one_line() -> None:
    known = "it has min_animals, max_animals, min_instances, max_instances, seed, size"
    for query, words in [
        ("leg_count?size=9&seed=1", "has no set leg_count; did you mean leg_counting?"),
        ("leg_counting?size=9&seed=1&animals=3", f"leg_counting has no animals; {known}"),
        ("leg_counting?size=9&seed=1&min_animals=-3", "leg_counting refuses its config: AssertionError: min_animals"),
        ("leg_counting?size=9", "seed is missing; write both, such as reasoning_gym:leg_counting?size=10000&seed=1"),
        ("leg_counting?size=many&seed=1", "size is 'many', no whole number >= 1"),
        ("leg_counting?size=9&seed", "not reasoning_gym:NAME?size=N&seed=S"),
        ("composite?size=9&seed=1", "names no single set"),
    ]:
        with pytest.raises(ProblemsError) as error:
            problems(f"reasoning_gym:{query}")
        assert words in str(error.value) and "\n" not in str(error.value)
        assert str(error.value).startswith(f"data.train reasoning_gym:{query}: ")


def test_the_digest_is_of_name_and_config() -> None:
    digests = {
        problems(f"reasoning_gym:{query}").digest
        for query in ("gcd?size=9&seed=1", "gcd?seed=1&size=9", "gcd?size=9&seed=2", "lcm?size=9&seed=1")
    }
    assert len(digests) == 3


def test_sets_and_files_make_a_mixture(tmp_path: Path) -> None:
    (tmp_path / "own.jsonl").write_text('{"problem": "1+1", "answer": "2"}\n')
    names = [{"path": str(tmp_path / "own.jsonl")}, {"path": "reasoning_gym:gcd?size=9&seed=1&max_value=20"}]
    config = DataConfig.model_validate({"train": names})
    mixture = load_problems(config.train, config)
    assert len(mixture) == count_rows(config.train) == 10 and mixture[0]["problem"] == "1+1"
    assert mixture[9]["extra_info"]["reasoning_gym"]["index"] == 8
    assert [row.get("data_source") for row in mixture] == [None] + ["reasoning_gym/gcd"] * 9


@pytest.mark.long
def test_rows_that_are_expected_do_not_stop_who_expects_them() -> None:
    """An entry of this set takes 0.3 s in the mean."""
    rows = problems("reasoning_gym:knight_swap?size=1000&seed=1")
    expected = range(READ_AHEAD)
    rows.expect(lambda: expected)
    assert rows.num_ready(lambda: expected) < READ_AHEAD / 2
    assert problems("reasoning_gym:gcd?size=9&seed=1")[3]["problem"]  # what is needed now comes first
    assert rows.num_ready(lambda: expected) < READ_AHEAD / 2
    entry_maker().close()


def test_an_entry_that_cannot_be_made_is_a_row_with_the_reason() -> None:
    made = generated("reasoning_gym:list_functions?size=3&seed=1")
    assert made is not None
    row = GeneratedRows(made)(7)
    assert "problem" not in row and row["unmade"].startswith("list_functions cannot make entry 7: IndexError: ")


def test_another_process_is_started_where_one_has_died() -> None:
    rows = problems("reasoning_gym:gcd?size=9&seed=1")
    assert entry_maker()._process is not None
    child = psutil.Process(entry_maker()._process.pid)
    child.suspend()
    waiting = entry_maker().ask("row", "gcd", '{"seed": 1, "size": 9}', 5)
    rows.expect(lambda: [6])
    child.kill()
    with pytest.raises(EntryError, match="the process that makes entries ended with exit code -9"):
        waiting.result()
    assert rows[6]["problem"] and rows[7]["problem"]


def test_rows_that_were_read_ahead_and_lost_are_made_again_before_they_count_as_made() -> None:
    made = generated("reasoning_gym:gcd?size=9&seed=1")
    assert made is not None
    rows = GeneratedRows(made)

    def kill(row: int) -> None:
        """End the process before it has made this row."""
        with pytest.raises(EntryError, match="exit code -9"):
            child.kill()
            rows._rows[row].result(20)

    child = psutil.Process(entry_maker()._process.pid)  # type: ignore[union-attr]
    child.suspend()
    rows.expect([5, 6, 7])
    kill(7)
    assert not any(rows.is_made(row) for row in (5, 6, 7)), "nobody is to wait for them one by one"
    rows._rows[7].result(20)
    assert all(rows.is_made(row) for row in (5, 6, 7)) and rows(6)["problem"]

    child = psutil.Process(entry_maker()._process.pid)  # type: ignore[union-attr]
    child.suspend()
    rows.expect([8])
    kill(8)
    assert not rows.is_made(8)
    child = psutil.Process(entry_maker()._process.pid)  # type: ignore[union-attr]
    kill(8)
    assert rows.is_made(8), "it may be what ends the process: who asks for it finds out"
    assert rows(8)["problem"]


def test_the_process_ends_with_its_parent() -> None:
    code = """
import time
from buffer.data.entry_maker import entry_maker
print(entry_maker().ask("about", "gcd", '{"size": 9, "seed": 1}').result()["version"], flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as parent:
        try:
            assert parent.stdout is not None and parent.stdout.readline().strip() == version("reasoning-gym")
            (child,) = psutil.Process(parent.pid).children()
        finally:
            os.kill(parent.pid, signal.SIGKILL)
    child.wait(120)


def test_what_takes_too_long_is_ended() -> None:
    """In a process of its own, which has a second for each request: a set that catches all it can does not end it."""
    code = """
import signal, time
from buffer.data import entries
def endless():
    while True:
        try:
            time.sleep(0.01)
        except Exception:
            pass
entries.VERBS |= {"endless": endless, "nothing": dict}
entries.ENTRY_S = 1
signal.signal(signal.SIGALRM, entries.late)
print(entries.answered("endless", []), entries.answered("nothing", []))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "{'error': 'endless took longer than 1 s'} {}"


def test_a_process_that_ends_while_it_writes_an_answer_fails_all_that_it_was_asked() -> None:
    """As one that the kernel kills while the pipe is full: nobody may wait for an answer for ever."""
    code = "import sys; sys.stdin.readline(); sys.stdin.readline(); print('[0, {\\'quest', end='')"
    maker = EntryMaker(["-c", code])
    for answer in [maker.ask("start"), maker.ask("start")]:
        with pytest.raises(MakerEnded):
            answer.result(60)
    maker.close()
