"""The judge over real HTTP: what it asks, what it reads, what it tries again, and that it never makes a failure 0."""

import time
from pathlib import Path
from typing import Any

import pytest

from configs.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Reward
from rollout.rewards.workers import RewardPool
from tests.harness.model_server import ModelServer, says
from tests.harness.ports import free_port

ROW = {"problem": "2 + 2?", "answer": "4", "level": "easy"}
ANSWER = [Answer("It is four.", 3, ROW)]
TEMPLATE = "Question ({{ level }}): {{ problem }}\nRight: {{ ground_truth }}\nAnswer: {{ answer }}\nEnd with [[n]]."


def judge(url: str, **kwargs: Any) -> Reward:
    kwargs = {"model": "judge-1", "template": TEMPLATE, "pattern": r"\[\[(.*?)\]\]", "retries": 0} | kwargs
    reward = load_reward(RewardConfig(function="judge", kwargs={"url": url, **kwargs}, timeout_s=60.0))
    reward.function._first_wait_s = 0.01
    return reward


async def ask(server: ModelServer, **kwargs: Any) -> float:
    reward = judge(server.url + "/v1", **kwargs)
    try:
        return (await reward.score_async(ANSWER))[0].reward
    finally:
        await reward.function.close()


async def test_what_a_judge_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("JUDGE_KEY", "secret")
    (tmp_path / "judge.jinja").write_text(TEMPLATE)
    async with ModelServer(lambda body, number: (200, says("Well. [[3]] no, [[7]]"))) as server:
        given = {"system": "Be fair.", "max_tokens": 9, "extra": {"seed": 1}, "template": str(tmp_path / "judge.jinja")}
        assert await ask(server, scale=10, api_key_env="JUDGE_KEY", **given) == 0.7
    ((path, headers, body),) = server.requests
    assert path == "/v1/chat/completions" and headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "judge-1",
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": TEMPLATE_FILLED},
        ],
        "temperature": 0,
        "max_tokens": 9,
        "seed": 1,
    }


TEMPLATE_FILLED = "Question (easy): 2 + 2?\nRight: 4\nAnswer: It is four.\nEnd with [[n]]."


@pytest.mark.parametrize(
    ("verdict", "kwargs", "score"),
    [
        ("[[0]] then [[1]]", {}, 1.0),
        ("[[-2.5]]", {}, -2.5),
        ("I say [[ Yes ]]", {"scores": {"yes": 1, "no": -1}}, 1.0),
        ("[[B]]", {"scores": {"A": 1, "B": 0}}, 0.0),
        ("GOOD", {"pattern": "GOOD|BAD", "scores": {"good": 1, "bad": 0}}, 1.0),
    ],
)
async def test_verdicts(verdict: str, kwargs: dict, score: float):
    async with ModelServer(lambda body, number: (200, says(verdict))) as server:
        assert await ask(server, **kwargs) == score


@pytest.mark.parametrize(
    ("reply", "kwargs", "words"),
    [
        ((200, says("no idea")), {}, "judge: nothing matches pattern in its verdict 'no idea'"),
        ((200, says("[[high]]")), {}, r"judge: its verdict 'high' is no number; set scores"),
        ((200, says("[[C]]")), {"scores": {"A": 1}}, "judge: scores has no 'C'; it has A"),
        ((200, says("[[1]]", "length")), {}, r"judge: its verdict was cut at max_tokens \(1024\); raise it"),
        ((200, {"error": "x"}), {}, "judge: its server answered no chat completion but {'error': 'x'}"),
        ((200, "<html>\nhello"), {}, "no JSON but <html>"),
        ((404, "\n\nno such model\nat all"), {}, r"/v1/chat/completions: status 404: no such model$"),
        ((500, "it broke\nTraceback"), {}, r"status 500: it broke$"),
        ((503, ""), {}, r"status 503: nothing$"),
        ((200, says("[[nan]]")), {}, "judge returned nan; a finite number"),
        (
            (200, says("[[1]]")),
            {"template": "{{ answer }}{{ nothing }}"},
            "its template cannot be filled: 'nothing' is undefined; there are ",
        ),
    ],
)
async def test_what_is_no_score_is_an_error_in_one_line(reply: tuple[int, Any], kwargs: dict, words: str):
    async with ModelServer(lambda body, number: reply) as server:
        with pytest.raises(RewardError, match=words) as caught:
            await ask(server, **kwargs)
        assert "\n" not in str(caught.value)


