"""Shown texts of users have no control characters and a bounded length."""

import ast
import logging
import unicodedata
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.plain_text import (
    MOST_CHARS,
    PlainFormatter,
    all_visible,
    colourless,
    conceal,
    concealed,
    figure,
    folded,
    print_visible,
    visible,
    visible_line,
    visible_lines,
)

HOSTILE = {
    "clear the screen": ("a\x1b[2Jb", "a\\u001b[2Jb"),
    "a title": ("\x1b]0;owned\x07", "\\u001b]0;owned\\u0007"),
    "an escape sequence in one byte": ("\x9b2J", "\\u009b2J"),
    "a colour": ("\x1b[31mred", "\\u001b[31mred"),
    "NUL": ("a\x00b", "a\\u0000b"),
    "a line that is overwritten": ("reward 0\rreward 1", "reward 0\\u000dreward 1"),
    "backspaces": ("no\x08\x08yes", "no\\u0008\\u0008yes"),
    "a form feed": ("\x0c", "\\u000c"),
    "delete": ("\x7f", "\\u007f"),
    "next line": ("a\x85b", "a\\u0085b"),
    "a line separator": ("a\u2028b", "a\\u2028b"),
    "right to left": ("\u202egnp.exe", "\\u202egnp.exe"),
    "an isolate": ("\u2066x\u2069", "\\u2066x\\u2069"),
    "an Arabic mark": ("\u061c", "\\u061c"),
    "half a pair": ("\ud83d", "\\ud83d"),
    "a byte order mark": ("\ufeffx", "\\ufeffx"),
    "a tag": ("\U000e0041", "\\ue0041"),
    "nothing between letters": ("pass\u200bword", "pass\\u200bword"),
    "a word joiner": ("a\u2060b", "a\\u2060b"),
    "a soft hyphen": ("a\u00adb", "a\\u00adb"),
    "a filler that looks like a space": ("a\u3164b", "a\\u3164b"),
    "a selector of forms beyond the first sixteen": ("a\U000e0100", "a\\ue0100"),
    "user and password of a URL": ("GET http://me:pass@host:80/x", "GET http://***@host:80/x"),
}
ONE_LINE = {
    "a forged record": ("x\n2026-01-01 00:00:00,000 INFO buffer: all is well", 1),
    "an overwritten line": ("x\r\n2026", 1),
    "a column": ("a\tb", 0),
}
KEPT = ("", "a\tb\nc", "x² → 数 🙂 é \u200d", "\\u001b", "[bold]no markup[/bold]", "{not} %s a format %d")


def shown_plainly(text: str) -> bool:
    """Whether a terminal shows every character of `text` and none controls it."""
    return not any(
        unicodedata.category(one) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(one) in BIDI
        for one in text.replace("\n", "").replace("\t", "")
    )


BIDI = ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_control_character_is_shown_as_its_number(kind: str) -> None:
    text, expected = HOSTILE[kind]
    assert visible(text) == expected and shown_plainly(expected) and visible(expected) == expected


@pytest.mark.parametrize("kind", ONE_LINE)
def test_a_text_that_must_stay_in_its_line_does(kind: str) -> None:
    text, breaks = ONE_LINE[kind]
    found = visible_line(text)
    assert found.splitlines() == [found] and found.count("\\u000a") == breaks and shown_plainly(found)


def test_further_lines_of_a_message_look_like_no_other_message() -> None:
    assert visible_lines("a\n\nb\n   c\r\nd\x1b[2J") == "a\n  \n  b\n  c\\u000d\n  d\\u001b[2J"
    assert visible_lines("") == ""


def test_no_record_of_a_log_begins_but_by_its_own_head() -> None:
    """Nor does an exception's text begin one, or that of a stack."""
    forged = "2026-01-01 00:00:00,000 INFO buffer: all is well"
    for text in (f"a\n{forged}", f"a\r{forged}", f"a\u2028{forged}", f"a\x85{forged}", f"a\n\n{forged}\n"):
        try:
            raise ValueError(text)
        except ValueError as error:
            trace = (ValueError, error, error.__traceback__)
        record = logging.LogRecord("x", logging.INFO, "file", 1, "said: %s", (text,), trace)
        found = PlainFormatter("%(levelname)s %(message)s").format(record)
        assert [line[:4] for line in found.splitlines() if not line.startswith("  ")] == ["INFO", "Trac"]
        assert shown_plainly(found) and found.count("all is well") == 2


