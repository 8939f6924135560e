"""Which tokens of a row are trained: those that a server would sample, from its header to its end."""

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from configs.load import ConfigError
from learner.sft.answers import AnswerReader, TrainedText, reader_of
from rollout.errors import PromptError
from tests.harness.demonstrated import CHATML, END, TURNS, chatml_tokenizer, sft_config

JOINED = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A template that writes no end, as the quickstart's."""
FORGETFUL = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Qwen3's way: only a last answer has its thinking."""

CLOSED = CHATML.removesuffix("{% endif %}") + "{% else %}{{ eos_token }}{% endif %}"
"""Phi 3's way: behind the end of a chat's last turn comes the end of the text."""
CALLING = CHATML.replace(
    "message['content'] +",
    "message['content'] + (message.tool_calls[0].function.arguments | tojson if message.tool_calls else '') +",
)
"""Qwen2.5's way, with the arguments alone."""
CALL = {"role": "assistant", "content": "hm", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]}
SAID = {"reasoning_content": "carry"}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """The texts of a row as pairs: the whole text, and what is trained of it."""
    readers: list[AnswerReader] = []

    def texts(row: dict[str, Any], template: str = CHATML, end: str = "<|im_end|>", **changes: Any) -> Any:
        tokenizer = chatml_tokenizer(template, end)
        readers.append(AnswerReader(tokenizer, sft_config(tmp_path, **changes)))
        return [shown(tokenizer, text) for text in readers[-1].texts(row)]

    yield texts
    for reader in readers:
        reader.close()


def shown(tokenizer: Any, text: TrainedText) -> tuple[str, list[str]]:
    """The text, and each run of trained tokens."""
    runs: list[list[int]] = []
    for place, (token, trained) in enumerate(zip(text.tokens.tolist(), text.trained.tolist(), strict=True)):
        if trained and (place == 0 or not text.trained[place - 1]):
            runs.append([])
        if trained:
            runs[-1].append(token)
    return tokenizer.decode(text.tokens), [tokenizer.decode(run) for run in runs]


WHOLE = (
    "<|im_start|>user\n17*6-9=<|im_end|>\n<|im_start|>assistant\n<calc>17*6<|im_end|>\n"
    "<|im_start|>user\n102<|im_end|>\n<|im_start|>assistant\n93<|im_end|>\n"
)


def test_every_answer_is_trained_with_its_end(read: Any) -> None:
    assert read({"messages": TURNS}) == [(WHOLE, ["<calc>17*6<|im_end|>", "93<|im_end|>"])]


def test_only_the_last_answer_is_trained(read: Any) -> None:
    assert read({"messages": TURNS}, sft={"turns": "last"}) == [(WHOLE, ["93<|im_end|>"])]


def test_flagged_answers_are_trained(read: Any) -> None:
    """What follows the last of them is not computed."""
    flagged = [TURNS[0], TURNS[1] | {"train": True}, TURNS[2], TURNS[3] | {"train": False}]
    ((text, trained),) = read({"messages": flagged}, sft={"turns": "flagged"})
    assert trained == ["<calc>17*6<|im_end|>"] and WHOLE.startswith(text) and text.endswith("6<|im_end|>\n")
    assert read({"messages": [*TURNS[:3], TURNS[3] | {"train": True}]}, sft={"turns": "flagged"})[0][1] == [
        "93<|im_end|>"
    ]


@pytest.mark.parametrize("column", ["prompt", "problem"])
def test_of_a_prompt_and_its_answer_the_answer_is_trained(read: Any, column: str) -> None:
    head = "<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n"
    assert read({column: "1+1=", "answer": "2"}) == [(f"{head}2<|im_end|>\n", ["2<|im_end|>"])]
    prompt = [*TURNS[:2], {"role": "user", "content": "102"}]
    assert read({"prompt": prompt, "answer": "93"}) == [(WHOLE, ["93<|im_end|>"])]


def test_system_prompt_and_format_are_those_of_reinforcement_learning(read: Any, tmp_path: Path) -> None:
    (tmp_path / "f.jinja").write_text("Solve {{ content }}")
    data = {"train": "t.jsonl", "system_prompt": "Be brief.", "format_prompt": str(tmp_path / "f.jinja")}
    ((text, trained),) = read({"problem": "1+1=", "answer": "2"}, data=data)
    assert text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nSolve 1+1=<|im_end|>\n")
    assert trained == ["2<|im_end|>"]
    with pytest.raises(PromptError, match=r"data\.format_prompt is for rows of prompt and answer"):
        read({"messages": TURNS}, data=data)
    ((text, trained),) = read({"messages": TURNS}, data={"train": "t.jsonl", "system_prompt": "Be brief."})
    assert text == "<|im_start|>system\nBe brief.<|im_end|>\n" + WHOLE
    assert trained == ["<calc>17*6<|im_end|>", "93<|im_end|>"]


