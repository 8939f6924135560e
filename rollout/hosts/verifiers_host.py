"""Runs a `verifiers` environment in the Python that it is installed in; imports nothing else of Headrace.

    python verifiers_host.py serve ID [ARGS]               JSON lines on stdin and stdout, started by a rollout server
    python verifiers_host.py check ID [ARGS]               load the environment and end
    python verifiers_host.py export ID ROWS.jsonl [ARGS]   write its problems, for `data.train`

ARGS is JSON: keyword arguments of `load_environment`, or the config of a task set of `verifiers.v1`, such as
`{"taskset": {"level": 2}, "agent": {"max_turns": 8}}`.

    server -> host   {"id": 7, "row": {...}, "url": "http://.../v1", "sampling": {"max_tokens": 256}}   {"cancel": 7}
    host -> server   {"ready": "v0"} or {"refused": "one line"}, then {"cancelled": 7} at once, and for each episode
                     {"id": 7, "ok": true, "reward": 1.0, "metrics": {...}, "error": null, "stop": "...",
                      "truncated": false}

Episodes share one event loop. A failed one has `ok` false and is never a reward. The host ends with its input.
"""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import AsyncIterator, Iterable
from contextvars import ContextVar
from typing import Any, Protocol

KEY = "HEADRACE_AGENT_KEY"
"""Clients read their key from this variable; the real key is in the URL."""
MODEL = "policy"
LONGEST_LINE = 2**26


_raised: ContextVar[list[str]] = ContextVar("raised")
"""Errors of reward functions: the older API logs them and scores 0."""


class RefusedEnvironment(Exception):
    """The environment cannot be used."""


class Environment(Protocol):
    """An environment of either API."""

    api: str

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        """What must be up while episodes run."""

    async def run(self, row: Any, url: str, sampling: dict[str, Any]) -> dict[str, Any]: ...

    def rows(self) -> Iterable[dict[str, Any]]:
        """Yield `row` for `run`, `problem` (text) and `answer`."""


class ClassicEnvironment:
    """`verifiers.load_environment`: most of the hub, up to verifiers 0.3."""

    api = "v0"

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        import verifiers

        self.environment = verifiers.load_environment(name, **arguments)
        if getattr(self.environment, "requires_group_rollouts", False):
            raise RefusedEnvironment(f"{name} scores a group of rollouts together, which is not supported")
        note_errors(self.environment.rubric)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        yield

    async def run(self, row: Any, url: str, sampling: dict[str, Any]) -> dict[str, Any]:
        from verifiers.clients import resolve_client
        from verifiers.types import ClientConfig

        config = ClientConfig(client_type="openai_chat_completions", api_base_url=url, api_key_var=KEY)
        client, raised = resolve_client(config), list[str]()
        take_empty_answers(client)
        _raised.set(raised)
        try:
            out = await self.environment.run_rollout(row, client, MODEL, sampling)
        finally:
            await client.close()
        reward, error = out.get("reward"), out.get("error")
        error = error or next(iter(raised), None)
        return {
            "ok": error is None and reward is not None,
            "reward": reward,
            "metrics": numbers(out.get("metrics")),
            "error": None if error is None else text_of(error),
            "stop": out.get("stop_condition"),
            "truncated": bool(out.get("is_truncated")),
        }

    def rows(self) -> Iterable[dict[str, Any]]:
        for row in self.environment.get_dataset():
            yield {"problem": shown(row.get("prompt")), "answer": row.get("answer", ""), "row": row}


