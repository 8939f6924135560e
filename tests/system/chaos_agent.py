"""The agent of the chaos test, in a process for each episode: it asks as often as its row says, and leaves a daemon.

It scores what the chaos test's reward does, so that the audit recognizes a score that no agent gave.
"""

import json
import random
import subprocess
from typing import Any
from urllib.request import Request, urlopen

DAEMON = ["sleep", "654.25"]
"""What each episode leaves behind, in a session of its own."""


def ask(base_url: str, api_key: str, messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The model's answer."""
    body, headers = json.dumps({"messages": messages}).encode(), {"Authorization": f"Bearer {api_key}"}
    with urlopen(Request(f"{base_url}/chat/completions", body, headers)) as answer:
        message: dict[str, Any] = json.load(answer)["choices"][0]["message"]
    return message


def solve(row: dict[str, Any], base_url: str, api_key: str) -> float:
    """One episode, unless the row says that it fails."""
    subprocess.Popen(DAEMON, start_new_session=True)
    kind, _, number = row["answer"].partition(":")
    messages = [{"role": "user", "content": row["problem"]}]
    for _ in range(2 + int(number) % 2):
        reply = ask(base_url, api_key, messages)
        messages += [reply, {"role": "user", "content": "?"}]
    if kind == "dead" or (kind == "flaky" and random.random() < 0.2):
        raise RuntimeError("the task gave up")
    return float(reply["content"].rpartition("=")[2])
