"""Messages of a chat, brought into one form and compared.

`content` becomes a text and `arguments` a mapping, as chat templates want them. Messages are compared in that form,
since clients may repeat them in another. Reasoning is not compared: most clients drop it.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rollout.errors import ChatRefused

Message = dict[str, Any]
KEPT = ("name", "tool_call_id")


@dataclass(frozen=True)
class ChatRequest:
    """Normalized messages, and tools."""

    messages: list[Message]
    tools: list[dict[str, Any]] | None
    prefixes: list[bytes]
    """Digests of the tools and the first 0, 1, ... messages."""

    @classmethod
    def read(cls, messages: Any, tools: Any = None) -> "ChatRequest":
        if not isinstance(messages, list | tuple) or not messages:
            raise ChatRefused("messages: a list of one message or more is needed")
        if tools is not None and not (
            isinstance(tools, list | tuple) and all(isinstance(tool, dict) for tool in tools)
        ):
            raise ChatRefused("tools: a list of dicts is needed")
        tools = list(tools or ()) or None
        found = [read_message(f"messages[{place}]", message) for place, message in enumerate(messages)]
        try:
            return cls(found, tools, list(digests(tools, found)))
        except (TypeError, ValueError) as error:
            raise ChatRefused(f"messages and tools must be plain JSON: {error}") from None


def read_message(place: str, message: Any) -> Message:
    """Normalize a message. Raises ChatRefused."""
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise ChatRefused(f"{place}: a dict with role and content is needed")
    made = {"role": message["role"], "content": _text(place, message.get("content"))}
    made |= {name: message[name] for name in KEPT if message.get(name) is not None}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        made |= {"reasoning": str(reasoning), "reasoning_content": str(reasoning)}
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list | tuple):
            raise ChatRefused(f"{place}.tool_calls: a list is needed")
        made["tool_calls"] = [_call(f"{place}.tool_calls[{number}]", call) for number, call in enumerate(calls)]
    return made


def _text(place: str, content: Any) -> str:
    if content is None or isinstance(content, str):
        return encodable(f"{place}.content", content or "")
    if not isinstance(content, list | tuple):
        raise ChatRefused(f"{place}.content: a text is needed, or a list of parts with type text")
    texts = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ChatRefused(f"{place}.content[{number}]: a part of type {kind!r:.40}; chats take text only")
        texts.append(encodable(f"{place}.content[{number}]", part["text"]))
    return "".join(texts)


def encodable(place: str, text: str) -> str:
    """Raises ChatRefused for a lone surrogate, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ChatRefused(f"{place}: character {error.start} is a lone surrogate; send whole characters") from None
    return text


def _call(place: str, call: Any) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ChatRefused(f"{place}: a dict with id, type and function {{name, arguments}} is needed")
    arguments = parsed_arguments(function.get("arguments"))
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def parsed_arguments(arguments: Any) -> Any:
    """Arguments as a mapping; a text that is no JSON mapping stays as it is."""
    if not isinstance(arguments, str):
        return {} if arguments is None else arguments
    try:
        found = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return found if isinstance(found, dict) else arguments


def digests(tools: Any, messages: list[Message]) -> Iterator[bytes]:
    yield (digest := _digest(b"", tools))
    for message in messages:
        yield (digest := extended(digest, message))


def extended(digest: bytes, message: Message) -> bytes:
    calls = [
        [call["id"], call["function"]["name"], call["function"]["arguments"]] for call in message.get("tool_calls", ())
    ]
    return _digest(digest, [message["role"], message["content"], calls, message.get("tool_call_id")])


def _digest(before: bytes, value: Any) -> bytes:
    return hashlib.sha256(before + json.dumps(value, sort_keys=True).encode()).digest()