@pytest.mark.parametrize("text", KEPT)
def test_other_text_stays_as_it_is(text: str) -> None:
    assert visible(text) == text


@given(st.text(st.characters(exclude_categories=()), max_size=200), st.integers(60, 300))
def test_any_text_is_shown_plainly_and_bounded(text: str, most: int) -> None:
    found = visible(text, most)
    assert shown_plainly(found) and len(found) <= most and visible(found, most) == found
    found.encode()


@pytest.mark.parametrize("size", [MOST_CHARS, MOST_CHARS + 1, 10**7])
@pytest.mark.parametrize("character", ["x", "\x00"])
def test_long_texts_are_folded(size: int, character: str) -> None:
    found = visible("BEGIN" + character * size + "END")
    assert len(found) <= MOST_CHARS and found.startswith("BEGIN") and found.endswith("END")
    assert "or more characters left out ...]" in found
    assert folded("abc", 3) == "abc" and len(folded("x" * 100, 10)) == 10


def test_only_escape_sequences_of_colours_are_removed() -> None:
    assert colourless("\x1b[1;31mred\x1b[0m \x1b[2J") == "red \x1b[2J"


def test_values_of_json_are_made_visible_at_any_depth() -> None:
    data = {"a\x00": ["\x1b[2J", {"b": ("\u202e", 1.5, None, True)}]}
    assert all_visible(data) == {"a\\u0000": ["\\u001b[2J", {"b": ["\\u202e", 1.5, None, True]}]}


@pytest.mark.parametrize(
    ("value", "form", "expected"),
    [
        (0.4, ".3f", "0.400"),
        (-12.5, ".1f", "-12.5"),
        (11234.0, ",.0f", "11,234"),
        (1e41, ".3f", "1e+41"),
        (-1e308, ",.0f", "-1e+308"),
        (1e15, ".3f", "1e+15"),
        (float("inf"), ".3f", "inf"),
        (float("nan"), ".3f", "nan"),
        (10**30, ".0f", "1e+30"),
    ],
)
def test_figures_have_a_bounded_width(value: float, form: str, expected: str) -> None:
    assert figure(value, form) == expected


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_commands_print_is_visible(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, expected = HOSTILE[kind]
    print_visible(text)
    assert capsys.readouterr().out == f"{expected}\n"


STANDALONE = {"actors/supervise/guard.py", "rollout/hosts/verifiers_host.py"}
"""Programs that may not import Headrace. They print paths and library errors; their keeper or server reads that."""


def test_nothing_prints_but_by_the_one_function() -> None:
    """Nor writes to the standard streams, nor hands rich a text of its own."""
    root, found = Path(__file__).parents[2], []
    for package in ("actors", "buffer", "configs", "learner", "rollout"):
        for file in sorted((root / package).rglob("*.py")):
            name = str(file.relative_to(root))
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if not isinstance(node, ast.Call) or name in STANDALONE | {"configs/plain_text.py"}:
                    continue
                called = ast.unparse(node.func)
                if called in ("print", "sys.stdout.write", "sys.stderr.write", "console.log", "rich.print"):
                    found.append(f"{name}:{node.lineno}: {called}")
                texts = (ast.Constant, ast.JoinedStr)
                if called.endswith("console.print") and any(isinstance(each, texts) for each in node.args):
                    found.append(f"{name}:{node.lineno}: {called} of a text")
    assert found == []


def test_credentials_that_are_handed_on_again_and_again_are_no_more_than_before() -> None:
    """Each keeper of a launcher conceals what its process is given; a mark that is quoted must not be quoted again."""
    secret = "a'b\"c\\d%e/f\n0815"
    conceal({secret: "${oc.env:ODD_KEY}"})
    before = concealed()
    for _ in range(3):
        conceal(concealed())
    assert concealed() == before and before[secret] == "${oc.env:ODD_KEY}"
    assert visible(f"{secret!r} {quote(secret)}") == "'${oc.env:ODD_KEY}' ${oc.env:ODD_KEY}"
