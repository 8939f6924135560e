"""`reward_model`: equal to transformers on a real server of vLLM, and patient with the run's own servers."""

import asyncio
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from buffer.keys import load_token
from configs.load import load
from configs.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer
from rollout.rewards.models.reward_model import RewardModel
from rollout.rewards.workers import RewardPool
from tests.harness.model_server import ModelServer
from tests.harness.pace import paced
from tests.harness.ports import free_port
from tests.harness.tiny_reward import logits_of, make_reward_model
from tests.harness.toy import ROOT
from tests.rollout.chat.chat_templates import chat_tokenizer

pytestmark = pytest.mark.timeout(900)
CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is 2 + 2?"}]
ROWS: list[dict[str, Any]] = [{"prompt": CHAT}, {"problem": "Name a colour.", "answer": "red"}]
TEXTS = ["4", "It is four, I think.", "", "<answer>4</answer>", "red " * 40]


def answers(row: dict[str, Any], *texts: str) -> list[Answer]:
    return [Answer(text, 1, row) for text in texts]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_reward_model(tmp_path_factory.mktemp("reward") / "model")


def settings(model: Path, port: int, *more: str) -> list[str]:
    """The command line of a run with one reward server."""
    given = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=reward_model", "--rollout.device=cpu"]
    given += [f"--reward.model={model}", "--reward.servers=1", f"--reward.port={port}", f"--run.folder={model.parent}"]
    return [*given, "--reward.engine={dtype: float32, max_model_len: 512, kv_cache_memory_bytes: 67108864}", *more]


@pytest.fixture
def key(server: tuple[str, psutil.Popen], model: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The variable with the token of the server's run."""
    monkeypatch.setenv("REWARD_TOKEN", load_token(load(settings(model, 1)).run.path / "keys"))
    return "REWARD_TOKEN"


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, psutil.Popen]]:
    """A real reward server, as the launcher starts it: its address and its process."""
    port = free_port()
    with (tmp_path_factory.mktemp("log") / "log").open("w+") as log:
        line = [sys.executable, "-m", "rollout", "reward", *settings(model, port)]
        process = psutil.Popen(line, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ))
        try:
            url, until = f"http://127.0.0.1:{port}", time.monotonic() + 800
            while True:
                with suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                    assert response.status == 200
                    break
                assert process.poll() is None and time.monotonic() < until, (log.seek(0), log.read()[-4000:])
                time.sleep(0.5)
            yield url, process
        finally:
            process.kill()
            process.wait()


@pytest.mark.long
@pytest.mark.vllm
async def test_its_logits_are_those_of_transformers(server: tuple[str, psutil.Popen], model: Path, key: str):
    """Raw logits, with their scale, of chats by the model's own template, and of texts by a template of ours."""
    reward = load_reward(
        RewardConfig(function="reward_model", kwargs={"url": server[0], "model": str(model), "api_key_env": key})
    )
    for row in ROWS:
        prompt = row.get("prompt") or [{"role": "user", "content": row["problem"]}]
        expected = logits_of(model, [[*prompt, {"role": "assistant", "content": text}] for text in TEXTS])
        found = [score.reward for score in await reward.score_async(answers(row, *TEXTS))]
        assert found == pytest.approx(expected, abs=2e-4)
        assert max(map(abs, expected)) > 1.0, "a sigmoid would have hidden the scale"
    await reward.function.close()


@pytest.mark.long
@pytest.mark.vllm
async def test_a_template_of_ours_makes_the_same_text(server: tuple[str, psutil.Popen], model: Path, key: str):
    template = "<user>{{ problem }}\n<assistant>{{ answer }}\n"
    kwargs = {"url": server[0], "template": template, "api_key_env": key}
    reward = load_reward(RewardConfig(function="reward_model", kwargs=kwargs))
    chats = [[{"role": "user", "content": ROWS[1]["problem"]}, {"role": "assistant", "content": t}] for t in TEXTS]
    found = [score.reward for score in await reward.score_async(answers(ROWS[1], *TEXTS))]
    assert found == pytest.approx(logits_of(model, chats), abs=2e-4)
    try:
        with pytest.raises(RewardError, match=r"/classify: status 400: .*512"):
            await reward.score_async(answers(ROWS[1], "x" * 600))
    finally:
        await reward.function.close()


@pytest.mark.long
@pytest.mark.vllm
async def test_the_pool_finds_the_runs_own_server(server: tuple[str, psutil.Popen], model: Path):
    config = load(settings(model, int(server[0].rpartition(":")[2])))
    async with RewardPool(config.reward, keys=config.run.path / "keys") as pool:
        groups = await asyncio.gather(*(pool.score(answers(ROWS[0], *TEXTS)) for _ in range(8)))
    expected = logits_of(model, [[*CHAT, {"role": "assistant", "content": text}] for text in TEXTS])
    for group in groups:
        assert [score.reward for score in group] == pytest.approx(expected, abs=2e-4)


@pytest.mark.long
@pytest.mark.vllm
def test_what_it_started_dies_with_it(server: tuple[str, psutil.Popen]):
    """The last test on this server."""
    children = server[1].children(recursive=True)
    assert children
    server[1].kill()
    assert not psutil.wait_procs(children, timeout=120)[1]


def classes(*logits: list[float]) -> dict[str, Any]:
    return {"data": [{"index": number, "probs": one} for number, one in enumerate(logits)]}


