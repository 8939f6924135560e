"""A curve in characters, for terminals: a braille character is a cell of 2 x 4 dots. Pure; for `actors/report/summary.py`."""

from collections.abc import Sequence

DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character by column and row."""
EMPTY = 0x2800


def braille(values: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """`height` lines of the curve, `width` characters wide, scale at the left. Example: `["   0.800 ⠀⢀⠔"]`."""
    low, high = min(values), max(values)
    span = (high - low) or 1.0
    columns, rows = 2 * width, 4 * height
    cells = [[EMPTY] * width for _ in range(height)]
    last = None
    for column in range(columns):
        value = _at(values, column / (columns - 1) * (len(values) - 1))
        row = round((high - value) / span * (rows - 1))
        lowest, highest = sorted((row, row if last is None else last))
        for dot in range(lowest, highest + 1):  # joined up, so that a jump stays a line
            cells[dot // 4][column // 2] |= DOTS[column % 2][dot % 4]
        last = row
    marks = {0: f"{high:8.3f} ", height - 1: f"{low:8.3f} "}
    return [marks.get(line, " " * 9) + "".join(map(chr, cells[line])) for line in range(height)]


def _at(values: Sequence[float], place: float) -> float:
    """Between two values, their straight line."""
    left = min(int(place), len(values) - 1)
    right = min(left + 1, len(values) - 1)
    return values[left] + (values[right] - values[left]) * (place - left)
