"""Messages of a row are converted for chat templates or refused by name; also checks what ends an answer."""

from pathlib import Path
from typing import Any

import pytest

from actors.doctor.trial import Judgement, Rows, judge_ends, judge_template, judge_tools
from configs.load import load
from rollout.episodes.prompts import Prompts
from rollout.episodes.row_messages import messages_of
from rollout.errors import PromptError
from tests.harness.lanes import long_but
from tests.rollout.chat.chat_templates import TEMPLATES, chat_tokenizer

MODEL = f"--model.path={Path(__file__).parent}"
"""A folder, so that nothing is requested from the hub."""
NEEDED = [MODEL, "--data.train=d.jsonl", "--reward.function=countdown", "--sampling.stop=[]"]
NAMES = [name for name in TEMPLATES if name not in ("base", "r1")]
Row = dict[str, Any]


def made(template: str, *options: str) -> Prompts:
    return Prompts(chat_tokenizer(template), load([*NEEDED, *options]))


def shown(template: str, row: Row, *options: str) -> str:
    prompts = made(template, *options)
    return prompts.shown(prompts.encode(row))


def chat(*messages: tuple[str, Any]) -> Row:
    return {"prompt": [{"role": role, "content": content} for role, content in messages]}


@pytest.mark.parametrize("template", long_but(NAMES, 0, 2, 3))
def test_a_last_message_of_the_assistant_is_continued(template: str):
    begun = shown(template, chat(("user", "Name a vowel."), ("assistant", "<answer>")))
    assert begun.endswith("<answer>") and begun.count("<answer>") == 1
    assert "Name a vowel." in begun
    asked = shown(template, chat(("user", "Name a vowel.")))
    assert shown(template, chat(("user", "Name a vowel."), ("assistant", " "))) == asked


def test_a_last_message_that_cannot_be_continued_is_refused():
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    with pytest.raises(PromptError, match="its last message calls a tool; the tool's result must follow"):
        shown("qwen2.5", {"prompt": [{"role": "user", "content": "hi"}, call]})
    with pytest.raises(PromptError, match="the chat template changes its last message, so no answer can continue it"):
        shown("r1", chat(("user", "hi"), ("assistant", "hm</think>")))


@pytest.mark.parametrize("template", long_but(NAMES, 2, 4))
def test_parts_are_joined_and_keys_that_are_null_left_out(template: str):
    parts = [{"type": "text", "text": "Name "}, {"type": "text", "text": "a vowel.", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts, "tool_calls": None, "name": None}]}
    assert shown(template, row) == shown(template, {"problem": "Name a vowel."})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("images", ["a.png"]), ("image_url", "https://a.org/7"), ("img", {"base64": "iVBORw0KGgo"})],
        ("figure", {"bytes": None, "path": "a.png"}),
    ],
)
def test_images_in_a_message_are_refused_for_a_model_that_sees(key: str, value: Any):
    row = {"prompt": [{"role": "user", "content": "which?", key: value}]}
    words = f"message 0 has the key {key}, and images are read from the column images of the row; move them there, and"
    with pytest.raises(PromptError, match=words):
        messages_of(row, "", seeing=True)
    (message,) = messages_of(row, "")
    assert message == row["prompt"][0], "a text model sees none anywhere"
    assert messages_of(row | {"images": ["a.png"]}, "", seeing=True) == [message]


def test_a_message_that_is_a_data_url_is_refused_for_a_model_that_sees():
    row = {"prompt": "Which colour?\ndata:image/png;base64,iVBORw0KGgoAAAANSUhEUg"}
    with pytest.raises(PromptError, match="message 0 has a data URL of an image, and images are read from the column"):
        messages_of(row, "", seeing=True)
    assert messages_of(row, "") == [{"role": "user", "content": row["prompt"]}]


