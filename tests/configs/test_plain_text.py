"""Shown texts of users have no control characters and a bounded length."""

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.plain_text import MOST_CHARS, all_visible, colourless, figure, folded, visible

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
