"""A reward server answers only requests with the run's token, and the run's own reward workers send it."""

import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from buffer.keys import KeysError
from configs.load import ConfigError, load
from configs.schema import RewardConfig
from rollout.engine.reward_limits import App, Receive, Send
from rollout.engine.reward_server import KEYS_VARIABLE, TokenGate, words
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer
from tests.harness.keys import TOKEN, give_keys
from tests.harness.ports import free_port


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[Path]:
    folder = give_keys(tmp_path / "run")
    os.environ[KEYS_VARIABLE] = str(folder)
    yield folder
    del os.environ[KEYS_VARIABLE]


@asynccontextmanager
async def served(port: int, gate: type[TokenGate] = TokenGate) -> AsyncIterator[list[str]]:
    """Stands for vLLM's server, behind the gate; notes the paths of requests that pass it."""
    passed: list[str] = []

    async def classify(request: Request) -> JSONResponse:
        passed.append(request.url.path)
        return JSONResponse({"data": [{"index": 0, "probs": [2.5]}]})

    paths = ("/classify", "/v1/models", "/health", "/metrics")
    app: Any = gate(Starlette(routes=[Route(path, classify, methods=["GET", "POST"]) for path in paths]))
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning", lifespan="off"))
    sockets = [server.config.bind_socket()]
    await_started = server.startup(sockets)
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await await_started
    try:
        yield passed
    finally:
        await server.shutdown(sockets)


@pytest.mark.parametrize("shown", [None, "", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", TOKEN, f"Bearer {TOKEN}x"])
async def test_without_the_token_nothing_but_health_is_answered(keys: Path, shown: str | None) -> None:
    port, headers = free_port(), {} if shown is None else {"Authorization": shown}
    async with served(port) as passed, aiohttp.ClientSession(headers=headers) as session:
        for verb, path in (("POST", "/classify"), ("GET", "/v1/models"), ("GET", "/metrics"), ("POST", "/health")):
            async with session.request(verb, f"http://127.0.0.1:{port}{path}") as response:
                assert response.status == 401 and "reward.token" in await response.text()
                assert TOKEN not in await response.text()
        assert passed == []
        async with session.get(f"http://127.0.0.1:{port}/health") as response:
            assert response.status == 200


async def test_apps_around_vllms_are_behind_the_gate_and_its_limits(keys: Path) -> None:
    """A teacher's server answers its own path by one."""
    asked: list[str] = []

    def around(app: App) -> App:
        async def answer(scope: dict[str, Any], receive: Receive, send: Send) -> None:
            asked.append(scope["path"])
            await JSONResponse({})(scope, receive, send)

        return answer

    class TeacherGate(TokenGate):
        host, further = "127.0.0.1", (around,)

    port, url = free_port(), "http://127.0.0.1:{}/headrace/scores"
    token = {"Authorization": f"Bearer {TOKEN}"}
    async with served(port, TeacherGate), aiohttp.ClientSession() as session:
        for headers, status in (({}, 401), ({**token, "Host": "a.site"}, 403), (token, 200)):
            async with session.post(url.format(port), headers=headers) as response:
                assert (response.status, len(asked)) == (status, status == 200)


async def test_the_runs_own_workers_send_the_token_and_no_other_server_gets_it(keys: Path) -> None:
    port = free_port()
    own = RewardConfig(function="reward_model", model="m", servers=1, port=port, kwargs={"template": "{{ answer }}"})
    foreign = RewardConfig(
        function="reward_model", kwargs={"template": "{{ answer }}", "url": f"http://127.0.0.1:{port}", "retries": 0}
    )
    async with served(port):
        for config, folder, may in ((own, keys, True), (own, None, False), (foreign, keys, False)):
            reward = load_reward(config, keys=folder)
            answer = [Answer("4", 1, {"problem": "2 + 2"})]
            if may:
                assert [score.reward for score in await reward.score_async(answer)] == [2.5]
            else:
                with pytest.raises(RewardError, match=r"status 401: .*asks for the token of its run"):
                    await reward.score_async(answer)
            made: Any = reward.function
            await made.close()


def test_a_worker_without_the_runs_keys_says_so(tmp_path: Path) -> None:
    own = RewardConfig(function="reward_model", model="m", servers=1, kwargs={"template": "{{ answer }}"})
    with pytest.raises(KeysError, match=r"reward.token: No such file.*python -m actors launch"):
        load_reward(own, keys=tmp_path / "keys")


def test_the_gate_stands_before_vllms_server(tmp_path: Path) -> None:
    given = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=reward_model"]
    (tmp_path / "config.json").write_text("{}")
    given += [f"--reward.model={tmp_path}"]
    assert f"--middleware={TokenGate.__module__}.{TokenGate.__name__}" in words(load(given), 0, cpu=True)


def test_a_reward_server_computes_what_transformers_does(tmp_path: Path) -> None:
    given = ["--model.path=m", "--data.train=d.jsonl", "--reward.function=reward_model", f"--reward.model={tmp_path}"]
    (tmp_path / "config.json").write_text('{"model_type": "cohere2", "sliding_window": 512}')
    assert '--hf-overrides={"sliding_window": 511}' in words(load(given), 0, cpu=True)
    (tmp_path / "config.json").write_text('{"model_type": "cohere2", "use_qk_norm": true}')
    with pytest.raises(ConfigError, match=r"^reward.model: .* \(cohere2\): use_qk_norm in its config.json is true, by"):
        words(load(given), 0, cpu=True)