def test_a_template_without_an_end_gets_the_tokenizers_end(read: Any) -> None:
    """Nothing can follow that end, so a later answer is in a text of its own."""
    assert read({"problem": "1+1=", "answer": "2 "}, JOINED, END) == [(f"1+1=2 {END}", [f"2 {END}"])]
    assert read({"messages": TURNS}, JOINED, END) == [
        (f"17*6-9=<calc>17*6{END}", [f"<calc>17*6{END}"]),
        (f"17*6-9=<calc>17*610293{END}", [f"93{END}"]),
    ]


def test_an_answer_ends_where_a_server_would_stop(read: Any) -> None:
    """Whatever else the template or the row writes behind that."""
    found = read({"messages": TURNS}, CLOSED, END)
    assert [trained for _, trained in found] == [["<calc>17*6<|im_end|>"], ["93<|im_end|>"]]
    assert all(text.endswith(f"<|im_end|>\n{END}") for text, _ in found)
    assert read({"problem": "1+1=", "answer": "2<|im_end|>"})[0][1] == ["2<|im_end|>"]
    plain = {"data": {"train": "t.jsonl", "chat_template": "none"}}
    assert read({"problem": "1+1=", "answer": f"2{END}"}, CHATML, END, **plain)[0][1] == [f"2{END}"]


@pytest.mark.parametrize("template", ["none", None])
def test_an_answer_that_goes_on_where_a_server_would_stop_is_refused(read: Any, template: str | None) -> None:
    data = {"train": "t.jsonl", "chat_template": template}
    with pytest.raises(PromptError, match=r"message 1, which is trained, goes on behind <\|im_end\|>, at which"):
        read({"problem": "1+1=", "answer": "2<|im_end|>\n<|im_start|>user\nmore"}, data=data)


@pytest.mark.parametrize(
    ("message", "template", "trained"),
    [
        (CALL, CALLING, 'hm{"a": 1}<|im_end|>'),
        (CALL | {"content": "hm ", **SAID}, CALLING, "leaves out reasoning_content of message 1, which is trained"),
        (CALL, CHATML, "the chat template leaves out tool_calls of message 1, which is trained; write it into"),
        (TURNS[3] | SAID, CHATML, "the chat template leaves out reasoning_content of message 1"),
        (TURNS[3] | {"thinking": "carry"}, "none", "data.chat_template: none writes no thinking; write it into"),
    ],
)
def test_what_an_answer_says_beside_its_content_is_trained_or_refused(
    read: Any, message: Any, template: str, trained: str
) -> None:
    data = {"train": "t.jsonl"} | ({"chat_template": "none"} if template == "none" else {})
    row = {"messages": [TURNS[0], message]}
    if "<|im_end|>" in trained:
        assert read(row, template, data=data)[0][1] == [trained]
    else:
        with pytest.raises(PromptError, match=trained):
            read(row, CHATML if template == "none" else template, data=data)


def test_arguments_that_are_a_text_are_trained_as_a_server_would_write_them(read: Any) -> None:
    """A text of JSON, as OpenAI's clients write them, would become JSON of a text."""
    texts = CALL | {"tool_calls": [{"function": {"name": "f", "arguments": '{"a":1}'}}]}
    assert read({"messages": [TURNS[0], texts]}, CALLING)[0][1] == ['hm{"a": 1}<|im_end|>']


def test_turns_that_a_template_writes_anew_become_texts_of_their_own(read: Any) -> None:
    found = read({"messages": TURNS}, FORGETFUL)
    thought = "<think>\n\n</think>\n\n"
    assert [trained for _, trained in found] == [[f"{thought}<calc>17*6<|im_end|>"], [f"{thought}93<|im_end|>"]]
    assert thought not in found[1][0].partition("102")[0]


def test_without_a_template_the_end_of_text_ends_the_answer(read: Any) -> None:
    plain = {"data": {"train": "t.jsonl", "chat_template": "none"}}
    assert read({"problem": "1+1=", "answer": "2"}, CHATML, END, **plain) == [(f"1+1=2{END}", [f"2{END}"])]
    with pytest.raises(PromptError, match="knows no turns"):
        read({"messages": TURNS}, CHATML, END, **plain)


