"""Judges behind a proxy of the environment, and the run's own hosts, which are reached without a proxy."""

from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from configs.variables import prepare
from rollout.rewards.models.http_model import HttpModel, ServersAway


@asynccontextmanager
async def running_proxy():
    """Run a proxy that answers itself; yields it with the requested addresses."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(str(request.url))
        return web.json_response({"by": "proxy"})

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    server = TestServer(app)
    await server.start_server()
    yield str(server.make_url("/")), asked
    await server.close()


async def test_a_judge_elsewhere_is_called_through_the_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy() as (address, asked):
        monkeypatch.setenv("http_proxy", address)
        model = HttpModel(url="http://judge.test:8000", retries=0)
        assert await model.post("/v1/chat", {}) == {"by": "proxy"}
        assert asked == ["http://judge.test:8000/v1/chat"]
        monkeypatch.setenv("no_proxy", "judge.test")
        with pytest.raises(ServersAway, match=r"judge\.test"):
            await model.post("/v1/chat", {})
        await model.close()


async def test_a_judge_of_this_machine_is_called_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_proxy() as (address, asked):
        monkeypatch.setenv("http_proxy", "http://proxy.test:1")  # this proxy does not exist
        model = HttpModel(url=address, retries=0)
        assert await model.post("/v1/chat", {}) == {"by": "proxy"} and asked[0].startswith("http://127.0.0.1")
        await model.close()


async def test_a_proxy_that_is_away_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    model = HttpModel(url="http://judge.test:8000", retries=0)
    with pytest.raises(ServersAway, match=r"judge.test.*through the proxy http://127.0.0.1:9"):
        await model.post("/v1/chat", {})
    await model.close()


def test_an_unsupported_kind_of_proxy_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", "socks5://127.0.0.1:1080")
    with pytest.raises(
        ValueError, match=r"reached through socks5://.*socks5 proxies are not supported; .*add judge.test to no_proxy"
    ):
        HttpModel(url="http://judge.test:8000")
    HttpModel(url="http://127.0.0.1:8000")
    monkeypatch.setenv("no_proxy", "judge.test")
    HttpModel(url="http://judge.test:8000")


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "ALL_PROXY"])
def test_users_programs_reach_this_machine_without_the_proxy(name: str) -> None:
    """By urllib's rule, which other libraries follow. Without `no_proxy` every attempt of an agent failed."""
    from urllib.request import getproxies_environment, proxy_bypass_environment

    environment = {name: "http://proxy.test:1", "NO_PROXY": "lan.test"}
    prepare(environment=environment)
    with pytest.MonkeyPatch.context() as patch:
        for key in ("no_proxy", "NO_PROXY"):
            patch.delenv(key, raising=False)
        for key, value in environment.items():
            patch.setenv(key, value)
        assert getproxies_environment()
        for host in ("127.0.0.1", "127.0.0.1:5000", "localhost", "lan.test"):
            assert proxy_bypass_environment(host)
        assert not proxy_bypass_environment("judge.test")