class TasksetEnvironment:
    """`verifiers.v1`: a task set, played by one agent in its own process."""

    api = "v1"

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        from verifiers.v1.configs.agent import AgentConfig
        from verifiers.v1.utils import loaders
        from verifiers.v1.utils.generic import deep_merge

        fields = loaders.env_config_type(name, arguments.get("id", "")).model_fields
        roles = [role for role, field in fields.items() if isinstance(field.default, AgentConfig)]
        if len(roles) != 1:
            raise RefusedEnvironment(
                f"{name} has several agents ({', '.join(roles)}); one policy plays one of them only"
            )
        here = {"harness": {"id": "null"}, "runtime": {"type": "subprocess"}}
        config = loaders.resolve_env_config(deep_merge({"taskset": {"id": name}, roles[0]: here}, arguments))
        self.environment = loaders.load_environment(config)
        self.task, self.config = loaders.task_type(name), config.taskset.task

    def serving(self) -> contextlib.AbstractAsyncContextManager[Any]:
        return self.environment.serving()  # type: ignore[no-any-return]

    async def run(self, row: Any, url: str, sampling: dict[str, Any]) -> dict[str, Any]:
        import verifiers.v1 as verifiers

        client = verifiers.EvalClientConfig(base_url=url, api_key_var=KEY)
        context = verifiers.ModelContext(MODEL, client, verifiers.SamplingConfig(**sampling))
        (slot,) = self.environment.slots(self.task(self.task.data_type().model_validate(row), self.config))
        episode = await self.environment.run_slot(slot, context)
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        if not episode.ok or len(episode.traces) != 1 or not episode.traces[0].ok:
            why = [f"{error.type}: {error.message}" for error in errors] or [
                f"{len(episode.traces)} traces, none wrong"
            ]
            return {"ok": False, "error": why[-1]}
        trace = episode.traces[0]
        scored = bool(trace.rewards) and None not in trace.rewards.values()
        return {
            "ok": scored,
            "reward": trace.reward,
            "metrics": numbers(trace.metrics),
            "error": None if scored else "its task set gave no reward",
            "stop": trace.stop_condition,
            "truncated": trace.is_truncated,
        }

    def rows(self) -> Iterable[dict[str, Any]]:
        for task in self.environment.taskset:
            row = task.data.model_dump(mode="json", exclude_none=True)
            yield {"problem": shown(row.get("prompt")), "answer": row.get("answer", ""), "row": row}


def take_empty_answers(client: Any) -> None:
    """Score an empty answer as an empty text; verifiers 0.2 takes it for a failure of the model's server."""
    from verifiers.errors import EmptyModelResponseError

    check, read = client.raise_from_native_response, client.from_native_response

    async def check_but_for_words(response: Any) -> None:
        with contextlib.suppress(EmptyModelResponseError):  # without any answer, reading it fails
            await check(response)

    async def read_as_text(response: Any) -> Any:
        answer = await read(response)
        if not answer.message.tool_calls:
            answer.message.content = answer.message.content or ""
        return answer

    client.raise_from_native_response, client.from_native_response = check_but_for_words, read_as_text


def note_errors(rubric: Any) -> None:
    """Have reward functions note errors in `_raised`."""
    for one in getattr(rubric, "rubrics", ()):
        note_errors(one)
    rubric.funcs = [noting(function) for function in rubric.funcs]


def noting(function: Any) -> Any:
    """Wrap a reward function; keep its signature."""

    @functools.wraps(function)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = function(*args, **kwargs)
            return await found if inspect.isawaitable(found) else found
        except Exception as error:
            _raised.get().append(f"its reward function {call.__name__} raised {type(error).__name__}: {error}")
            raise

    return call