async def test_what_may_pass_is_tried_again():
    """429, 5xx, a lost connection; then the score. What cannot pass is not."""
    replies = [(429, "slow down"), (500, "oops"), (0, ""), (503, "starting"), (200, says("[[1]]"))]
    async with ModelServer(lambda body, number: replies[number]) as server:
        assert await ask(server, retries=4) == 1.0
        assert len(server.requests) == 5
    async with ModelServer(lambda body, number: (429, "no")) as server:
        with pytest.raises(RewardError, match=r"status 429: no$"):
            await ask(server, retries=1)
        assert len(server.requests) == 2
    async with ModelServer(lambda body, number: (400, "bad")) as server:
        with pytest.raises(RewardError, match=r"status 400: bad$"):
            await ask(server, retries=3)
        assert len(server.requests) == 1


async def test_a_server_may_say_how_long_to_wait():
    replies = [(429, "slow down"), (200, says("[[1]]"))]
    async with ModelServer(lambda body, number: replies[number], headers={"Retry-After": "1"}) as server:
        began = time.monotonic()
        assert await ask(server, retries=1) == 1.0
        assert 1.0 <= time.monotonic() - began < 60.0


async def test_a_server_that_is_too_slow_or_not_there():
    async with ModelServer(lambda body, number: (200, says("[[1]]")), delay_s=5.0) as server:
        with pytest.raises(RewardError, match=r"no answer within timeout_s \(0.3 s\)"):
            await ask(server, timeout_s=0.3)
    reward = judge(f"http://127.0.0.1:{free_port()}")
    with pytest.raises(RewardError, match="/chat/completions: Cannot connect to host"):
        await reward.score_async(ANSWER)
    await reward.function.close()


async def test_of_several_servers_those_that_are_there_are_asked_in_turn():
    async with (
        ModelServer(lambda body, number: (200, says("[[1]]"))) as one,
        ModelServer(lambda body, number: (200, says("[[2]]"))) as other,
    ):
        reward = judge([f"{one.url}/v1", f"http://127.0.0.1:{free_port()}/v1", f"{other.url}/v1"])  # type: ignore[arg-type]
        scores = [(await reward.score_async(ANSWER))[0].reward for _ in range(6)]
        await reward.function.close()
    assert sorted(set(scores)) == [1.0, 2.0]


async def test_a_pool_asks_a_slow_judge_for_many_answers_at_once(tmp_path: Path):
    """80 answers, 64 at a time, on one connection pool; the worker's log stays empty."""
    async with ModelServer(lambda body, number: (200, says("[[1]]")), delay_s=0.2, least_at_once=32) as server:
        kwargs = {"url": server.url, "model": "m", "template": "{{ answer }}", "pattern": r"\[\[(.*?)\]\]"}
        async with RewardPool(RewardConfig(function="judge", kwargs=kwargs), tmp_path / "rollout-0") as pool:
            scores = await pool.score(ANSWER * 80)
            assert {score.reward for score in scores} == {1.0} and len(scores) == 80
            assert 32 <= server.most_at_once <= 64
    log = tmp_path / "rollout-0-reward-0.log"
    assert not log.exists() or log.read_text() == ""


async def test_in_a_pool_a_judge_that_hangs_costs_its_group_only():
    def reply(body: dict[str, Any], number: int) -> tuple[int, Any]:
        return 200, says("[[1]]")

    async with ModelServer(reply, delay_s=30.0) as slow, ModelServer(reply) as quick:
        template = {"model": "m", "template": "{{ answer }}", "pattern": r"\[\[(.*?)\]\]"}
        slow_one = RewardConfig(function="judge", kwargs={"url": slow.url, **template}, timeout_s=1.0)
        quick_one = RewardConfig(function="judge", kwargs={"url": quick.url, **template}, timeout_s=20.0)
        async with RewardPool(slow_one) as hangs, RewardPool(quick_one) as works:
            with pytest.raises(RewardError, match=r"judge took longer than reward.timeout_s \(1 s\)"):
                await hangs.score(ANSWER)
            assert (await works.score(ANSWER))[0].reward == 1.0