def test_a_row_of_which_the_tokenizer_makes_no_token_is_refused(tmp_path: Path) -> None:
    """Its end alone is predicted by nothing."""
    words = Tokenizer(BPE({END: 0}, []))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token=END)
    reader = AnswerReader(tokenizer, sft_config(tmp_path, data={"chat_template": "none"}))
    try:
        with pytest.raises(PromptError, match="no token of it is trained"):
            reader.texts({"problem": "a", "answer": "b"})
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ({"messages": TURNS[:1]}, "no message is trained with sft.turns: all"),
        ({"messages": []}, "the messages of the row are []; a list of messages is needed"),
        ({"messages": "hello"}, "the messages of the row are 'hello'"),
        ({"messages": [{"role": "user"}]}, "message 0, of role 'user', has the content None"),
        ({"messages": [TURNS[0], {"role": "assistant", "content": "  "}]}, "message 1 is an answer without text"),
        ({"messages": [TURNS[0], TURNS[1] | {"train": True}]}, "message 1 has the key train, but sft.turns is all"),
        ({"messages": [TURNS[0], TURNS[1] | {"weight": 0}]}, "message 1 has the key weight; write it as train"),
        ({"messages": TURNS, "tools": [{}]}, "the row has tools"),
        ({"problem": "1+1=", "answer": 2}, "the answer of the row is 2; a text is needed"),
        ({"problem": "1+1=", "answer": " "}, "message 1 is an answer without text"),
        ({"problem": "1+1=", "answer": "\ud83d"}, "the answer of the row has a lone surrogate"),
        ({"prompt": TURNS[:2], "answer": "2"}, "its prompt ends with a message of the assistant"),
        ({"messages": TURNS, "videos": ["a.mp4"]}, "the row has videos"),
        ({"messages": TURNS[1:3]}, "message 0 is an answer, and nothing before it asks for one"),
    ],
)
def test_a_row_without_anything_right_to_train_is_refused(read: Any, row: dict[str, Any], why: str) -> None:
    with pytest.raises(PromptError) as error:
        read(row)
    assert why in str(error.value)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ([None, None], "no message is trained with sft.turns: flagged"),
        ([True, None], "message 0 has train: true and the role user; only answers are trained"),
        ([None, 1], "message 1 has train: 1; true or false is needed"),
    ],
)
def test_wrong_flags_are_refused(read: Any, flags: list[Any], why: str) -> None:
    messages = [one | {"train": flag} for one, flag in zip(TURNS, flags, strict=False)]
    with pytest.raises(PromptError) as error:
        read({"messages": messages}, sft={"turns": "flagged"})
    assert why in str(error.value)


def test_a_template_that_drops_a_part_of_an_answer_is_refused(read: Any) -> None:
    """As DeepSeek-R1's drops the thinking of every answer."""
    dropping = CHATML.replace("message['content'] +", "message['content'].split('</think>')[-1] +")
    assert read({"messages": TURNS}, dropping)
    thinking = {"role": "assistant", "content": "<think>hm</think>93"}
    with pytest.raises(PromptError, match="leaves out or rewords a part of message 1, which is trained"):
        read({"messages": [TURNS[0], thinking]}, dropping)


def test_a_template_that_leaves_out_a_message_is_refused(read: Any) -> None:
    deaf = CHATML.replace("{% for message in messages %}", "{% for message in messages if message.role != 'system' %}")
    with pytest.raises(PromptError, match="leaves out message 0"):
        read({"messages": [{"role": "system", "content": "Be brief."}, *TURNS]}, deaf)


@pytest.mark.parametrize("template", [None, "none"])
def test_a_tokenizer_that_puts_a_space_before_each_text_is_refused(tmp_path: Path, template: str | None) -> None:
    from tokenizers import pre_tokenizers

    tokenizer = chatml_tokenizer()
    spaced = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = spaced
    data = {"train": "t.jsonl", "chat_template": template}
    reader = AnswerReader(tokenizer, sft_config(tmp_path, data=data))
    joined = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    with pytest.raises(PromptError, match="the tokenizer changes a text"):
        reader.texts(joined)
    reader.close()


def test_a_tokenizer_without_its_vocabulary_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "Qwen2Tokenizer"}')
    with pytest.raises(ConfigError, match=r"model.path: .*(no tokenizer can be|has added tokens and no others)"):
        reader_of(sft_config(tmp_path, model={"path": str(tmp_path)}))


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path) -> None:
    tokenizer = chatml_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no token that ends a text; set eos_token"):
        AnswerReader(tokenizer, sft_config(tmp_path))
