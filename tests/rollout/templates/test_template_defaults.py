"""What a family's files say by default: which tokens end an answer, and how its template switches thinking."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.load import ConfigError, load
from rollout.engine.arguments import unknown_parser
from rollout.episodes.prompts import Prompts
from rollout.templates.parsers import REASONING_MARKS, REASONING_TYPES, TOOL_MARKS, TOOL_TYPES, choose
from rollout.templates.renderer import ChatTexts, Renderer
from rollout.templates.thinking import thinking_arguments
from rollout.templates.turn_ends import named_ends, turn_end
from tests.rollout.chat.chat_templates import TEMPLATES as CHAT
from tests.rollout.templates.family_templates import CLOSINGS, SWITCHED, family_tokenizer

NEEDED = ["--data.train=d.jsonl", "--reward.function=countdown", "--sampling.stop=[]"]
THINK, DEEP = "<think></think>", "<\uff5cAssistant\uff5c> <\uff5ctool\u2581calls\u2581begin\uff5c>"


@pytest.fixture(scope="module")
def renderer() -> Iterator[Renderer]:
    made = Renderer()
    yield made
    made.close()


def test_the_token_that_ends_a_turn_is_found_in_the_template_of_each_family(renderer: Renderer):
    found = {}
    for family, (template, _) in CLOSINGS.items():
        tokenizer = family_tokenizer(template)
        end = turn_end(ChatTexts(tokenizer, renderer), tokenizer, {})
        found[family] = None if end is None else tokenizer.convert_ids_to_tokens(end)
    assert found == {family: end for family, (_, end) in CLOSINGS.items()}


def test_what_the_files_name_counts_and_defaults_of_a_class_do_not(tmp_path: Path):
    tokenizer = family_tokenizer(CLOSINGS["GLM-4"][0])
    user, end = (tokenizer.convert_tokens_to_ids(name) for name in ("<|user|>", "<|endoftext|>"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2, "text_config": {"eos_token_id": [user, 7]}}))
    assert named_ends(str(tmp_path), tokenizer) == {user: "config.json", end: "tokenizer"}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 3]}')
    source = "generation_config.json"
    assert named_ends(str(tmp_path), tokenizer) == {2: source, 3: source, end: "tokenizer"}
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model.path: .*: generation_config.json cannot be read"):
        named_ends(str(tmp_path), tokenizer)


def test_thinking_is_switched_by_each_template_s_own_argument(renderer: Renderer):
    for family, (template, off) in SWITCHED.items():
        texts = ChatTexts(family_tokenizer(template), renderer)
        if off is None:
            with pytest.raises(ValueError, match="the chat template has no switch for thinking"):
                thinking_arguments(False, texts, {}, None, template)
            continue
        assert thinking_arguments(False, texts, {}, None, template) == off, family
        ((name, value),) = thinking_arguments(True, texts, {}, None, template).items()
        assert name in off and value in (True, -1)


def prompts(template: str, *options: str) -> Prompts:
    return Prompts(family_tokenizer(template), load([f"--model.path={Path(__file__).parent}", *NEEDED, *options]))


def test_the_switch_reaches_prompts_beside_other_arguments():
    template = SWITCHED["DeepSeek-V3.1"][0] + "{{ tone }}"
    made = prompts(template, "--rollout.chat.thinking=on", "--rollout.chat.template_kwargs={tone: mild}")
    assert made.template_kwargs == {"tone": "mild", "thinking": True}
    assert made.shown(made.encode({"problem": "hi"})).endswith("<think>mild")


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("Qwen 3", ["template_kwargs={enable_thinking: true}"], "template_kwargs.enable_thinking says it too; remove"),
        ("gpt-oss", [], r"no switch .*; set rollout.chat.template_kwargs: {reasoning_effort: low} or another"),
        ("Granite 3.3", ["system"], "it may ignore its switch where data.system_prompt is set: leave that out"),
        ("Qwen 3", ["plain"], "data.chat_template: none has no switch for thinking; remove one of them"),
    ],
)
def test_a_switch_that_does_nothing_is_refused_by_name(family: str, options: list[str], words: str):
    further = {"system": "--data.system_prompt=Hm.", "plain": "--data.chat_template=none"}
    given = [further.get(option, f"--rollout.chat.{option}") for option in options]
    with pytest.raises(ConfigError, match=rf"rollout.chat.thinking: off: .*{words}"):
        prompts(SWITCHED[family][0], "--rollout.chat.thinking=off", *given)


PARSERS = {
    ("qwen3", CHAT["qwen3"][0] + THINK): ("hermes", "qwen3"),
    ("qwen3_moe", "tool_calls <tool_call>\n<function={{ name }}>\n<parameter=a>"): ("qwen3_coder", None),
    ("qwen2", CHAT["qwen2.5"][0]): ("hermes", None),
    ("llama", "tool_calls ipython {'name': x, \"parameters\": y}"): ("llama3_json", None),
    ("mistral", CHAT["mistral"][0]): ("mistral", None),
    ("glm4_moe", "tool_calls <tool_call>{{ n }}\n<arg_key>" + THINK): ("glm45", "glm45"),
    ("gpt_oss", "tool_calls <|start|>assistant<|channel|>commentary to="): ("openai", "openai_gptoss"),
    ("deepseek_v3", f"{DEEP} tool_calls {{% if not thinking %}}" + THINK): ("deepseek_v31", "deepseek_v3"),
    ("deepseek_v3", f"{DEEP} tool_calls \n```json\n" + THINK): ("deepseek_v3", "deepseek_r1"),
    ("kimi_k2", "tool_calls <|tool_calls_section_begin|>"): ("kimi_k2", None),
    ("gemma3", CLOSINGS["Gemma 3"][0]): (None, None),
}


def test_parsers_are_chosen_by_template_and_type():
    for (kind, template), (tools, thinking) in PARSERS.items():
        assert choose("tool_parser", "auto", kind, template) == tools, kind
        assert choose("reasoning_parser", "auto", kind, template) == thinking, kind
    assert choose("tool_parser", None, "qwen3", CHAT["qwen3"][0]) is None
    assert choose("tool_parser", "pythonic", "qwen3", CHAT["qwen3"][0]) == "pythonic"
    unknown = (
        r"rollout.chat.tool_parser: auto: no parser of vLLM is known for the tool calls that the chat template of a"
    )
    with pytest.raises(ValueError, match=f"{unknown} new model writes; name one, or set it to null"):
        choose("tool_parser", "auto", "new", "tool_calls <call>")
    with pytest.raises(ValueError, match="reasoning_parser: auto: no parser of vLLM is known for the thinking"):
        choose("reasoning_parser", "auto", "new", "<think>")


def test_every_parser_that_auto_chooses_is_one_of_vllm_s():
    tables = {
        "tool_parser": {*TOOL_TYPES.values(), *(name for _, name in TOOL_MARKS)},
        "reasoning_parser": {*REASONING_TYPES.values(), *(name for _, name in REASONING_MARKS)},
    }
    assert [line for key, names in tables.items() for name in names for line in unknown_parser(key, name)] == []
