"""Episodes with teachers: what a teacher says is at its tokens, a teacher that says nothing fails the attempt, and no
token ever gets a 0 in its place."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from buffer.wire.message import Array
from buffer.wire.protocol import WorkItem
from buffer.wire.sample import Sample, sample_stats
from buffer.wire.values import Bounds
from configs.load import load
from configs.schema import TeacherConfig
from rollout.engine.reward_limits import MOST_BODY
from rollout.episodes.episode import Episodes, Failure, Group
from rollout.episodes.setup import RolloutSetup
from rollout.rewards.no_reward import NoReward
from rollout.tasks.trajectory import Generate, Problem, Recorded, Trajectory, single_turn
from rollout.teachers.messages import PATH, Scores, ScoreTexts, packed, parts_of, read_request
from rollout.teachers.scoring import Teachers
from rollout.teachers.teacher_client import OwnTeacher
from tests.harness.fakes import FakeEngine, FakePrompts, FakeRewards, fake_sampler, until
from tests.harness.keys import TOKEN, give_keys
from tests.harness.model_server import ModelServer
from tests.harness.ports import free_port
from tests.harness.teaching import OTHERS, answered, by_context, completions, scores, teacher_server
from tests.harness.toy import ROOT
from tests.rollout.chat.chat_templates import chat_tokenizer

VOCABULARY = 151936
RUN = ROOT / "examples/countdown/quickstart.yaml"


def item(problem: str = "1+1=", **columns: Any) -> WorkItem:
    return WorkItem(item=7, lease=70, version=3, problem={"problem": problem, "answer": "2.", **columns})


@asynccontextmanager
async def episodes(
    config: TeacherConfig, keys: Path = Path("none"), task: Any = single_turn, rewards: Any = None, answer: str = "2."
) -> AsyncIterator[Episodes]:
    """Episodes of three samples with these teachers, which answer `answer`."""
    engine = FakeEngine(lambda prompt: [ord(character) for character in answer])
    async with Teachers(config, keys, VOCABULARY) as teachers:
        for each in teachers._by_source.values():
            each._client._first_wait_s = 0.001
        yield Episodes(FakePrompts(), task, fake_sampler(engine), rewards or FakeRewards(), 3, teachers=teachers)  # type: ignore[arg-type]


def expected(sample: Sample, opinion: Callable[..., float] = by_context) -> list[float]:
    """The teacher's log-probabilities, each segment a text by itself."""
    tokens, sampled, found = sample.tokens.numpy().tolist(), sample.sampled.numpy() != 0, []
    for start, stop in sample.bounds:
        text = tokens[start:stop]
        found += [opinion(text, place) if sampled[start + place] else 0.0 for place in range(len(text))]
    return found


async def test_a_group_is_asked_about_in_one_request_and_each_sampled_token_gets_its_own() -> None:
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url, model="big", tokenizer="t")) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group)
    ((path, _, body),) = server.requests
    assert path == "/v1/completions" and body["model"] == "big" and body["prompt"] == [[49, 43, 49, 61, 50, 46]] * 3
    for sample in outcome.samples:
        assert sample.teacher == "" and sample.teacher_logprobs is not None
        assert sample.teacher_logprobs.numpy().tolist() == expected(sample)
        assert sample_stats(sample.pack(), Bounds(teachers=frozenset({""}))).reward == 1.0
    assert made.stages.stats()["scoring"] == 0


async def forks(problem: Problem, generate: Generate) -> Recorded:
    """Two turns in one segment, and a third in a segment of its own."""
    made = Trajectory(problem.prompt)
    made.take(await generate(made.tokens))
    made.give([ord("?")])
    made.take(await generate(made.tokens))
    made.starts.append(len(made.tokens))
    made.give([*problem.prompt, ord("!")])
    made.take(await generate(made.tokens[made.starts[1] :]))
    return Recorded(made, None)


async def test_of_several_turns_and_segments_only_sampled_tokens_count_in_their_own_context() -> None:
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url), task=forks) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group)
    (sample, *_) = outcome.samples
    assert sample.starts == [0, 9] and sample.teacher_logprobs is not None
    assert sample.teacher_logprobs.numpy().tolist() == expected(sample)
    assert np.flatnonzero(sample.teacher_logprobs.numpy()).tolist() == [4, 5, 7, 8, 14, 15]
    assert len(server.requests[0][2]["prompt"]) == 6


