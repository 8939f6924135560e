"""vLLM's own parsers, without an engine: calls and reasoning in tokens of a policy."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from configs.load import load
from configs.schema import ChatConfig
from rollout.chat.template import ChatTemplate
from rollout.engine.arguments import unknown_parsers
from rollout.episodes.parser_choice import check_reads_calls
from rollout.episodes.prompts import Prompts
from rollout.errors import ChatRefused
from rollout.templates.parsers import choose
from tests.rollout.chat.chat_templates import chat_tokenizer

if TYPE_CHECKING:
    from rollout.engine.chat_parser import VllmParser

RUN = "examples/countdown/quickstart.yaml"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "b": "ok"}}\n</tool_call>'


def setup_module() -> None:
    """vLLM takes seconds to import, and each worker of pytest collects this file."""
    global VllmParser
    from rollout.engine.chat_parser import VllmParser


def read(text: str, tools: Any = None, **names: Any) -> tuple[dict[str, Any], int]:
    tokenizer = chat_tokenizer("qwen3")
    parser = VllmParser(tokenizer, ChatConfig(**names), "model")
    return parser.message(tokenizer.encode(text, add_special_tokens=False), tools)


def test_parallel_calls_are_told_apart_and_get_names():
    message, bad = read(f"I add.\n{CALL}\n{CALL}", [TOOL], tool_parser="hermes")
    assert message["content"].strip() == "I add." and bad == 0
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["add", "add"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"a": 12, "b": "ok"}
    ids = {call["id"] for call in message["tool_calls"]}
    assert len(ids) == 2 and all(isinstance(name, str) and name for name in ids)


def test_without_tools_a_call_is_text():
    message, bad = read(CALL, tool_parser="hermes")
    assert "tool_calls" not in message and "<tool_call>" in message["content"] and bad == 0


def test_a_broken_call_stays_text_and_counts():
    message, bad = read('<tool_call>{"name": "add", "argum</tool_call>', [TOOL], tool_parser="hermes")
    assert "tool_calls" not in message and "argum" in message["content"] and bad == 1


def test_a_call_of_a_tool_that_is_none_counts():
    message, bad = read(CALL.replace('"add"', '"subtract"'), [TOOL], tool_parser="hermes")
    assert message["tool_calls"][0]["function"]["name"] == "subtract" and bad == 1


def test_reasoning_is_told_from_the_answer():
    message, _ = read("<think>\nth\n</think>\n\nok", reasoning_parser="qwen3")
    assert message["content"].strip() == "ok"
    assert message["reasoning"].strip() == message["reasoning_content"].strip() == "th"
    both, _ = read(f"<think>\nth\n</think>\n\n{CALL}", [TOOL], reasoning_parser="qwen3", tool_parser="hermes")
    assert both["reasoning"].strip() == "th" and len(both["tool_calls"]) == 1


def test_the_end_of_an_answer_is_no_part_of_it():
    message, _ = read("ok", [TOOL], tool_parser="hermes")
    assert message == {"role": "assistant", "content": "ok"}


@pytest.mark.parametrize("tools", [[{"type": "function"}], [{"function": {"name": 3}}]])
def test_tools_that_are_none_are_refused_by_name(tools: Any):
    with pytest.raises(ChatRefused, match="tools"):
        VllmParser(chat_tokenizer("qwen3"), ChatConfig(tool_parser="hermes"), "model").check(tools)


def test_parsers_that_cannot_be_used_are_refused_in_one_line():
    with pytest.raises(ValueError, match=r"rollout.chat: deepseek_v3 cannot be used with the tokenizer") as caught:
        tokenizer = chat_tokenizer("chatml")
        VllmParser(tokenizer, ChatConfig(tool_parser="deepseek_v3"), "model")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "mistral"])
def test_a_parser_that_auto_chooses_reads_the_call_of_the_template(name: str):
    options = [f"--model.path={Path(__file__).parent}", "--rollout.chat.tool_parser=auto", "--data.chat_template=null"]
    made = Prompts(chat_tokenizer(name), load([RUN, *options, "--sampling.stop=[]"]))
    template = ChatTemplate(made)
    chosen = choose("tool_parser", "auto", "", made.template_text)
    check_reads_calls(VllmParser(made.tokenizer, ChatConfig(tool_parser=chosen), "model"), template, str(chosen))
    other = VllmParser(made.tokenizer, ChatConfig(tool_parser="pythonic"), "model")
    with pytest.raises(ValueError, match=r"auto: vLLM.s parser pythonic does not read the call"):
        check_reads_calls(other, template, "pythonic")


def test_names_of_parsers_are_checked_without_vllm():
    config = load([RUN, "--rollout.chat.tool_parser=hermis", "--rollout.chat.reasoning_parser=qwen4"])
    lines = list(unknown_parsers(config))
    assert lines[0] == "rollout.chat.tool_parser: 'hermis' is no parser of the installed vLLM; did you mean hermes?"
    assert lines[1].startswith(
        "rollout.chat.reasoning_parser: 'qwen4' is no parser of the installed vLLM; did you mean"
    )
    known = load([RUN, "--rollout.chat.tool_parser=hermes", "--rollout.chat.reasoning_parser=qwen3"])
    assert list(unknown_parsers(known)) == []