def load(name: str, arguments: dict[str, Any]) -> Environment:
    """Load an environment of either API. Raises RefusedEnvironment."""
    os.environ.setdefault(KEY, "in-the-url")
    try:
        import verifiers
    except ImportError as error:
        raise RefusedEnvironment(f"verifiers cannot be imported by {sys.executable}: {error}") from None
    try:
        if hasattr(verifiers, "load_environment") and is_classic(name):
            return ClassicEnvironment(name, arguments)
        return TasksetEnvironment(name, arguments)
    except ModuleNotFoundError as error:
        raise RefusedEnvironment(f"{name}: no such environment is installed for {sys.executable}: {error}") from None
    except RefusedEnvironment:
        raise
    except (Exception, SystemExit) as error:
        raise RefusedEnvironment(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error


def is_classic(name: str) -> bool:
    """Whether the module has the older API's function."""
    from verifiers.utils.env_utils import import_env_module

    return hasattr(import_env_module(name), "load_environment")


def numbers(metrics: Any) -> dict[str, float]:
    return {str(key): float(value) for key, value in (metrics or {}).items() if isinstance(value, int | float)}


def text_of(error: Any) -> str:
    chain = error.get("error_chain_repr") or error.get("error") if isinstance(error, dict) else error
    return " ".join(str(chain).split())[:500]


def shown(prompt: Any) -> str:
    content = prompt[-1].get("content", "") if isinstance(prompt, list) and prompt else prompt or ""
    return content if isinstance(content, str) else " ".join(part.get("text", "") for part in content)


class Host:
    """Answers requests, many at a time."""

    def __init__(self, environment: Environment, answers: Any) -> None:
        self.environment, self.answers = environment, answers
        self.running: dict[int, asyncio.Task[None]] = {}

    def tell(self, line: bytes) -> None:
        self.answers.write(line)
        self.answers.flush()

    async def serve(self, requests: Any) -> None:
        reader = asyncio.StreamReader(limit=LONGEST_LINE)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), requests)
        async with self.environment.serving():
            self.tell(line_of({"ready": self.environment.api}))
            while line := await reader.readline():
                request = json.loads(line)
                if "cancel" in request:
                    if running := self.running.get(request["cancel"]):
                        running.cancel()
                    self.tell(line_of({"cancelled": request["cancel"]}))
                else:
                    self.running[request["id"]] = asyncio.create_task(self.play(**request))
            for task in self.running.values():
                task.cancel()

    async def play(self, id: int, row: Any, url: str, sampling: dict[str, Any]) -> None:
        try:
            line = line_of({"id": id, **await self.environment.run(row, url, sampling)})
        except (Exception, SystemExit) as error:  # also for a result that JSON cannot write
            reason = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
            line = line_of({"id": id, "ok": False, "error": reason})
        finally:
            del self.running[id]
        self.tell(line)


def line_of(message: dict[str, Any]) -> bytes:
    """Raises TypeError and ValueError."""
    return json.dumps(message).encode() + b"\n"


def protected() -> tuple[Any, Any]:
    """Keep requests and answers away from what an environment prints or reads."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    os.dup2(2, 1)
    return requests, answers


def export(environment: Environment, name: str, path: str) -> int:
    """Write rows for `data.train`; return how many."""
    number = 0
    with open(path, "w", encoding="utf-8") as file:
        for row in environment.rows():
            row["extra_info"] = {"environment": name, "row": row.pop("row")}
            file.write(json.dumps(row, default=str) + "\n")
            number += 1
    return number


def main(argv: list[str]) -> int:
    known = {"serve": 1, "check": 1, "export": 2}
    if {"-h", "--help"} & {*argv}:
        print(__doc__)
        return 0
    if not argv or argv[0] not in known or not 0 <= len(argv) - 1 - known[argv[0]] <= 1:
        print("usage: verifiers_host.py serve|check|export ID [ROWS.jsonl] [ARGS]; --help says more", file=sys.stderr)
        return 2
    verb, name, *rest = argv
    requests, answers = protected()
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
    try:
        environment = load(name, json.loads(rest[-1]) if len(rest) == known[verb] else {})
    except (RefusedEnvironment, json.JSONDecodeError) as error:
        line = " ".join(str(error).split())
        answers.write(json.dumps({"refused": line}).encode() + b"\n" if verb == "serve" else f"{line}\n".encode())
        return 2
    if verb == "serve":
        asyncio.run(Host(environment, answers).serve(requests))
    elif verb == "export":
        answers.write(f"{rest[0]}: {export(environment, name, rest[0])} rows\n".encode())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