async def test_the_most_probable_tokens_come_in_place_of_each_sampled_one_of_all_segments() -> None:
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url, top_k=3), task=forks) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group) and server.requests[0][2]["prompt_logprobs"] == 3
    (sample, *_) = outcome.samples
    top, sampled = sample.teacher_top, sample.sampled.numpy() != 0
    assert top is not None and sample.teacher_logprobs is not None
    assert top.ids.numpy().tolist() == [
        [token, OTHERS, OTHERS + 1] for token in sample.tokens.numpy()[sampled].tolist()
    ]
    own = sample.teacher_logprobs.numpy()[sampled].tolist()
    assert top.logprobs.numpy().tolist() == [[logprob, -8.0, -9.0] for logprob in own]
    assert sample_stats(sample.pack(), Bounds(teachers=frozenset({""}), top_k=3)).sampled == 6


def spoiled(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """Completions of which the last token's entry is spoiled by `change`."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        made = completions(body)
        change(made["choices"][0]["prompt_logprobs"][-1])
        return 200, made

    return reply


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda entry: entry.pop(str(OTHERS)) and entry.pop(str(OTHERS + 1)), "2 tokens at 5; teacher.top_k is 3"),
        (lambda entry: entry.update({str(OTHERS): {"logprob": None}}), "log-probability None of token 1000 at 5"),
        (lambda entry: entry.update({"-1": {"logprob": -1.0}}), "log-probability -1.0 of token -1 at 5"),
        (lambda entry: entry.update({"x": {"logprob": -1.0}}), "no tokens at 5 but"),
    ],
)
async def test_an_answer_without_so_many_sound_tokens_fails_the_attempt(change: Any, reason: str) -> None:
    async with (
        ModelServer(spoiled(change)) as server,
        episodes(TeacherConfig(url=server.url, top_k=3)) as made,
    ):
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "engine" and reason in outcome.reason


async def test_tokens_that_a_task_left_as_numpy_s_are_sent_as_numbers() -> None:
    async def numpy_s(problem: Problem, generate: Generate) -> Trajectory:
        made = await single_turn(problem, generate)
        made.tokens = list(np.array(made.tokens, np.int64))
        return made

    async with teacher_server() as server, episodes(TeacherConfig(url=server.url), task=numpy_s) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group) and server.requests[0][2]["prompt"][0] == [49, 43, 49, 61, 50, 46]


async def test_each_row_has_the_teacher_of_its_data_source() -> None:
    async with teacher_server(lambda text, place: -1.5) as math, teacher_server(lambda text, place: -3.0) as rest:
        by_source = [{"data_source": "math", "url": math.url}]
        config = TeacherConfig(url=rest.url, by_source=by_source)  # type: ignore[arg-type]
        async with episodes(config) as made:
            found = [await made.run(item(data_source=source)) for source in ("math", "code")] + [await made.run(item())]
        only = TeacherConfig(by_source=by_source)  # type: ignore[arg-type]
        async with episodes(only) as made:
            untaught = await made.run(item(data_source="code"))
    samples = [outcome.samples[0] for outcome in found if isinstance(outcome, Group)]
    assert [sample.teacher for sample in samples] == ["math", "", ""]
    assert [set(sample.teacher_logprobs.numpy().tolist()) for sample in samples if sample.teacher_logprobs] == [
        {0.0, -1.5},
        {0.0, -3.0},
        {0.0, -3.0},
    ]
    assert isinstance(untaught, Group) and untaught.samples[0].teacher_logprobs is None


async def test_a_teacher_that_cannot_answer_for_a_while_is_asked_again() -> None:
    replies = [(503, "loading"), (0, ""), (429, "later")]
    reply = lambda body, number: replies[number] if number < 3 else (200, completions(body))  # noqa: E731
    async with ModelServer(reply) as server, episodes(TeacherConfig(url=server.url)) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group) and len(server.requests) == 4
    assert outcome.samples[0].teacher_logprobs.numpy().tolist() == expected(outcome.samples[0])  # type: ignore[union-attr]


@pytest.mark.parametrize("status", [503, 0])
async def test_a_teacher_that_never_answers_is_a_failure_of_the_infrastructure(status: int) -> None:
    async with (
        ModelServer(lambda body, number: (status, "out of order")) as server,
        episodes(TeacherConfig(url=server.url, retries=2)) as made,
    ):
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "infrastructure" and not outcome.permanent
    assert server.url in outcome.reason and len(server.requests) == 3


async def test_a_teacher_that_is_too_slow_is_a_failure_of_the_infrastructure() -> None:
    async with (
        teacher_server(delay_s=5.0) as server,
        episodes(TeacherConfig(url=server.url, retries=1, timeout_s=0.05)) as made,
    ):
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "infrastructure"
    assert "no answer within timeout_s (0.05 s)" in outcome.reason and len(server.requests) == 2


def without(change: Callable[[dict[str, Any]], object]) -> Callable[[dict[str, Any], int], tuple[int, Any]]:
    """Completions that `change` has spoiled."""

    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        answer = completions(body)
        change(answer)
        return 200, answer

    return reply


def at_last(answer: dict[str, Any]) -> dict[str, Any]:
    return answer["choices"][0]["prompt_logprobs"][-1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda answer: answer["choices"].pop(), "2 completions, of texts [1, 2], for 3 texts"),
        (lambda answer: answer["choices"][0].update(index=0), "3 completions, of texts [0, 0, 1], for 3 texts"),
        (lambda answer: answer["choices"][0].update(index="x"), "teacher: no completions but {'object'"),
        (lambda answer: answer.pop("choices"), "teacher: no completions but {'object'"),
        (lambda answer: answer["choices"][1].update(prompt_logprobs=None), "0 tokens for 6; does its server know"),
        (lambda answer: answer["choices"][1]["prompt_logprobs"].pop(), "of 5 tokens for 6; it cuts texts"),
        (lambda answer: at_last(answer).clear(), "teacher: no log-probability of token 46 at 5"),
        (lambda answer: at_last(answer)["46"].update(logprob=None), "token 46 at 5 is None"),
        (lambda answer: at_last(answer)["46"].update(logprob="-0.5"), "token 46 at 5 is '-0.5'"),
        (lambda answer: at_last(answer)["46"].update(logprob=True), "token 46 at 5 is True"),
        (lambda answer: at_last(answer)["46"].update(logprob=-(10**400)), "token 46 at 5 is -1000"),
        (lambda answer: at_last(answer)["46"].update(logprob=-1e300), "token 46 at 5 is -1e+300"),
        (lambda answer: at_last(answer)["46"].update(logprob=float("nan")), "token 46 at 5 is nan"),
        (lambda answer: at_last(answer)["46"].update(logprob=float("-inf")), "token 46 at 5 is -inf"),
    ],
)
async def test_an_answer_that_lacks_a_number_is_an_error_and_no_zero(change: Any, words: str) -> None:
    async with ModelServer(without(change)) as server, episodes(TeacherConfig(url=server.url)) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and words in outcome.reason and outcome.kind == "engine"
    assert len(server.requests) == 1


async def test_a_request_that_the_server_refuses_counts_against_the_run() -> None:
    async with (
        ModelServer(lambda body, number: (404, '{"message": "no model big"}')) as server,
        episodes(TeacherConfig(url=server.url, model="big", tokenizer="t")) as made,
    ):
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "engine" and "status 404: " in outcome.reason


async def test_a_reward_that_fails_beside_a_teacher_fails_the_attempt() -> None:
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url), answer="crash") as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "reward"


async def test_without_a_reward_the_teacher_is_all_there_is() -> None:
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url), rewards=NoReward()) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Group) and [sample.reward for sample in outcome.samples] == [0.0] * 3
    assert outcome.samples[0].teacher_logprobs is not None


async def test_an_evaluation_asks_no_teacher() -> None:
    """Its episodes are made by the setup of a run with teachers."""
    config, engine = load([str(RUN)]), FakeEngine(lambda prompt: [ord("2"), ord(".")])
    async with teacher_server() as server, Teachers(TeacherConfig(url=server.url), Path("none")) as teachers:
        setup = RolloutSetup(FakePrompts(), single_turn, FakeRewards(), teachers=teachers)  # type: ignore[arg-type]
        outcome = await setup.episodes(config, engine, 0.0, 1).run(item())  # type: ignore[arg-type]
        assert server.requests == []
    assert isinstance(outcome, Group) and outcome.samples[0].teacher_logprobs is None


async def test_the_runs_own_teacher_is_waited_for_and_asked_with_the_token(tmp_path: Path) -> None:
    """As long as it takes: at the start, and after it was lost with a request. Each group is asked about until it has
    an answer, and made once."""
    port, keys = free_port(), give_keys(tmp_path / "run")
    config = TeacherConfig(model="big", servers=1, port=port)
    async with episodes(config, keys) as made:
        teachers = made.teachers
        assert teachers is not None
        early = asyncio.create_task(made.run(item()))
        await until(lambda: teachers.stats()["teacher"] == 3.0)
        assert not early.done() and teachers.stats()["teacher"] == 3.0
        reply = lambda body, number: (0, "") if number == 0 else (200, answered(body))  # noqa: E731
        async with ModelServer(reply, port=port) as server:
            outcome = await asyncio.wait_for(early, 120)
        assert [headers["Authorization"] for _, headers, _ in server.requests] == [f"Bearer {TOKEN}"] * 2
        late = asyncio.create_task(made.run(item()))
        await asyncio.sleep(0.1)
        assert not late.done()
        async with teacher_server(port=port):
            again = await asyncio.wait_for(late, 120)
        figures = made.teachers.stats()
    for each in (outcome, again):
        assert isinstance(each, Group)
        assert each.samples[2].teacher_logprobs.numpy().tolist() == expected(each.samples[2])  # type: ignore[union-attr]
    assert figures["teacher"] == 0.0 and figures["teacher_tokens_per_s"] > 0 and "teacher_s" not in figures


async def test_a_request_that_loses_the_runs_own_teacher_each_time_fails(tmp_path: Path) -> None:
    port, keys = free_port(), give_keys(tmp_path / "run")
    config = TeacherConfig(model="big", servers=1, port=port)
    async with episodes(config, keys) as made, ModelServer(lambda body, number: (0, ""), port=port) as server:
        outcome = await asyncio.wait_for(made.run(item()), 120)
    assert isinstance(outcome, Failure) and outcome.kind == "infrastructure" and len(server.requests) == 3


@pytest.mark.parametrize(("failures", "requests"), [(3, 4), (9, 6)])
async def test_the_runs_own_teacher_is_asked_again_after_its_engine_died(
    failures: int, requests: int, tmp_path: Path
) -> None:
    """vLLM's server answers with status 500 for some seconds then. It is waited for when the retries are over."""
    port, keys = free_port(), give_keys(tmp_path / "run")
    config = TeacherConfig(model="big", servers=1, port=port, retries=1)
    reply = lambda body, number: (500, "") if number < failures else (200, answered(body))  # noqa: E731
    async with episodes(config, keys) as made, ModelServer(reply, port=port) as server:
        outcome = await asyncio.wait_for(made.run(item()), 120)
    assert isinstance(outcome, Failure if failures > requests else Group) and len(server.requests) == requests


async def test_a_group_beyond_one_request_is_asked_about_in_several(tmp_path: Path) -> None:
    config = TeacherConfig(model="big", servers=1, port=free_port())
    reply = lambda body, number: (200, answered(body))  # noqa: E731
    async with (
        ModelServer(reply, port=config.port) as server,
        episodes(config, give_keys(tmp_path / "run")) as made,
    ):
        assert made.teachers is not None
        client = made.teachers._by_source[""]._client
        assert isinstance(client, OwnTeacher)
        client._most_bytes = 400
        outcome = await made.run(item())
    assert isinstance(outcome, Group) and [len(read_request(body).texts) for *_, body in server.requests] == [2, 1]
    for sample in outcome.samples:
        assert sample.teacher_logprobs is not None and sample.teacher_logprobs.numpy().tolist() == expected(sample)


def test_a_teacher_is_asked_for_tokens_of_the_policy_s_vocabulary(tmp_path: Path) -> None:
    """With the rows of its embedding that no token has."""
    chat_tokenizer("qwen2.5").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"vocab_size": 9999}')
    words = (f"--model.path={tmp_path}", f"--teacher.model={tmp_path}", "--teacher.servers=1")
    prompts = FakePrompts()
    prompts.tokenizer = AutoTokenizer.from_pretrained(tmp_path)  # type: ignore[attr-defined]
    made = RolloutSetup(prompts, single_turn, None).with_teachers(load([str(RUN), *words])).teachers  # type: ignore[arg-type]
    assert made is not None
    client = made._by_source[""]._client
    assert isinstance(client, OwnTeacher) and client.vocabulary == 9999


