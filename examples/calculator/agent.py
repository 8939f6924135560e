"""The calculator as an agent that knows an OpenAI base URL and nothing else of Headrace's.

As a function it is `rollout.task: examples/calculator/agent.py:solve`. As a program, which could be in any language, it
is `rollout.task: agent` with `rollout.agent.command: [python, -m, examples.calculator.agent]`, and reads the row from
its standard input. Each episode has a process of its own, so it may block.
"""

import json
import os
import sys
from typing import Any
from urllib.request import Request, urlopen

from examples.calculator.task import TURNS, calculate, score


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's next message, from any server of OpenAI's chat completions."""
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """One episode of at most TURNS messages of the model; returns its reward."""
    messages = [{"role": "user", "content": row["problem"]}]
    for _ in range(TURNS):
        reply = ask(base_url, api_key, messages)
        value = calculate(reply["content"])
        if value is None:
            break
        messages += [reply, {"role": "user", "content": value}]
    return score(reply["content"], row["answer"])


if __name__ == "__main__":
    print(json.dumps(solve(json.load(sys.stdin), os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])))
