"""What rounding changes in the probe's texts, and what a server leaves out, on a tiny model."""

from benchmarks.probe_noise import quantised, rows_of
from benchmarks.weights.table import ResultRow
from learner.weights.probe import PolicyText
from tests.harness.published import VOCABULARY, tiny_qwen2


def test_rounding_changes_less_than_faults_do() -> None:
    tokens = [(7 * place * place + 3) % VOCABULARY for place in range(40)]
    text = PolicyText("random tokens", tokens, 30)
    rows: list[ResultRow] = rows_of(tiny_qwen2().eval(), [text])
    absolute, shifts = rows[::2], rows[1::2]
    by_case = {row.case: row.value for row in absolute}
    assert list(by_case) == [
        "bfloat16",
        "FP8",
        "a softcap of 30 left out",
        "a softcap of 50 left out",
        "logits times 0.9",
    ]
    assert 0 < by_case["bfloat16"] < by_case["FP8"] and by_case["bfloat16"] < by_case["logits times 0.9"]
    assert by_case["a softcap of 50 left out"] < by_case["a softcap of 30 left out"]
    assert all(abs(shift.value) <= row.value for row, shift in zip(absolute, shifts, strict=True))
    assert all(shift.against_value < row.against_value for row, shift in zip(absolute, shifts, strict=True))


def test_each_row_of_a_matrix_has_a_scale_of_its_own() -> None:
    matrix = tiny_qwen2().model.embed_tokens.weight.data
    matrix[0] *= 1000
    assert ((quantised(matrix) - matrix).abs() <= matrix.abs().amax(-1, keepdim=True) / 16).all()