def test_a_server_takes_each_of_several_requests() -> None:
    for texts in ([range(6_000_000)] * 3, [range(100)] * 150_000):
        for part in parts_of(texts):
            arrays = [[Array.of(np.zeros(len(text), kind)) for text in texts[part]] for kind in (np.int32, np.uint8)]
            asked = ScoreTexts(model="m" * 200, texts=arrays[0], sampled=arrays[1], top_k=64, vocabulary=151936)
            assert len(packed(asked)) < MOST_BODY


async def test_an_episode_that_is_abandoned_leaves_no_request(tmp_path: Path) -> None:
    config = TeacherConfig(model="big", servers=1, port=free_port())
    async with episodes(config, give_keys(tmp_path / "run")) as made:
        waiting = asyncio.create_task(made.run(item()))
        teachers = made.teachers
        assert teachers is not None
        await until(lambda: teachers.stats()["teacher"] == 3.0)
        made.abandon([70], Failure("the buffer took the lease back"))
        assert await asyncio.wait_for(waiting, 60) == Failure("the buffer took the lease back")
        assert made.teachers is not None
        await asyncio.sleep(0)
        assert made.teachers.stats()["teacher"] == 0.0


@asynccontextmanager
async def own_teacher(folder: Path, change: Callable[[Scores], Any], top_k: int | None = 2) -> AsyncIterator[Episodes]:
    """Episodes whose teacher is a server of the run that answers what `change` makes of the right answer."""
    port, keys = free_port(), give_keys(folder / "run")
    config = TeacherConfig(model="big", servers=1, port=port, top_k=top_k)
    reply = lambda body, number: (200, change(scores(body)))  # noqa: E731
    async with ModelServer(reply, port=port) as server, episodes(config, keys) as made:
        yield made
    asked = [(path, read_request(body)) for path, _, body in server.requests]
    assert {(path, each.model, each.vocabulary) for path, each in asked} == {(PATH, "big", VOCABULARY)}


