"""The calculator as an episode of chat: `rollout.task: examples/calculator/task.py:solve`, run in a server's workers.

A problem such as `17*6-9=` takes a calculator that does one operation a call. A message that is no call ends the
episode, and is the answer.
"""

import re
from collections.abc import Awaitable, Callable
from typing import Any

TURNS = 4
CALL = re.compile(r"<calc>(\d{1,6})([-+*])(\d{1,6})</calc>")


def calculate(said: str) -> str | None:
    """The value of the operation that is asked for; None if none is. Example: `<calc>17*6</calc>` -> `102`."""
    if not (call := CALL.fullmatch(said)):
        return None
    left, right = int(call[1]), int(call[3])
    return str({"+": left + right, "-": left - right, "*": left * right}[call[2]])


def score(said: str, answer: str) -> float:
    """1 for the right answer in its tags, else 0."""
    return float(said == f"<answer>{answer}</answer>")


async def solve(row: dict[str, Any], chat: Callable[..., Awaitable[dict[str, Any]]]) -> float:
    """One episode of at most TURNS messages of the model; returns its reward."""
    messages = [{"role": "user", "content": row["problem"]}]
    for _ in range(TURNS):
        reply = await chat(messages)
        value = calculate(reply["content"])
        if value is None:
            break
        messages += [reply, {"role": "user", "content": value}]
    return score(reply["content"], row["answer"])
