"""Chooses vLLM's parsers of tool calls and thinking where `rollout.chat` has `auto`.

Sources: vLLM's pages "Tool Calling" and "Reasoning Outputs", and the marks that its parsers look for.
"""

from collections.abc import Mapping
from typing import Literal

AUTO = "auto"
TOOL_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("<|channel|>", "commentary"), "openai"),
    (("<|tool_calls_section_begin|>",), "kimi_k2"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>", "```json"), "deepseek_v3"),
    (("<\uff5ctool\u2581calls\u2581begin\uff5c>",), "deepseek_v31"),
    (("<seed:tool_call>",), "seed_oss"),
    (("<minimax:tool_call>",), "minimax_m2"),
    (("<|tool_call_start|>",), "lfm2"),
    (("<|START_ACTION|>",), "cohere_command3"),
    (("<start_function_call>",), "functiongemma"),
    (("<|tool_call>",), "gemma4"),
    (("<|tools_prefix|>",), "apertus"),
    (("<arg_key>",), "glm45"),
    (("<function=", "<parameter="), "qwen3_coder"),
    (("<function_calls>",), "olmo3"),
    (("[TOOL_CALLS]",), "mistral"),
    (("ipython", '"parameters": '), "llama3_json"),
    (("<tool_call>", '"name": ', "arguments"), "hermes"),
    (("<tool_call>", '\\"name\\": ', "arguments"), "hermes"),
)
"""The first parser whose marks a template has all counts."""
TOOL_TYPES: Mapping[str, str] = {
    "granite": "granite", "granitemoehybrid": "granite4", "hunyuan_v1_moe": "hunyuan_a13b", "jamba": "jamba",
    "internlm2": "internlm",
}  # fmt: skip
"""These come before the marks, which other families have too."""
REASONING_TYPES: Mapping[str, str] = {
    **dict.fromkeys(("qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe"), "qwen3"),
    **{"glm4_moe": "glm45", "gpt_oss": "openai_gptoss", "seed_oss": "seed_oss", "minimax_m2": "minimax_m2"},
    **{"hunyuan_v1_moe": "hunyuan_a13b", "gemma4": "gemma4", "gemma4_text": "gemma4", "olmo3": "olmo3"},
    **{"granite": "granite", "ernie4_5_moe": "ernie45", "kimi_k2": "kimi_k2", "nemotron_h": "nemotron_v3"},
}
REASONING_MARKS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("[THINK]",), "mistral"),
    (("<|START_THINKING|>",), "cohere_command3"),
    (("<\uff5cAssistant\uff5c>", "not thinking"), "deepseek_v3"),
    (("<\uff5cAssistant\uff5c>", "</think>"), "deepseek_r1"),
)
THINKS = ("<think>", "</think>", "[THINK]", "<|START_THINKING|>", "<|channel|>", "<seed:think>", "<|channel>")
Key = Literal["tool_parser", "reasoning_parser"]
KEYS: tuple[Key, ...] = ("tool_parser", "reasoning_parser")


def choose(key: Key, wanted: str | None, kind: str, template: str) -> str | None:
    """Return `wanted`, or for `auto` the parser of the `template` and the model's `kind`; None if the template writes
    none. Raises ValueError if none is known.

    Example: `choose("tool_parser", "auto", "qwen3", template) == "hermes"`
    """
    if wanted != AUTO:
        return wanted
    writes = "tool_calls" in template if key == "tool_parser" else any(mark in template for mark in THINKS)
    if not writes:
        return None
    types, marks = (TOOL_TYPES, TOOL_MARKS) if key == "tool_parser" else (REASONING_TYPES, REASONING_MARKS)
    found = types.get(kind) or next((name for each, name in marks if all(mark in template for mark in each)), None)
    if found is None:
        what = "tool calls" if key == "tool_parser" else "thinking"
        problem = f"no parser of vLLM is known for the {what} that the chat template of a {kind or 'this'} model writes"
        raise ValueError(f"rollout.chat.{key}: auto: {problem}; name one, or set it to null")
    return found
