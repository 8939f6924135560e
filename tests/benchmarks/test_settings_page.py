"""docs/settings.md is what its generator writes."""

import pytest

from benchmarks.settings_page import PAGE, RUN_FILE, SIZES, measured, page, round_off, rows, run_file

TEXT = PAGE.read_text(encoding="utf-8")


def test_rows_of_1_5b_on_the_page_are_those_of_the_generator() -> None:
    wanted = list(rows(["1.5B"]))
    assert len(wanted) == 6
    assert [line for line in TEXT.splitlines() if line.startswith("| 1.5B |")] == wanted


@pytest.mark.long
def test_the_page_is_what_the_generator_writes() -> None:
    assert page() == TEXT, "python -m benchmarks.settings_page --out docs/settings.md"


def test_measured_figures_and_the_run_file_are_on_the_page() -> None:
    assert measured() in TEXT and run_file() in TEXT
    assert RUN_FILE.read_text(encoding="utf-8").rstrip() in TEXT
    assert all(f"\n| {size} | 4 + 4 | H100, 80 GB |" in TEXT for size in SIZES)


def test_estimates_have_two_digits() -> None:
    assert [round_off(number) for number in (32170.0, 9.4, 98765.0, 1049.9)] == [32000, 9, 99000, 1000]