WRONG: list[tuple[Row, str]] = [
    (chat(("user", "hi"), ("assistant", None), ("user", "no")), "message 1, of role 'assistant', has the content None"),
    (chat(("user", [])), r"message 0, of role 'user', has the content \[\]; a text or a list of parts is needed"),
    (chat(("user", 7)), "message 0, of role 'user', has the content 7"),
    (chat(("user", {"type": "text"})), "message 0, of role 'user', has the content {'type': 'text'}"),
    (chat(("user", ["hi"])), "message 0, of role 'user', has a part of type 'str' that is 'hi'"),
    (chat(("user", [{"type": "text", "text": None}])), "has a part of type 'text' that is {'type': 'text', 'text': No"),
    (chat(("user", [{"type": "video"}])), "has a part of type 'video'"),
    (chat(("user", [{"type": "image"}])), "has an image, but the row has none in its column images"),
    (
        chat(("usr", "hi")),
        "message 0 has the role 'usr'; system, developer, user, assistant, tool are known, and",
    ),
    ({"prompt": [{"content": "hi"}]}, "message 0 is {'content': 'hi'}; role and content are needed"),
    ({"prompt": ["hi"]}, "message 0 is 'hi'; role and content are needed"),
    ({"prompt": [None]}, "message 0 is None; role and content are needed"),
    ({"prompt": {"role": "user", "content": "hi"}}, "the prompt of the row is {'role': .*; a text or a list of"),
    ({"prompt": 7}, "the prompt of the row is 7; a text or a list of messages is needed"),
    ({"prompt": []}, r"the prompt of the row is empty: \[\]"),
    ({"problem": ""}, "the problem of the row is empty: ''"),
    ({"prompt": None, "problem": None, "answer": "1"}, "the prompt of the row is empty: None"),
    ({"answer": "1"}, "the row has neither prompt nor problem, but answer"),
    (chat(("user", "\ud83d")), "message 0, of role 'user', has a lone surrogate at character 0; write whole"),
    ({"problem": "a\ud83d"}, "the prompt of the row has a lone surrogate at character 1; write whole characters"),
    (chat(("assistant", "")), "the row cannot be made into a chat"),
]


@pytest.mark.parametrize(("row", "words"), WRONG, ids=range(len(WRONG)))
@pytest.mark.parametrize("template", ["qwen3", "none"])
def test_a_malformed_message_is_refused_by_number(row: Row, words: str, template: str):
    options = ["--data.chat_template=none"] if template == "none" else []
    if template == "none" and "cannot be made into a chat" in words:
        return
    with pytest.raises(PromptError, match=words) as caught:
        shown("qwen3", row, *options)
    assert "\n" not in str(caught.value) and caught.value.permanent


def test_a_message_that_a_template_refuses_or_leaves_out_is_refused():
    twice = chat(("system", "Be brief."), ("user", "hi"), ("system", "Be very brief."))
    with pytest.raises(PromptError, match="the chat template leaves out message 2, of role 'system'; correct it or"):
        shown("qwen2.5", twice)
    with pytest.raises(PromptError, match="the chat template leaves out message 0, of role 'developer'"):
        shown("qwen3", chat(("developer", "Be brief."), ("user", "hi")))
    with pytest.raises(PromptError, match="the chat template refuses the row: Only user, assistant and tool roles!"):
        shown("mistral", twice)
    assert "Be brief." in shown("chatml", twice)
    assert "<|start_header_id|>ipython" in shown("llama3", chat(("user", "hi"), ("ipython", "4")))


@pytest.mark.parametrize(("given", "written"), [('{"a":1}', '{"a": 1}'), (None, "{}"), ({"b": 2}, '{"b": 2}')])
def test_arguments_of_a_call_are_written_as_json(given: Any, written: str):
    """Most templates would write a text of JSON as JSON of a text."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": given}}]}
    row = {"prompt": [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "ok"}]}
    assert f'"arguments": {written}}}' in shown("qwen2.5", row)


def test_a_template_that_writes_texts_gets_the_arguments_as_they_are(tmp_path: Path):
    """DeepSeek's joins them to the text of the call, and fails on a mapping."""
    joining = tmp_path / "joining.jinja"
    joining.write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m.content }}{% for call in m.tool_calls %}"
        "{{ ' ' + call.function.arguments }}{% endfor %}{% endfor %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}
    row = {"prompt": [{"role": "user", "content": "hi"}, call, {"role": "tool", "content": "ok"}]}
    assert '{"a":1}' in shown("qwen2.5", row, f"--data.chat_template={joining}")


def test_the_arguments_of_the_template_hold_for_the_prompts_of_rows():
    thinking, silent = "<|im_start|>assistant\n", "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert shown("qwen3", {"problem": "hi"}).endswith(thinking)
    assert shown("qwen3", {"problem": "hi"}, "--rollout.chat.template_kwargs={enable_thinking: false}").endswith(silent)


