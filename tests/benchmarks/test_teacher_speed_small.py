"""The benchmark of a teacher's server: its rows are medians, beside those of vLLM's API."""

from benchmarks.teacher_speed import SHOWN, rows_of


def test_each_figure_stands_beside_that_of_vllms_api() -> None:
    rounds = {"the run's own": [30.0, 10.0, 20.0], "vLLM's API": [3.0, 1.0, 2.0]}
    found = {
        (name, top_k): [dict.fromkeys(SHOWN, each + top_k) for each in given]
        for top_k in (0, 16)
        for name, given in rounds.items()
    }
    rows = rows_of(found)
    assert [row.what for row in rows] == [*SHOWN] * 2 and {row.against for row in rows} == {"vLLM's API"}
    assert [(row.value, row.against_value) for row in rows] == [(20.0, 2.0)] * 3 + [(36.0, 18.0)] * 3
