"""Answers of two policies next to each other: of the one before the training, or of the oldest that is stored."""

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from actors.report.examples import EvaluatedModel, Example, evaluated_examples, stored_examples
from buffer.store.sqlite import reading
from configs.schema import Config

SHOWN = 2
FIRST_BATCHES = """
SELECT MIN(batch), MIN(batch) FILTER (WHERE bytes > 0), MAX(batch) FILTER (WHERE bytes > 0) FROM items WHERE batch >= 0
"""


@dataclass(frozen=True)
class Comparison:
    """The samples that are compared, and the reason why nothing older is."""

    title: str = ""
    note: str = ""
    examples: dict[str, list[Example]] = field(default_factory=dict)
    """By policy, the older one first."""


def compare(config: Config, file: Path, models: Sequence[EvaluatedModel]) -> Comparison:
    """Take the first that there is: models of `evaluation.json`, first and last evaluation, first and last stored
    batch. Raises StoreError."""
    if len(models) > 1 and models[0].examples and models[-1].examples:
        examples = {"before": models[0].examples[:SHOWN], "after": models[-1].examples[:SHOWN]}
        return Comparison("Before and after: evaluation.json", examples=examples)
    if not file.is_file():
        return Comparison()
    evaluated = evaluated_examples(file)
    versions = [title.rpartition(", ")[2] for title in evaluated]
    if len({*versions}) > 1:
        title = "Before and after: the first and the last evaluation"
        title = title if "version 0" in versions else "The first and the last evaluation"
        return Comparison(title, examples={title: some[:SHOWN] for title, some in evaluated.items() if some})
    return _batches(config, file)


def _batches(config: Config, file: Path) -> Comparison:
    with closing(reading(file)) as db:
        begun, first, last = db.execute(FIRST_BATCHES).fetchone()
    examples = stored_examples(file, config.model.path)
    if first is None or not all(examples.values()):
        return Comparison()
    if first == begun and last > first:
        return Comparison("Before and after: the first and the last batch", examples=examples)
    if first == last:
        title, examples = f"Batch {first}, the only one whose samples are stored", {"samples": examples["before"]}
    else:
        title = f"Batches {first} and {last}, the first and the last whose samples are stored"
        examples = {"first": examples["before"], "last": examples["after"]}
    return Comparison(title, _missing(config, begun, first), examples)


def _missing(config: Config, begun: int, first: int) -> str:
    if first == begun:
        return ""
    batches = f"batch {begun}" if begun == first - 1 else f"batches {begun} to {first - 1}"
    kept = "buffer.keep: all keeps them, and data.eval the answers of the first evaluation"
    why = "were removed with older checkpoints" if config.buffer.keep == "checkpoints" else "are not stored"
    return f"The answers before the training are not there: the samples of {batches} {why}; {kept}."
