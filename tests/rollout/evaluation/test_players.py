"""Sets are read as the run file says, and played attempt by attempt."""

import asyncio
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from configs.load import ConfigError
from configs.schema import Config, EvalSet, SamplingConfig
from rollout.concurrency import Places, SparePlaces
from rollout.episodes.episode import Episodes
from rollout.errors import EngineDead
from rollout.evaluation.players import ProblemSet, load_sets, play
from rollout.tasks.trajectory import single_turn
from tests.harness.fakes import FakeEngine, FakePrompts, FakeRewards, fake_sampler, until

ROWS = [{"problem": name, "answer": "ok."} for name in "abc"]


def spare(places: int = 4) -> SparePlaces:
    return SparePlaces(Places(places, 1), 1.0)


def episodes(engine: FakeEngine) -> Episodes:
    return Episodes(FakePrompts(), single_turn, fake_sampler(engine), FakeRewards(), 1)  # type: ignore[arg-type]


def answers(*texts: str) -> FakeEngine:
    """Answers calls in turn with `texts`, again and again."""
    given = [[ord(character) for character in text] for text in texts]
    calls = iter(range(10**6))
    return FakeEngine(lambda prompt: given[next(calls) % len(given)])


async def test_each_attempt_counts_alone_and_failed_ones_are_counted_apart():
    problems = ProblemSet("set", EvalSet(path="p", samples=2, k=[1, 2]), [*ROWS, {"problem": "x" * 21, "answer": ""}])
    played = await play(problems, episodes(answers("ok.", "no.")), spare(1), keep=2)
    assert played.figures["mean@2"] == 0.5 and played.figures["pass@2"] == 1.0 and played.figures["pass^2"] == 0.0
    assert (played.figures["problems"], played.figures["failed"], played.figures["left_out@2"]) == (4.0, 2.0, 1.0)
    assert played.reasons == ["prompt of 21 tokens"]
    assert [(one["problem"]["problem"], one["answer"], one["reward"]) for one in played.examples] == [
        ("a", "ok.", 1.0),
        ("b", "ok.", 1.0),
    ]


async def test_a_reward_that_fails_is_no_attempt_unsolved():
    problems = ProblemSet("set", EvalSet(path="p", samples=2), ROWS)
    played = await play(problems, episodes(answers("ok.", "crash")), spare(1), keep=0)
    assert played.figures["mean@2"] == 1.0 and played.figures["failed"] == 3.0 and played.examples == []


async def test_no_more_attempts_at_a_time_than_places():
    engine, places = answers("ok."), Places(3, 1)
    engine.gate.clear()
    problems = ProblemSet("set", EvalSet(path="p", samples=4), ROWS)
    playing = asyncio.create_task(play(problems, episodes(engine), SparePlaces(places, 1.0), 0))
    await until(lambda: engine.running == 3)
    assert engine.running == 3 == places.taken
    engine.gate.set()
    played = await asyncio.wait_for(playing, 120)
    assert played.figures["mean@4"] == 1.0 and places.taken == 0


class RowsThatTakeTime(list[dict[str, str]]):
    """Notes in which thread each row was asked for."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        super().__init__(rows)
        self.threads: list[int] = []

    def __getitem__(self, row: Any) -> Any:
        self.threads.append(threading.get_ident())
        return super().__getitem__(row)


async def test_who_waits_for_a_row_to_be_made_does_not_stop_the_server():
    rows = RowsThatTakeTime(ROWS)
    played = await play(
        ProblemSet("set", EvalSet(path="p", samples=2), rows), episodes(answers("ok.")), spare(), keep=2
    )
    assert [one["problem"]["problem"] for one in played.examples] == ["a", "b"]
    assert len(rows.threads) == 3 and threading.get_ident() not in rows.threads


async def test_a_cancelled_evaluation_aborts_what_it_generates_and_frees_its_places():
    engine, places = answers("ok."), Places(3, 1)
    engine.gate.clear()
    problems = ProblemSet("set", EvalSet(path="p", samples=4), ROWS)
    playing = asyncio.create_task(play(problems, episodes(engine), SparePlaces(places, 1.0), 0))
    await until(lambda: engine.running == 3)
    playing.cancel()
    await asyncio.wait([playing])
    await until(lambda: engine.aborted == 3 and not places.taken)
    assert playing.cancelled() and engine.aborted == 3 and places.taken == 0


async def test_a_dead_engine_ends_it():
    def die(prompt: list[int]) -> list[int]:
        raise EngineDead("vLLM died")

    with pytest.raises(ExceptionGroup) as caught:
        await play(ProblemSet("s", EvalSet(path="p", samples=9), ROWS), episodes(FakeEngine(die)), spare(), 0)
    assert caught.group_contains(EngineDead, match="vLLM died")


async def test_tokens_of_another_version_are_never_counted():
    engine = answers("ok.")

    def swap(prompt: list[int]) -> list[int]:
        engine.version += 1
        return [ord("o")]

    engine.answer = swap
    engine.gate.clear()
    playing = asyncio.create_task(
        play(ProblemSet("s", EvalSet(path="p", samples=2), ROWS), episodes(engine), spare(), 0)
    )
    await until(lambda: engine.running)
    engine.gate.set()
    with pytest.raises(ExceptionGroup) as caught:
        await playing
    assert caught.group_contains(AssertionError, match="has tokens of versions")


def make(tmp_path: Path, **sets: dict) -> Config:
    for name, given in sets.items():
        rows = [{"problem": f"{name} {row}", "answer": "1"} for row in range(5)]
        (tmp_path / given["path"]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    sets = {name: given | {"path": str(tmp_path / given["path"])} for name, given in sets.items()}
    return Config.model_validate(
        {
            "run": {"folder": str(tmp_path)},
            "model": {"path": "m"},
            "data": {"train": "t", "eval": sets},
            "reward": {"function": "math"},
        }
    )


def test_sets_are_read_under_their_names(tmp_path: Path):
    config = make(tmp_path, easy={"path": "e.jsonl"}, hard={"path": "h.jsonl", "limit": 2, "samples": 3})
    easy, hard = load_sets(config)
    assert (easy.name, len(easy.rows), easy.rows[4]["problem"]) == ("easy", 5, "easy 4")
    assert (hard.name, len(hard.rows), hard.rows[-1]["problem"]) == ("hard", 2, "hard 1")
    assert [row["problem"] for row in hard.rows] == ["hard 0", "hard 1"] == [row["problem"] for row in hard.rows[:9]]


def test_every_set_that_cannot_be_read_is_named(tmp_path: Path):
    config = make(tmp_path, easy={"path": "e.jsonl"}, hard={"path": "h.jsonl"}, eval={"path": "x.jsonl"})
    (tmp_path / "h.jsonl").write_text("")
    (tmp_path / "x.jsonl").write_text("{")
    with pytest.raises(ConfigError) as caught:
        load_sets(config)
    hard, alone = caught.value.problems
    assert hard.startswith("data.eval.hard ") and alone.startswith("data.eval ")


def test_one_answer_is_greedy_and_several_are_sampled_as_the_run_trains():
    run = SamplingConfig(temperature=0.7)
    assert EvalSet(path="p").temperature_of(run) == 0.0
    assert EvalSet(path="p", samples=2).temperature_of(run) == 0.7
    assert EvalSet(path="p", samples=2, temperature=0.3).temperature_of(run) == 0.3
    assert EvalSet(path="p", temperature=1.0).temperature_of(run) == 1.0
