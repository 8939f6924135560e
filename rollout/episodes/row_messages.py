"""Checks a row's messages and converts them for chat templates: each content becomes a text, with MARK for each
image."""

from collections.abc import Collection, Mapping
from typing import Any

from buffer.data.image_columns import holds, may_hold, shows, spells
from buffer.data.image_rows import IMAGES, MARK
from rollout.chat.messages import parsed_arguments
from rollout.errors import PromptError

ROLES = ("system", "developer", "user", "assistant", "tool")
"""The template must name any other role."""
ENDS = 30
"""Characters compared at both ends."""


def messages_of(row: Mapping[str, Any], template: str, seeing: bool = False) -> list[dict[str, Any]]:
    """Return the chat of a row. `seeing`: the model sees images. Raises PromptError."""
    prompt = row.get("prompt") or row.get("problem")
    if not prompt:
        empty = [name for name in ("prompt", "problem") if name in row]
        what = f"the {empty[0]} of the row is empty: {row[empty[0]]!r:.40}" if empty else ""
        raise PromptError(what or f"the row has neither prompt nor problem, but {', '.join(row)}")
    images = bool(row.get(IMAGES))
    if isinstance(prompt, str):
        chat = [{"role": "user", "content": whole("the prompt of the row", prompt)}]
    elif isinstance(prompt, list):
        chat = [message_of(number, message, template, images) for number, message in enumerate(prompt)]
    else:
        raise PromptError(f"the prompt of the row is {prompt!r:.40}; a text or a list of messages is needed")
    if seeing and not images:
        _require_no_image(chat)
    return chat


def message_of(number: int, message: Any, template: str, images: bool) -> dict[str, Any]:
    """Drop null keys: in parquet each message has the keys of all."""
    if not isinstance(message, Mapping) or not isinstance(role := message.get("role"), str):
        raise PromptError(f"message {number} is {message!r:.60}; role and content are needed")
    if role not in ROLES and role not in template:
        known = f"{', '.join(ROLES)} are known, and roles that the chat template names"
        raise PromptError(f"message {number} has the role {role!r:.40}; {known}")
    found = {name: value for name, value in message.items() if value is not None}
    content = found.get("content", "" if found.get("tool_calls") else None)
    return found | {"content": text_of(f"message {number}, of role {role!r},", content, images)}


def with_arguments(message: dict[str, Any], texts: bool) -> dict[str, Any]:
    """Arguments of calls as a mapping; with `texts` those that are a text, as OpenAI's clients write them, stay so."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in calls):
        return message
    return message | {"tool_calls": [_with_arguments(call, texts) for call in calls]}


def _with_arguments(call: Mapping[str, Any], texts: bool) -> dict[str, Any]:
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_arguments(function, texts)}
    given = call.get("arguments")
    return {**call, "arguments": given if texts and isinstance(given, str) else parsed_arguments(given)}


def _require_no_image(chat: Collection[Mapping[str, Any]]) -> None:
    for number, message in enumerate(chat):
        if spells(message):
            problem = f"message {number} has a data URL of an image, and images are read from the column {IMAGES}"
            raise PromptError(f"{problem} of the row; move it there, and write {MARK} in its place")
        named = (IMAGES, *may_hold(tuple(message)))
        for key, value in message.items():
            if (key in named and holds(key, value)) or (key not in ("content", "tool_calls") and shows(value)):
                problem = f"message {number} has the key {key}, and images are read from the column {IMAGES} of the row"
                raise PromptError(f"{problem}; move them there, and write {MARK} where one goes")


def text_of(place: str, content: Any, images: bool) -> str:
    if isinstance(content, str):
        return whole(place, content)
    if not isinstance(content, list) or not content:
        raise PromptError(f"{place} has the content {content!r:.40}; a text or a list of parts is needed")
    texts = []
    for part in content:
        kind = part.get("type", "text") if isinstance(part, Mapping) else type(part).__name__
        if kind == "image" and images:
            texts.append(MARK)
        elif kind == "text" and isinstance(part.get("text"), str):
            texts.append(whole(place, part["text"]))
        elif kind == "image":
            raise PromptError(f"{place} has an image, but the row has none in its column {IMAGES}")
        else:
            known = "only parts of type text or image are supported"
            raise PromptError(f"{place} has a part of type {kind!r:.40} that is {part!r:.40}; {known}")
    return "".join(texts)


def whole(place: str, text: str) -> str:
    """Raise PromptError for a lone surrogate, which no tokenizer accepts."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(f"{place} has a lone surrogate at character {error.start}; write whole characters") from None
    return text


def left_out(messages: Collection[dict[str, Any]], text: str) -> str:
    """Return what a template left out, or "". It may reword answers and tool results."""
    squeezed = ""
    for number, message in enumerate(messages):
        content, role = message["content"], message["role"]
        for piece in content.split(MARK) if role not in ("assistant", "tool") else ():
            if piece.strip() in text:
                continue
            squeezed = squeezed or "".join(text.split())
            wanted = "".join(piece.split())
            if wanted[:ENDS] not in squeezed and wanted[-ENDS:] not in squeezed:
                return f"the chat template leaves out message {number}, of role {role!r}; correct it or the row"
    return ""