def judged(template: str, *options: str, first: str = "") -> Judgement:
    found, config = Judgement(), load([*NEEDED, *options])
    prompts = Prompts(chat_tokenizer(template), config)
    judge_ends(found, config, prompts)
    judge_template(found, config, prompts, first or prompts.shown(prompts.encode({"problem": "hi"})))
    return found


@pytest.mark.parametrize("template", [*NAMES, "r1"])
def test_a_template_that_fits_the_model_is_no_warning(template: str):
    assert judged(template).warnings == []


def test_what_ends_an_answer_is_named_with_its_source():
    (line,) = [line for line in judged("base", "--sampling.stop=['</answer>']").facts if line.startswith("answers")]
    ends = "</answer> (sampling.stop), <|endoftext|> (tokenizer), <|im_end|> (chat template)"
    assert line == f"answers end at {ends} or after sampling.max_tokens 1024"
    assert judged("base").warnings == judged("base", "--data.chat_template=none").warnings == []


def test_an_argument_that_the_template_does_not_know_is_warned_of():
    given = "--rollout.chat.template_kwargs={enable_thinkng: false}"
    (warning,) = judged("qwen3", given).warnings
    assert warning == "rollout.chat.template_kwargs.enable_thinkng: the chat template has no such argument"
    assert judged("qwen3", given.replace("kng", "king")).warnings == []


@pytest.mark.parametrize(
    ("pattern", "warned"), [("(?s)^<think>.*</think>", True), ("(?s)^(<think>)?.*</think>", False)]
)
def test_a_pattern_that_can_never_match_is_warned_of(pattern: str, warned: bool):
    part = f"{{function: regex, kwargs: {{pattern: '{pattern}'}}, name: format}}"
    found = judged("r1", f"--reward.function=[{part}, {{function: countdown}}]")
    assert "note: prompts end with <think>: the answer begins after it, and rewards do not see it" in found.facts
    never = "the pattern of format needs <think> in an answer, but prompts already end with it; write (<think>)? there"
    assert found.warnings == [f"reward.function: {never}"] * warned
    assert judged("qwen3", f"--reward.function=[{part}, {{function: countdown}}]").warnings == []


@pytest.mark.parametrize(
    ("pattern", "warned"),
    [
        (r"</answer><\|im_end\|>$", True),
        (r"</answer>(<\|im_end\|>)?$", False),
        (r"a(<\|im_end\|>|$)", False),
        ("</answer>$", False),
    ],
)
def test_a_pattern_that_needs_a_special_token_is_warned_of(pattern: str, warned: bool):
    part = f"{{function: regex, kwargs: {{pattern: '{pattern}'}}, name: format}}"
    never = "needs <|im_end|>, but rewards read answers without special tokens; remove it there"
    found = judged("qwen3", f"--reward.function=[{part}, {{function: countdown}}]")
    assert found.warnings == [f"reward.function: the pattern of format {never}"] * warned


def test_tools_of_rows_that_the_model_does_not_see_are_warned_of():
    rows: Rows = [(0, {"problem": "?"}), (4, {"problem": "?", "tools": [{"type": "function"}]}), (9, {"tools": []})]
    for task, warned in (("single_turn", True), ("agent", False)):
        found = Judgement()
        judge_tools(found, load([*NEEDED, f"--rollout.task={task}", "--rollout.agent.command=[python]"]), rows)
        assert [line.partition(": the model")[0] for line in found.warnings] == [
            "data.train: d.jsonl: 1 of 3 rows looked at have tools, such as row 4"
        ] * warned


def test_a_built_in_reward_whose_tag_ends_the_prompt_is_warned_of():
    (line,) = judged("chatml", first="Name a vowel.<answer>").warnings
    assert line.startswith("reward.function: countdown needs <answer> in an answer, but prompts already end with it")


def page(name: str) -> str:
    return " ".join((Path(__file__).parents[3] / "docs" / name).read_text(encoding="utf-8").split())


def test_the_pages_quote_the_messages():
    assert 'pattern: "(?s)^(<think>)?.*</think>"' in page("rewards.md")
    assert "`message 1, of role 'assistant', has the content None; a text or a list of parts is needed`" in page(
        "data.md"
    )
    assert judged("base", "--sampling.stop=['</answer>']").facts[0] in page("data.md")
    thinking = judged("qwen3", "--rollout.chat.thinking=off", "--rollout.chat.tool_parser=auto").facts
    assert all(f"`{line}`" in page("chat.md") for line in thinking if line.startswith("rollout.chat"))
