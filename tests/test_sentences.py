"""The list of sentences that readers must decode: each kind is found where it stands, and plain English is not."""

import pytest

from tests.sentences import KINDS, counts, in_folders, judged, kind_of, main

MENDED = (
    *("buffer", "tests/buffer", "rollout/cage", "rollout/hosts", "rollout/chat", "rollout/rewards"),
    *("rollout/engine", "actors/supervise", "actors/doctor", "actors/scaling", "configs/flow", "configs/data"),
    *("configs/releases", "configs/entrypoint.py", "configs/parent_death.py", "configs/load.py"),
)
"""Folders without such sentences."""
FORBIDDEN = {
    "Those of a row, which need not be made for it.": "those of",
    "That of a run whose folder is there.": "those of",
    "Those in X; continues at byte X.": "those of",
    "Of what is unpacked before anything is known of it.": "of",
    "None is.": "none is",
    "All are.": "none is",
    "Nothing is needed.": "none is",
    "What it is asked about an answer.": "what it",
    "Why it was given up; then there are no figures.": "what it",
    "Where this is.": "what it",
    "What the buffer is told.": "narration",
    "A process that is not heard of for so long is forgotten.": "narration",
    "a late word of a connection that this process has replaced": "narration",
    "verifiers has an answer without a word scored": "narration",
    "under the version of before": "narration",
}
PLAIN = (
    "Always None: nothing can be missing in memory.",
    "Does nothing.",
    "The images of a row. Does not generate the row.",
    "Bytes of samples that stay in memory.",
    "None is returned where no file is there.",
    "All of them have ended.",
    "Of course it ends.",
    "What a worker writes for its warden.",
    "Equal turns are told apart by their places.",
    "The last word of its name.",
    "Nothing is Xed.",
)


@pytest.mark.parametrize("sentence", FORBIDDEN)
def test_a_sentence_that_must_be_decoded_has_its_kind(sentence: str) -> None:
    assert kind_of(sentence) == FORBIDDEN[sentence]


@pytest.mark.parametrize("sentence", PLAIN)
def test_a_plain_sentence_has_none(sentence: str) -> None:
    assert kind_of(sentence) is None


def test_every_kind_has_an_example() -> None:
    assert {*FORBIDDEN.values()} == {*KINDS}


SOURCE = '''
"""Does this.

Waits. Of what comes, one is kept.
"""
LIMIT = 3
"""Those of a row."""
def f(log):
    # a comment that
    # goes on: the server is told
    x = 1  # Why it is
    raise ValueError(f"{x}: None is")
    log.info("heard of")
    g("told")  # not a message
    y = "Those of a list that nobody reads"
'''


def test_docstrings_comments_and_messages_are_found_at_their_lines() -> None:
    found = {(each.line, each.kind) for each in judged(SOURCE, "a.py")}
    assert found == {(4, "of"), (7, "those of"), (9, "narration"), (11, "what it"), (12, "none is"), (13, "narration")}
    assert {each.line for each in judged(SOURCE, "tests/a.py", messages=False)} == {4, 7}


def test_code_in_a_sentence_is_not_read_as_english() -> None:
    assert list(judged('"""Calls `tell` and `Those of`."""', "a.py")) == []


def test_a_count_is_by_folder_and_kind() -> None:
    found = [*judged(SOURCE, "b/c.py"), *judged(SOURCE, "b/d.py"), *judged('"""Those of."""', "a/e.py")]
    lines = [" ".join(line.split()) for line in counts(found)]
    assert lines == ["4 b narration", "2 b none is", "2 b of", "2 b those of", "2 b what it", "1 a those of"]


def test_folders_that_were_mended_stay_so() -> None:
    assert list(map(str, in_folders(MENDED))) == []


PAGE = """# What it takes

Waits. Of what comes,
one is kept. [Those of it](a.md) stay.

| what | None is |
|---|---|
| **told** | `Those of` |

- plain
- Why it is

```
what it hears is code
```

    the server is told, in code
"""


def test_headings_paragraphs_lists_and_cells_of_a_page_are_read() -> None:
    found = [(each.line, each.kind) for each in judged(PAGE, "docs/a.md")]
    assert found == [(1, "what it"), (3, "of"), (4, "those of"), (6, "none is"), (8, "narration"), (11, "what it")]


@pytest.mark.parametrize("path", ["nowhere", "README", "pyproject.toml", "/etc"])
def test_a_path_that_cannot_be_read_is_refused_in_one_line(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([path])
    assert ended.value.code == 2
    assert f"{path}: no folder, Python file or page of the tree" in capsys.readouterr().err


def test_the_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "folder or file of the tree" in capsys.readouterr().out


def test_the_command_fails_if_it_finds_any(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["buffer/wire/peers.py"]) == 0
    assert capsys.readouterr().out == "0 sentences\n"