def test_an_answer_that_continues_a_message_is_one_message_with_it(tmp_path: Path):
    chat_tokenizer("chatml").save_pretrained(tmp_path)
    made = RewardModel(url="http://127.0.0.1:1", model=str(tmp_path))
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    parts = [{"type": "text", "text": "Name "}, {"type": "image", "text": None}, {"type": "text", "text": "a vowel."}]
    row = {"prompt": [{"role": "user", "content": parts}, call, {"role": "assistant", "content": "<answer>"}]}
    (tokens,) = made.question(["a</answer>"], ["a"], [row])
    said = "<|im_start|>user\nName a vowel.<|im_end|>\n<|im_start|>assistant\n<|im_end|>\n"
    assert made._tokenizer.decode(tokens) == f"{said}<|im_start|>assistant\n<answer>a</answer><|im_end|>\n"


async def test_all_answers_of_a_group_travel_in_one_request():
    backwards = {"data": list(reversed(classes([1.5], [-3.0])["data"]))}
    async with ModelServer(lambda body, number: (200, backwards)) as server:
        kwargs = {"url": server.url, "template": "{{ problem }} {{ answer }}"}
        reward = load_reward(RewardConfig(function="reward_model", kwargs=kwargs))
        scores = await reward.score_async(answers({"problem": "p"}, "a", "b"))
        await reward.function.close()
    ((path, _, body),) = server.requests
    assert path == "/classify" and body == {"input": ["p a", "p b"], "use_activation": False}
    assert [score.reward for score in scores] == [1.5, -3.0]


@pytest.mark.parametrize(
    ("reply", "words"),
    [
        ((200, classes([1.0, 2.0], [1.0, 2.0])), "2 results of 2 classes for 2 answers; it needs a model of one class"),
        ((200, classes([1.0])), "1 results of 1 classes for 2 answers"),
        ((200, {"object": "list"}), "its server answered no classes but {'object': 'list'}"),
        ((200, classes([float("nan")], [1.0])), "returned nan; a finite number"),
        ((404, '{"detail":"Not Found"}'), 'status 404: {"detail":"Not Found"}'),
    ],
)
async def test_what_is_no_logit_is_an_error(reply: tuple[int, Any], words: str):
    async with ModelServer(lambda body, number: reply) as server:
        kwargs = {"url": server.url, "template": "{{ answer }}"}
        reward = load_reward(RewardConfig(function="reward_model", kwargs=kwargs))
        with pytest.raises(RewardError, match=words):
            await reward.score_async(answers({}, "a", "b"))
        await reward.function.close()


def own(port: int, timeout_s: float, **more: int) -> RewardConfig:
    """A run with a server of its own. A template, so that no tokenizer is loaded."""
    kwargs = {"template": "{{ answer }}", **more}
    return RewardConfig(
        function="reward_model", kwargs=kwargs, model="m", servers=1, port=port, timeout_s=timeout_s
    )  # fmt: skip


def ones(body: dict[str, Any], number: int) -> tuple[int, Any]:
    return 200, classes(*([1.0] for _ in body["input"]))


async def test_a_call_waits_for_the_runs_own_server_as_long_as_it_takes():
    """Longer than `reward.timeout_s`, which is of the function: at the start, and after the server was lost."""
    port = free_port()
    limit_s = paced(1.5)
    async with RewardPool(own(port, timeout_s=limit_s)) as pool:
        early = asyncio.create_task(pool.score(answers({}, "a", "b")))
        await asyncio.sleep(1.2 * limit_s)
        assert not early.done()
        async with ModelServer(ones, port=port):
            assert [score.reward for score in await asyncio.wait_for(early, 120)] == [1.0, 1.0]
        late = asyncio.create_task(pool.score(answers({}, "a")))
        await asyncio.sleep(1.2 * limit_s)
        assert not late.done()
        async with ModelServer(lambda body, number: ones(body, number) if number else (0, ""), port=port) as server:
            assert [score.reward for score in await asyncio.wait_for(late, 120)] == [1.0]
            assert len(server.requests) == 2  # the first time the server was lost with the call


async def test_a_call_that_loses_its_server_each_time_fails():
    port = free_port()
    async with (
        RewardPool(own(port, timeout_s=5.0)) as pool,
        ModelServer(lambda body, number: (0, ""), port=port) as server,
    ):
        with pytest.raises(RewardError, match="Server disconnected"):
            await asyncio.wait_for(pool.score(answers({}, "a")), 120)
        assert len(server.requests) == 3


async def test_a_call_is_made_again_after_its_server_s_engine_died():
    """vLLM's server answers with status 500 for some seconds then."""
    port = free_port()
    async with (
        RewardPool(own(port, timeout_s=5.0, retries=0)) as pool,
        ModelServer(lambda body, number: ones(body, number) if number > 1 else (500, ""), port=port) as server,
    ):
        assert [score.reward for score in await asyncio.wait_for(pool.score(answers({}, "a")), 120)] == [1.0]
        assert len(server.requests) == 3


async def test_who_waits_can_be_cancelled():
    async with RewardPool(own(free_port(), timeout_s=5.0)) as pool:
        waiting = asyncio.create_task(pool.score(answers({}, "a")))
        await asyncio.sleep(0.5)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
