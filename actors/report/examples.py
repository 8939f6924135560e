"""Answers of a run to read: of any batch, of evaluations, of `evaluation.json`."""

import json
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from buffer.inspect import tokenizer_of
from buffer.store.sqlite import reading
from buffer.transcript import Chapter, chapters
from buffer.wire.sample import Sample, num_turns
from configs.load import ConfigError
from configs.plain_text import figure

EXAMPLES = 2
EVALUATED = """
SELECT version, samples FROM evaluations WHERE state = 'done' AND samples <> ''
    AND due IN ((SELECT MIN(due) FROM evaluations), (SELECT MAX(due) FROM evaluations WHERE state = 'done'))
ORDER BY due
"""
FIRST_SAMPLES = """
SELECT batch, problem, data_of(segment, position, bytes, crc32c), reward FROM (
    SELECT items.batch, problem, segment, position, samples.bytes, crc32c, reward
    FROM items JOIN samples USING (item) LEFT JOIN problems USING (row)
    WHERE items.batch >= 0 AND samples.idx = 0 AND segment IS NOT NULL
    ORDER BY items.batch {order}, items.item {order} LIMIT ?
)
"""
BATCHES = "SELECT DISTINCT batch FROM items WHERE bytes > 0 AND batch >= 0 ORDER BY batch"
OF_BATCH = """
SELECT item, problem, data_of(segment, position, samples.bytes, crc32c), reward
FROM (SELECT item, row FROM items WHERE batch = ? AND bytes > 0 ORDER BY item LIMIT ?)
    JOIN samples USING (item) LEFT JOIN problems USING (row)
WHERE idx < ? AND segment IS NOT NULL ORDER BY item, idx
"""


@dataclass(frozen=True)
class Example:
    """One answer."""

    prompt: str
    answer: str
    reward: float
    source: str = ""
    episode: Sequence[Chapter] = ()
    """The sample, if it has several turns."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model of `evaluation.json`."""

    name: str
    reward: str
    solved: str
    examples: list[Example]
    set: str = ""


def evaluated_models(path: Path) -> list[EvaluatedModel]:
    """In the file's order (before, after); none without the file. Raises ConfigError."""
    try:
        return [_model(entry) for entry in json.loads(path.read_text(encoding="utf-8"))["models"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        problem = f"{path}: not what `python -m rollout evaluate` writes ({type(error).__name__}: {error}); remove it"
        raise ConfigError([problem]) from None


def _model(entry: dict[str, Any]) -> EvaluatedModel:
    found = entry.get("examples", [])
    examples = [Example(prompt_of(one["problem"]), str(one["answer"]), float(one["reward"])) for one in found]
    reward, solved = (
        "" if (value := entry.get(key)) is None else figure(value, form)
        for key, form in (("reward", ".3f"), ("solved", ".1%"))
    )
    name = "" if entry.get("set") in (None, "eval") else str(entry["set"])
    return EvaluatedModel(str(entry["model"]), reward, solved, examples, name)


def stored_examples(file: Path, model: str) -> dict[str, list[Example]]:
    found = {}
    with closing(reading(file)) as db:
        for title, order in (("before", "ASC"), ("after", "DESC")):
            rows = db.execute(FIRST_SAMPLES.format(order=order), [EXAMPLES])
            found[title] = [_example(model, f"batch {batch}", *rest) for batch, *rest in rows if rest[1]]
    return found


def stored_batches(file: Path) -> list[int]:
    """Batch v made version v + 1."""
    with closing(reading(file)) as db:
        return [batch for (batch,) in db.execute(BATCHES)]


def batch_examples(file: Path, model: str, batch: int, groups: int, samples: int) -> list[Example]:
    with closing(reading(file)) as db:
        rows = db.execute(OF_BATCH, [batch, groups, samples])
        return [_example(model, f"item {item}", *rest) for item, *rest in rows if rest[1]]


def evaluated_examples(file: Path) -> dict[str, list[Example]]:
    """First evaluation, and last one with samples."""
    found = {}
    with closing(reading(file)) as db:
        if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'evaluations'").fetchone():
            return {}  # the file of an earlier release
        for version, samples in db.execute(EVALUATED):
            for name, shown in json.loads(samples).items():
                found[f"{name}, version {version}"] = [
                    Example(prompt_of(one["problem"]), str(one["answer"]), float(one["reward"]))
                    for one in shown[:EXAMPLES]
                ]
    return found


def _example(model: str, source: str, problem: str | None, data: bytes, reward: float) -> Example:
    sample, prompt = Sample.unpack(data), prompt_of(json.loads(problem or "{}"))
    episode = []
    if num_turns(sample.sampled.numpy()) > 1 and (tokenizer := tokenizer_of(model)):
        read = chapters(sample, tokenizer)
        episode = [replace(each, passages=[passage.folded() for passage in each.passages]) for each in read]
    return Example(prompt, sample.answer, reward, source, episode)


def prompt_of(problem: dict[str, Any]) -> str:
    """TinyZero's last message, EasyR1's `problem`, or a plain prompt."""
    prompt = problem.get("prompt", problem.get("problem", ""))
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    return str(prompt)
