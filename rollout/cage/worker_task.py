"""In a worker: loads a user's task. Only a task of (problem, generate) needs NumPy and pydantic, which import
slowly."""

import os
from collections.abc import Awaitable, Callable
from typing import Any

from rollout.tasks import convention, load_task
from rollout.tasks.programs import agent_of

Plain = Callable[..., Awaitable[dict[str, Any]]]


def load_conversation(task: Callable[..., Awaitable[Any]]) -> Plain:
    async def converse(values: dict[str, Any], call: Plain) -> Any:
        async def chat(messages: Any, tools: Any = None, max_tokens: int | None = None) -> dict[str, Any]:
            return await call(messages, tools=tools, max_tokens=max_tokens)

        return await task(row=values["row"], chat=chat)

    return converse


def load(name: str, model: dict[str, Any], data: dict[str, Any], memory: str) -> Plain:
    """In a worker: return the task `name` as a function of plain values. Raises ValueError."""
    before = open_files()
    task = load_task(name)
    how = convention(name, task)
    if how == "base_url":
        return agent_of(name, task, memory, open_files() - before)
    if how == "chat":
        play = load_conversation(task)
    else:
        from rollout.cage.user_task import load_episode

        play = load_episode(task, model, data)
    play.about = {"convention": how}  # type: ignore[attr-defined]
    return play


def open_files() -> frozenset[int]:
    return frozenset(int(fd) for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}"))
