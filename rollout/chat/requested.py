"""Chat requests and answers in OpenAI's format.

What would break the learner's ratio is refused; other sampling settings are ignored and counted (docs/agents.md).
"""

import logging
import secrets
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from rollout.chat.session import Reply
from rollout.errors import ChatRefused

log = logging.getLogger(__name__)
MODEL = "policy"
"""The one model; other names mean it too."""
REFUSED = (
    *("response_format", "logit_bias", "stop", "functions", "function_call", "structured_outputs"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
)
"""Keys that would mask or cut what is sampled."""
SAMPLING = {"top_p": 1, "top_k": -1, "min_p": 0, "frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
"""Settings with the values that change nothing."""
NEVER = ("seed", "logprobs", "top_logprobs", "parallel_tool_calls")


@dataclass(frozen=True)
class Requested:
    """A request that can be taken."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    stream: bool = False
    include_usage: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    id: str = field(default_factory=lambda: f"chatcmpl-{secrets.token_hex(12)}")
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def of(cls, body: Any) -> "Requested":
        """Raises ChatRefused with the key's name."""
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list):
            raise refused("messages", "a list of messages is needed")
        if (body.get("n") or 1) != 1:
            raise refused("n", f"{body['n']!r} is not supported; send several requests instead")
        for key in REFUSED:
            if body.get(key) not in (None, [], {}, "", "none", "auto", {"type": "text"}):
                raise refused(key, "not supported: what is trained is the run's own distribution; leave it out")
        lengths = {key: body[key] for key in ("max_tokens", "max_completion_tokens") if body.get(key) is not None}
        for key, length in lengths.items():
            if not isinstance(length, int) or isinstance(length, bool) or length < 1:
                raise refused(key, f"{length!r} is no whole number of 1 or more")
        tools, choice = body.get("tools") or None, body.get("tool_choice")
        if tools is not None and not isinstance(tools, list):
            raise refused("tools", "a list is needed")
        options = body.get("stream_options") or {}
        include_usage = isinstance(options, dict) and bool(options.get("include_usage"))
        shortest = min(lengths.values(), default=None)
        tools = None if choice == "none" else tools
        return cls(body["messages"], tools, shortest, bool(body.get("stream")), include_usage, body)


class Ignored:
    """Counts ignored settings and logs the first of each."""

    def __init__(self, temperature: float) -> None:
        self.same = {"temperature": temperature, **SAMPLING}
        self.counts: Counter[str] = Counter()

    def count(self, requested: Requested) -> bool:
        asked = requested.settings
        found = [key for key, same in self.same.items() if asked.get(key) not in (None, same)]
        found += [key for key in NEVER if asked.get(key) is not None]
        if asked.get("tool_choice") not in (None, "auto", "none"):
            found.append("tool_choice")
        for key in found:
            if not self.counts[key]:
                value = repr(asked[key])[:60]
                log.warning(
                    "an agent asks for %s %s, which is ignored: sampling is the run's (docs/agents.md)", key, value
                )
            self.counts[key] += 1
        return bool(found)


def refused(key: str, what: str) -> ChatRefused:
    error = ChatRefused(f"{key}: {what}")
    error.param = key  # type: ignore[attr-defined]
    return error


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def completion(requested: Requested, reply: Reply) -> dict[str, Any]:
    choice = {"index": 0, "message": reply.message, "finish_reason": reply.finish_reason, "logprobs": None}
    return head(requested, "chat.completion") | {"choices": [choice], "usage": usage(reply)}


def chunks(requested: Requested, reply: Reply) -> Iterator[dict[str, Any]]:
    """Yield the message, its finish and, if asked for, its usage."""
    start = head(requested, "chat.completion.chunk")
    delta = dict(reply.message)
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    for part, finish in ((delta, None), ({}, reply.finish_reason)):
        yield start | {"choices": [{"index": 0, "delta": part, "finish_reason": finish, "logprobs": None}]}
    if requested.include_usage:
        yield start | {"choices": [], "usage": usage(reply)}


def head(requested: Requested, kind: str) -> dict[str, Any]:
    return {"id": requested.id, "object": kind, "created": requested.created, "model": MODEL}


def usage(reply: Reply) -> dict[str, int]:
    given, sampled = reply.prompt_tokens, reply.completion_tokens
    return {"prompt_tokens": given, "completion_tokens": sampled, "total_tokens": given + sampled}
