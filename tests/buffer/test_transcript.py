"""A sample as people read it: messages, turns, tool calls, segments, and no text that a terminal would obey."""

import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer import inspect, transcript
from buffer.wire.message import Array
from configs.plain_text import UNSEEN, visible
from tests.harness.chatml import ANSWER, CALLS, CHATML, HEAD, SPECIAL, TOOL, episode, make_tokenizer


def test_an_episode_is_messages_turns_and_calls():
    sample = episode([(HEAD, 0), (CALLS, 6), (TOOL, 0), (ANSWER[:3], 6), (ANSWER[3:], 7)], rewards=[0.5, 1.0])
    (chapter,) = transcript.chapters(sample, CHATML)
    assert (chapter.title, chapter.repeated) == ("", "")
    found = [(passage.speaker, passage.text, passage.turn, passage.reward) for passage in chapter.passages]
    assert found == [
        ("system", "You are terse.", None, None),
        ("user", "What is 17*23?", None, None),
        ("assistant", CALLS, 1, 0.5),
        ("tool", "391", None, None),
        ("assistant", ANSWER, 2, 1.0),
    ]
    turn, answer = chapter.passages[2], chapter.passages[4]
    assert turn.called == ["multiply"] and [piece.is_call for piece in turn.pieces] == [False, True, False]
    assert turn.title == (
        f"assistant turn 1: {len(CHATML.encode(CALLS).ids)} tokens, trained, version 6, mean log-probability -0.25, "
        "reward 0.5, calls multiply"
    )
    assert "versions 6 to 7" in answer.title and answer.called == []
    assert chapter.passages[3].title == "tool: 11 tokens, given"


def test_tokens_that_cannot_be_have_no_text():
    """A group in quarantine is read like any other."""
    sample = episode([(HEAD, 0), (ANSWER, 7)])
    tokens = sample.tokens.numpy().copy()
    tokens[-2:] = -5, 10**6
    sample = sample.model_copy(update={"tokens": Array.of(tokens)})
    (chapter,) = transcript.chapters(sample, CHATML)
    assert chapter.passages[-1].text == CHATML.decode(tokens[-len(CHATML.encode(ANSWER).ids) : -2].tolist())
    lines = [str(line) for line in inspect._sample(0, sample, CHATML, full=True, tokens=True)]
    assert lines[-2].split() == ["66", "-5", "7", "-0.2500", '""'] and "1000000" in lines[-1]


def test_a_segment_shows_what_is_new_in_it():
    """Thinking was taken out of history: the second segment begins as the first one and its answer is given there."""
    short = CALLS[CALLS.index("<tool_call>") :]
    again = [(HEAD + short + TOOL, 0), (ANSWER, 7)]
    sample = episode([(HEAD, 0), (CALLS, 6)], again, [(HEAD + short + TOOL + ANSWER, 0), ("Bye.", 8)])
    one, two, three = transcript.chapters(sample, CHATML)
    assert one.title.startswith("segment 1 of 3: ") and not one.repeated
    assert two.repeated.startswith("begins as segment 1 does: 2 messages, ")
    assert [(passage.speaker, passage.turn) for passage in two.passages] == [
        ("assistant", None),
        ("tool", None),
        ("assistant", 2),
    ]
    assert three.repeated.startswith("begins as segment 2 does: 5 messages, "), "its answer is context there"
    assert [passage.turn for passage in three.passages] == [3]


def test_a_text_without_speakers_is_given_and_sampled():
    plain = make_tokenizer([])
    sample = episode([("8 6 4=2\n", 0), ("8-6", 3)], tokenizer=plain)
    (chapter,) = transcript.chapters(sample, plain)
    assert [(passage.speaker, passage.text) for passage in chapter.passages] == [("", "8 6 4=2"), ("assistant", "8-6")]
    assert chapter.passages[0].title == "given: 8 tokens"
    (untold,) = transcript.chapters(sample, None)
    assert [(passage.text, passage.tokens) for passage in untold.passages] == [("", 8), ("", 3)]


def test_other_templates_name_their_speakers_too():
    tokenizer = make_tokenizer(
        ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<start_of_turn>", "<end_of_turn>"]
    )
    llama = "<|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    gemma = "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    for text, name in ((llama, "assistant"), (gemma, "model")):
        (chapter,) = transcript.chapters(episode([(text, 0), ("Yo", 1)], tokenizer=tokenizer), tokenizer)
        assert [(passage.speaker, passage.text) for passage in chapter.passages] == [("user", "Hi"), (name, "Yo")]


def test_long_passages_are_folded_unless_wanted():
    sample = episode([(HEAD, 0), ("x" * 5000 + "END", 1)])
    folded, full = (
        "\n".join(line.plain for line in transcript.lines(transcript.chapters(sample, CHATML), full))
        for full in (False, True)
    )
    assert "[... 3,003 characters ...]" in folded and folded.endswith("END") and len(folded) < 3000
    assert "x" * 5000 + "END" in full


def test_a_terminal_obeys_nothing_that_was_sampled():
    sample = episode([(HEAD, 0), ("\x1b[2Jred\x07\u202e" + ANSWER, 1)])
    said = "\n".join(line.plain for line in transcript.lines(transcript.chapters(sample, CHATML)))
    assert "\\u001b[2Jred\\u0007\\u202eIt is 391." in said and "\x1b" not in said and "\u202e" not in said


TEXT = st.text(string.printable + "é中\x1b", min_size=1, max_size=12)


@given(st.lists(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), min_size=1, max_size=3))
@pytest.mark.parametrize("special", [[], SPECIAL], ids=["plain", "chatml"])
def test_every_turn_is_read_once_and_whole(special: list[str], segments: list[list[tuple[str, str]]]):
    tokenizer = make_tokenizer(special)
    spoken = [[piece for given, own in each for piece in ((f"{given}{HEAD}", 0), (own, 2))] for each in segments]
    sample = episode(*spoken, tokenizer=tokenizer)
    read = [passage for chapter in transcript.chapters(sample, tokenizer) for passage in chapter.passages]
    turns = [passage for passage in read if passage.turn]
    assert [passage.turn for passage in turns] == list(range(1, len(turns) + 1))
    assert [passage.text for passage in turns] == [visible(own) for each in segments for _, own in each]
    assert sum(passage.tokens for passage in turns) == int(sample.sampled.numpy().sum())
    for line in transcript.lines(transcript.chapters(sample, tokenizer)):
        assert not UNSEEN.search(line.plain)
