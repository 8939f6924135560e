"""From an answer to the next prompt, for templates of the models that people train."""

from collections.abc import Callable
from typing import Any

import pytest

from rollout.errors import ChatRefused
from tests.rollout.chat.scripted import LIMITS, Scene, check_against_log, scene, segments

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>'
THOUGHT = "<think>\nth\n</think>\n\n"


def saying(*answers: str | list[int]) -> Callable[[str], Any]:
    left = list(answers)
    return lambda prompt: left.pop(0)


async def play(made: Scene, *turns: str, tools: Any = None) -> list[dict[str, Any]]:
    """A conversation in which each text is the user's, or a tool's after an answer that calls tools."""
    messages: list[dict[str, Any]] = []
    for text in turns:
        calls = messages[-1].get("tool_calls", ()) if messages else ()
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": text} for call in calls]
        messages += [] if calls else [{"role": "user", "content": text}]
        messages.append((await made.session.chat(messages, tools)).message)
    return messages


def prompts(made: Scene) -> list[str]:
    """What the engine saw, as text."""
    return [str(made.template.tokenizer.decode(call.prompt)) for call in made.engine.log]


@pytest.mark.parametrize("name", ["chatml", "qwen2.5", "qwen3", "llama3", "mistral", "base", "turns"])
async def test_a_conversation_is_one_segment_that_reads_as_the_template_writes_it(name: str):
    made = scene(name, saying("ok", "abc 12", "th"))
    messages = await play(made, "12 ab", "and\nmore", "last")
    recorded = made.session.recorded(None)
    assert recorded.score is None and recorded.trajectory.metrics["segments"] == 1.0
    check_against_log(recorded.trajectory, made.engine.log, {0, 1, 2})
    ends = {"base": "<|endoftext|>", "turns": "<|endoftext|>"}.get(name, "")
    for number, seen in enumerate(prompts(made)):
        written = made.template.text(messages[: 2 * number + 1], None, header=True)
        assert seen.replace(ends, "") if ends else seen == (written.replace(THOUGHT.replace("th", ""), ""))


@pytest.mark.parametrize("name", ["qwen2.5", "mistral"])
async def test_two_results_of_parallel_calls_are_written_together(name: str):
    both = f"{CALL}\n{CALL}" if name == "qwen2.5" else CALL + CALL
    made = scene(name, saying(both, "ok"))
    messages = await play(made, "add", "13", tools=[TOOL])
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "tool", "assistant"]
    said = made.template.tokenizer.decode(made.engine.log[0].tokens)
    tail = prompts(made)[1].removeprefix(prompts(made)[0] + said)
    if name == "qwen2.5":
        result = "<tool_response>\n13\n</tool_response>"
        assert tail == f"\n<|im_start|>user\n{result}\n{result}<|im_end|>\n<|im_start|>assistant\n"
    else:
        assert tail.count("[TOOL_RESULTS]") == 2 and tail.startswith("[TOOL_RESULTS]")
    assert made.session.recorded(1).trajectory.metrics["segments"] == 1.0


async def test_llama_s_template_takes_one_call_and_no_text_beside_it():
    made = scene("llama3", saying(CALL, "ok"))
    await play(made, "add", "13", tools=[TOOL])
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    said = made.template.tokenizer.decode(made.engine.log[0].tokens)
    tail = prompts(made)[1].removeprefix(prompts(made)[0] + said)
    assert tail == header.format("ipython") + "13<|eot_id|>" + header.format("assistant")
    beside = scene("llama3", saying("I add." + CALL, "ok"))
    await play(beside, "add", "13", tools=[TOOL])
    assert beside.session.recorded(1).trajectory.metrics["segments"] == 2.0  # serving would have lost that text


async def test_thinking_stays_over_tool_calls_and_is_stripped_before_the_next_question():
    made = scene("qwen3", saying(THOUGHT + CALL, THOUGHT + "ok", THOUGHT + "abc"))
    await play(made, "add", "13", "why?", tools=[TOOL])
    one, two, three = prompts(made)
    said = made.template.tokenizer.decode(made.engine.log[0].tokens)
    assert two.startswith(one + said) and THOUGHT in two
    assert THOUGHT not in three and "ok<|im_end|>" in three
    recorded = made.session.recorded(1)
    assert len(segments(recorded.trajectory)) == 2
    check_against_log(recorded.trajectory, made.engine.log, {0, 1, 2})


