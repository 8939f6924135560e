"""Finds tool calls and reasoning by the parsers of `vllm serve`."""

import json
import secrets
import string
from typing import Any

from pydantic import ValidationError

from configs.schema import ChatConfig
from rollout.engine.door.vllm_parsers import ChatCompletionRequest, ParserManager
from rollout.errors import ChatRefused

ID_CHARACTERS = string.ascii_letters + string.digits


class VllmParser:
    """Reads answers. Raises ValueError if the parsers do not suit the tokenizer."""

    def __init__(self, tokenizer: Any, chat: ChatConfig, model: str) -> None:
        self._tokenizer, self._kwargs = tokenizer, chat.template_kwargs
        names = ", ".join(name for name in (chat.tool_parser, chat.reasoning_parser) if name)
        try:
            parser = ParserManager.get_parser(
                tool_parser_name=chat.tool_parser,
                reasoning_parser_name=chat.reasoning_parser,
                enable_auto_tools=True,
                model_name=model,
            )
            assert parser is not None, "one of them is named"
            self._parser = parser
            self._made(None)
        except Exception as error:  # vLLM's parsers raise many classes
            reason = " ".join(str(error).split())
            raise ValueError(f"rollout.chat: {names} cannot be used with the tokenizer of {model}: {reason}") from error

    def check(self, tools: list[dict[str, Any]] | None) -> None:
        self._request(tools)

    def _request(self, tools: list[dict[str, Any]] | None) -> ChatCompletionRequest:
        try:
            return ChatCompletionRequest(
                model="policy",
                messages=[{"role": "user", "content": ""}],
                tools=tools,
                chat_template_kwargs=self._kwargs,
            )
        except ValidationError as error:
            first = error.errors()[0]
            raise ChatRefused(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None

    def message(self, tokens: list[int], tools: list[dict[str, Any]] | None) -> tuple[dict[str, Any], int]:
        request = self._request(tools)
        text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        parser = self._made(request.tools)
        try:
            reasoning, content, calls = parser.parse(
                text, request, enable_auto_tools=True, model_output_token_ids=tokens
            )
        except Exception:  # odd text stays text, and counts as bad
            return {"role": "assistant", "content": text}, 1
        made: dict[str, Any] = {"role": "assistant", "content": content or ""}
        if reasoning:
            made |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if calls:
            made["tool_calls"] = [tool_call(call) for call in calls]
        return made, self._bad_calls(made, tools, parser)

    def _made(self, tools: Any) -> Any:
        return self._parser(self._tokenizer, tools, chat_template_kwargs=self._kwargs)

    def _bad_calls(self, message: dict[str, Any], tools: list[dict[str, Any]] | None, parser: Any) -> int:
        """Count calls of unknown tools, without a JSON object, or left as text."""
        known = {tool["function"]["name"] for tool in tools or ()}
        functions = [call["function"] for call in message.get("tool_calls", ())]
        bad = sum(each["name"] not in known or not is_object(each["arguments"]) for each in functions)
        begins = getattr(parser.tool_parser, "tool_call_start_token", None)
        return bad + bool(tools and begins and begins in message["content"])


def tool_call(call: Any) -> dict[str, Any]:
    """Ids have nine characters: Mistral's templates take no others."""
    name = call.id or "".join(secrets.choice(ID_CHARACTERS) for _ in range(9))
    return {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False
