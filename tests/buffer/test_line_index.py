"""The index of JSON lines: what it gives is what reading all of them gives, or nothing."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffer.data.columns import ColumnRules, ProblemsError
from buffer.data.formats import read
from buffer.data.line_index import LineIndex, bounds_of

LINES = st.lists(st.sampled_from([b"a", b"bcd", b"", b"  ", b"e f"]), max_size=8)
ENDS = st.sampled_from([b"\n", b"\r\n", b"\r"])


@given(LINES, ENDS, st.booleans())
def test_bounds_are_those_of_the_lines_that_are_not_blank(lines, end, ended):
    data = end.join(lines) + end * ended
    bounds = bounds_of(data.splitlines(keepends=True))
    found = [data[begin:stop].strip() for begin, stop in zip(bounds[::2], bounds[1::2], strict=True)]
    assert found == [line.strip() for line in data.splitlines() if line.strip()]


def rows(path: Path, index: Path | None, **rules: str) -> list[dict]:
    found = read(path, ColumnRules(rules), "data.train", index)
    return [found.row(at) for at in range(found.number)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "train.jsonl"
    file.write_text("".join(f'{{"problem": "{row} + é", "answer": "{row}"}}\n\n' for row in range(50)))
    return file


def test_rows_by_the_index_are_the_rows(path: Path, tmp_path: Path) -> None:
    index = tmp_path / "run" / "rows"
    anew = rows(path, None)
    assert rows(path, index) == anew  # writes it
    (written,) = index.iterdir()
    before = written.stat().st_mtime_ns
    assert rows(path, index) == anew
    assert written.stat().st_mtime_ns == before


def test_an_index_is_of_these_bytes_and_these_rules_only(path: Path, tmp_path: Path) -> None:
    index = tmp_path / "rows"
    rows(path, index)
    assert rows(path, index, problem="answer", answer="problem")[3] == {"problem": "3", "answer": "3 + é"}
    with pytest.raises(ProblemsError, match="has no column question"):
        rows(path, index, problem="question")
    path.write_text(path.read_text().replace('"answer": "7"', '"answer": "8"'))
    assert rows(path, index)[7]["answer"] == "8"
    path.write_text(path.read_text() + "no JSON\n")
    with pytest.raises(ProblemsError, match="line 101"):
        rows(path, index)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-8], lambda data: data[:40] + b"x" + data[41:], lambda data: b""]
)
def test_a_damaged_index_is_as_good_as_none(path: Path, tmp_path: Path, damage) -> None:
    index = tmp_path / "rows"
    anew = rows(path, index)
    (written,) = index.iterdir()
    whole = written.read_bytes()
    written.write_bytes(damage(whole))
    assert rows(path, index) == anew
    assert written.read_bytes() == whole, "it is written again"


def test_a_folder_that_cannot_be_written_costs_the_index_only(path: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert rows(path, blocked / "rows") == rows(path, None)
    assert LineIndex(blocked / "rows", b"", []).read() is None


def test_rows_with_images_are_looked_at_each_time(tmp_path: Path) -> None:
    file = tmp_path / "train.jsonl"
    file.write_text('{"problem": "<image>", "answer": "1", "images": ["a.png"]}\n')
    read(file, ColumnRules({}), "data.train", tmp_path / "rows")
    assert not (tmp_path / "rows").exists()