async def test_the_thinking_that_a_client_drops_is_put_back():
    made = scene("qwen3", saying(THOUGHT + CALL, "ok"))
    first = (await made.session.chat([{"role": "user", "content": "add"}], [TOOL])).message
    assert first["reasoning"] == first["reasoning_content"] == "th"
    plain = {name: value for name, value in first.items() if not name.startswith("reasoning")}
    result = {"role": "tool", "tool_call_id": plain["tool_calls"][0]["id"], "content": "13"}
    await made.session.chat([{"role": "user", "content": "add"}, plain, result], [TOOL])
    assert THOUGHT in prompts(made)[1]
    assert made.session.recorded(1).trajectory.metrics["segments"] == 1.0


@pytest.mark.parametrize("name", ["qwen3", "r1"])
async def test_history_keep_goes_on_with_the_thinking(name: str):
    said = THOUGHT.removeprefix("<think>\n") if name == "r1" else THOUGHT
    made = scene(name, saying(said + "ok", said + "abc"), keep=True)
    await play(made, "12", "why?")
    assert "th\n</think>\n\nok<|im_end|>\n<|im_start|>user\nwhy?<|im_end|>" in prompts(made)[1]
    assert made.session.recorded(1).trajectory.metrics["segments"] == 1.0
    forked = scene(name, saying(said + "ok", said + "abc"))
    await play(forked, "12", "why?")
    assert "th\n</think>" not in prompts(forked)[1]
    assert forked.session.recorded(1).trajectory.metrics["segments"] == 2.0


async def test_an_answer_that_was_cut_or_ended_by_another_stop_is_closed():
    made = scene("chatml", saying("ok" * 300, "12</answer> and more", "th"))
    await play(made, "one", "two", "three")
    assert [call.tokens[-1] for call in made.engine.log][1] == made.engine.tokenizer.convert_tokens_to_ids("</answer>")
    assert prompts(made)[1].endswith("okok<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\n")
    assert "12</answer><|im_end|>\n<|im_start|>user\nthree" in prompts(made)[2]
    assert len(made.engine.log[0].tokens) == 200 and made.session.recorded(1).trajectory.finish == "stop"


async def test_what_was_sampled_is_never_encoded_again():
    made = scene("chatml", saying("ok abc 12", "th"))
    await play(made, "one", "two")
    first, second = made.engine.log
    assert second.prompt[: len(first.prompt) + len(first.tokens)] == first.prompt + first.tokens
    anew = made.template.tokenizer.encode(prompts(made)[1], add_special_tokens=False)
    assert len(anew) < len(second.prompt)


async def test_plain_text_needs_no_template():
    made = scene("chatml", saying("ok"))
    plain = scene("chatml", saying("ok", "th"), LIMITS, False, None, "--data.chat_template=none")
    await play(plain, "one", "two")
    assert prompts(plain) == ["one", "oneok<|im_end|>\n\ntwo"]
    await play(made, "one")
    assert prompts(made)[0].startswith("<|im_start|>user\none")


async def test_the_run_s_system_prompt_and_the_template_s_arguments_are_used():
    made = scene("qwen3", saying("ok"), LIMITS, False, {"enable_thinking": False}, "--data.system_prompt=Count.")
    await play(made, "one")
    assert prompts(made)[0] == (
        "<|im_start|>system\nCount.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages: a list of one message or more is needed"),
        ("hi", "messages: a list of one message or more is needed"),
        ([{"content": "hi"}], r"messages\[0\]: a dict with role and content is needed"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content: a text is needed"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}],
            r"messages\[0\].content\[0\]: a part of type 'image_url'; chats take text only",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "x"}]}], r"messages\[0\].tool_calls\[0\]: a dict with id, type"),
        ([{"role": "system", "content": "x"}], "the chat template refuses them: Only user, assistant and tool roles"),
    ],
)
async def test_messages_that_are_none_are_refused_by_name(messages: Any, words: str):
    made = scene("mistral", saying("ok"))
    with pytest.raises(ChatRefused, match=words) as caught:
        await made.session.chat(messages)
    assert caught.value.code == "invalid_request_error" and "\n" not in str(caught.value)
    await play(made, "still")  # the episode goes on
    assert made.session.recorded(0).trajectory.finish == "stop"