@pytest.mark.parametrize("top_k", [None, 2])
async def test_the_runs_own_teacher_gives_what_another_server_gives(tmp_path: Path, top_k: int | None) -> None:
    async with own_teacher(tmp_path, packed, top_k) as made:
        own = await made.run(item())
    async with teacher_server() as server, episodes(TeacherConfig(url=server.url, top_k=top_k)) as made:
        other = await made.run(item())
    assert isinstance(own, Group) and isinstance(other, Group)
    for mine, theirs in zip(own.samples, other.samples, strict=True):
        assert mine.teacher_logprobs.numpy().tolist() == theirs.teacher_logprobs.numpy().tolist() == expected(mine)
        tops = mine.teacher_top, theirs.teacher_top
        if top_k is None:
            assert tops == (None, None)
        else:
            assert [top.ids.numpy().shape for top in tops] == [(2, top_k)] * 2


def with_number(scores: Scores, name: str, number: float) -> bytes:
    """`scores` with another number as the last one of the first text's `name`."""
    arrays = list(getattr(scores, name))
    values = arrays[0].numpy().copy()
    values.flat[-1] = number
    return packed(scores.model_copy(update={name: [Array.of(values), *arrays[1:]]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda answer: with_number(answer, "logprobs", np.nan), "teacher: a log-probability of text 0 is nan"),
        (lambda answer: with_number(answer, "top", -np.inf), "teacher: a log-probability of text 0 is -inf"),
        (lambda answer: with_number(answer, "ids", -1), "teacher: token -1 among the most probable ones of text 0"),
        (lambda answer: packed(answer)[:-1], "teacher: not MessagePack"),
        (lambda answer: "{}", "teacher: not MessagePack"),
        (
            lambda answer: packed(answer.model_copy(update={"logprobs": answer.logprobs[:2]})),
            "teacher: Scores: 2 texts, of 3 asked for",
        ),
        (
            lambda answer: packed(answer.model_copy(update={"top": [Array.of(np.zeros((2, 1), np.float32))] * 3})),
            "teacher: Scores.top.0: float32[2, 1], not float32[2, 2]",
        ),
    ],
)
async def test_an_answer_of_the_runs_own_teacher_that_lacks_a_number_fails_the_attempt(
    tmp_path: Path, change: Callable[[Scores], Any], words: str
) -> None:
    async with own_teacher(tmp_path, change) as made:
        outcome = await made.run(item())
    assert isinstance(outcome, Failure) and outcome.kind == "engine" and outcome.reason.startswith(words)
