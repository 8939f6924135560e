"""Answers to show in a report: of the first and last batches that the buffer's file still has. Waits for nothing."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from buffer.store.sqlite import reading
from buffer.wire.sample import Sample

FIRST = """
SELECT batch, problem, data_of(segment, position, bytes), reward FROM (
    SELECT items.batch, problem, segment, position, samples.bytes, reward
    FROM items JOIN samples USING (item) LEFT JOIN problems USING (row)
    WHERE items.batch >= 0 AND samples.idx = 0 AND segment IS NOT NULL
    ORDER BY items.batch {order}, items.item {order} LIMIT ?
)
"""


@dataclass(frozen=True)
class Example:
    """One answer. Example: `Example("8 6 4=2", "<answer>6-8+4</answer>", 1.0, "batch 0")`."""

    prompt: str
    answer: str
    reward: float
    source: str = ""


def stored(path: Path, wanted: int = 2) -> tuple[list[Example], list[Example]]:
    """`wanted` answers each of the first and of the last batches in the file; none where there is no file.

    Raises buffer.store.StoreError for a file that is not a buffer's.
    """
    if not path.is_file():
        return [], []
    with contextlib.closing(reading(path)) as db:
        first, last = (db.execute(FIRST.format(order=order), [wanted]).fetchall() for order in ("ASC", "DESC"))
    return [_example(*row) for row in first if row[2]], [_example(*row) for row in last if row[2]]


def _example(batch: int, problem: str | None, data: bytes, reward: float) -> Example:
    return Example(prompt_of(json.loads(problem or "{}")), Sample.unpack(data).answer, reward, f"batch {batch}")


def prompt_of(problem: dict[str, Any]) -> str:
    """The text of a problem: TinyZero's last message, EasyR1's `problem`, or a plain prompt."""
    prompt = problem.get("prompt", problem.get("problem", ""))
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    return str(prompt)
