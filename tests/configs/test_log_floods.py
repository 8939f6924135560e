"""A flood of one complaint is summarised, and nothing else is left out."""

import logging

from configs.log_floods import MOST_CHARACTERS, MOST_LINES, MOST_NEWS, WINDOW_S, FloodFilter


def lines(filter_: FloodFilter, number: int, text: str = "refused %s") -> list[str]:
    found = []
    for each in range(number):
        record = logging.LogRecord("buffer", logging.WARNING, "file.py", 7, text, (each,), None)
        if filter_.filter(record):
            found.append(record.getMessage())
    return found


def test_a_flood_is_summarised_and_other_lines_pass() -> None:
    at = [0.0]
    filter_ = FloodFilter(lambda: at[0])
    assert len(lines(filter_, 5_000)) == MOST_LINES
    assert lines(filter_, 1, "listening on %s") == ["listening on 0"]
    at[0] = WINDOW_S
    assert lines(filter_, 2) == [f"refused 0 ({5_000 - MOST_LINES:,} lines like this one were left out)", "refused 1"]


def test_a_day_of_a_flood_stays_below_5_mib() -> None:
    at = [0.0]
    filter_, size = FloodFilter(lambda: at[0]), 0
    for minute in range(60):
        at[0] = 60.0 * minute
        size += sum(len(line) for line in lines(filter_, 2 * MOST_LINES))
    assert 24 * size < 5 * 2**20


def test_a_line_is_cut_and_a_line_without_values_is_told_apart_by_its_place() -> None:
    filter_ = FloodFilter(lambda: 0.0)
    assert len(lines(filter_, 1, "%s" + "x" * 10**6)[0]) == MOST_CHARACTERS
    for number in range(2 * MOST_NEWS):
        record = logging.LogRecord("buffer", logging.INFO, "file.py", 7, f"line {number}", None, None)
        assert filter_.filter(record) == (number < MOST_NEWS)
    other = logging.LogRecord("buffer", logging.INFO, "file.py", 8, "line", None, None)
    assert filter_.filter(other)
