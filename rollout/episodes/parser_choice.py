"""Chooses parsers for `rollout.chat: auto`, and tries them on the template."""

import json

from configs.model_facts import model_facts
from configs.schema import ChatConfig, Config
from rollout.chat.messages import Message
from rollout.chat.session import AnswerParser
from rollout.chat.template import ChatTemplate
from rollout.engine.arguments import unknown_parser
from rollout.episodes.prompts import Prompts
from rollout.errors import ChatRefused
from rollout.templates.parsers import KEYS, choose
from rollout.templates.turn_ends import common

PARAMETERS = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}}


def settled_chat(config: Config, prompts: Prompts) -> ChatConfig:
    """Resolve `auto` and `thinking`. Raises ValueError."""
    kind, chat = model_facts(config.model.path).kind or "", config.rollout.chat
    found: dict[str, str | None] = {key: choose(key, getattr(chat, key), kind, prompts.template_text) for key in KEYS}
    for key, name in found.items():
        if name and (lines := list(unknown_parser(key, name))):
            raise ValueError(lines[0])
    return chat.model_copy(update={**found, "template_kwargs": prompts.template_kwargs})


def check_reads_calls(parser: AnswerParser, template: ChatTemplate, name: str) -> None:
    """Raise ValueError unless the parser reads the template's calls."""
    asked: Message = {"role": "user", "content": "1"}
    call = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": "x", "b": 2}}}
    tools = [{"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}}]
    key = "rollout.chat.tool_parser: auto"
    try:
        texts = [
            template.text([asked], tools, True),
            template.text([asked, {"role": "assistant", "content": "", "tool_calls": [call]}], tools, False),
        ]
    except ChatRefused as error:
        problem = f"the chat template writes no call that {name} could be tried with: {error}"
        raise ValueError(f"{key}: {problem}; name a parser, or set it to null") from None
    said = texts[1][common(*texts) :]
    tokens = list(template.tokenizer.encode(said, add_special_tokens=False))
    while tokens and (tokens[-1] in template.ends or not str(template.tokenizer.decode(tokens[-1:])).strip()):
        tokens.pop()
    message, bad_calls = parser.message(tokens, tools)
    calls = [] if bad_calls else [each["function"] for each in message.get("tool_calls", ())]
    if [(each["name"], json.loads(each["arguments"])) for each in calls] != [("add", {"a": "x", "b": 2})]:
        problem = f"vLLM's parser {name} does not read the call that the chat template writes, {said!r:.200}"
        raise ValueError(f"{key}: {problem}; name another parser, or set it to null")
