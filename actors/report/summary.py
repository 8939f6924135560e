"""`python -m actors report RUN|CONFIG.yaml`: what a run did, on the terminal, as `report.png` and as `report.html`.

Consumes the run's folder: `metrics.jsonl`, `config.yaml`, `evaluation.json` where `python -m rollout evaluate` left
one, else the samples in `buffer.sqlite`, and the checkpoints. Needs no process of the run and waits for nothing. Run by
hand, and by the launcher when a run is done. The page itself is `actors/report/page.py`'s.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from actors.report.page import figure, page
from actors.report.samples import Example, prompt_of, stored
from actors.watch.curve import braille
from actors.watch.metrics_log import Records, moving_mean
from actors.watch.status import find
from buffer.store.sqlite import StoreError
from configs.load import ConfigError
from configs.schema import Config

WINDOW = 10
"""Versions that a point of the smooth curve averages over."""


@dataclass(frozen=True)
class ReportModel:
    """One model of `evaluation.json`: mean reward and share solved of the problems kept out."""

    name: str
    reward: float | None
    solved: float | None
    examples: tuple[Example, ...]


def main(argv: Sequence[str]) -> int:
    """Write both files and say what is in them. Exit code 2: the folder is no run's, 1: the run has no records."""
    if not argv or argv[0] in ("-h", "--help"):
        print("usage: python -m actors report RUN|CONFIG.yaml", file=sys.stderr)
        return 0 if argv else 2
    try:
        config, run = find(argv)
        models = evaluation(run / "evaluation.json")
        before, after = examples(config, run, models)
    except (ConfigError, StoreError) as error:
        print(error, file=sys.stderr)
        return 2
    records = Records(run / "metrics.jsonl")
    records.read()
    if not records.by_version:
        print(f"{records.path}: no records yet, nothing to report", file=sys.stderr)
        return 1
    png = figure(records, WINDOW)
    (run / "report.png").write_bytes(png)
    (run / "report.html").write_text(page(config, records, png, table(models), before, after), encoding="utf-8")
    console = Console(highlight=False, soft_wrap=True)
    for line in words(config, run, records, models, before, after):
        console.print(Text(line))
    return 0


def evaluation(path: Path) -> list[ReportModel]:
    """The models of `evaluation.json` in its order (before, after), none without that file. Raises ConfigError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return [_model(entry) for entry in found["models"]]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        wanted = "what `python -m rollout evaluate` writes"
        raise ConfigError(
            [f"{path}: not {wanted} ({type(error).__name__}: {error}); remove it or write it anew"]
        ) from None


def examples(config: Config, run: Path, models: Sequence[ReportModel]) -> tuple[list[Example], list[Example]]:
    """Two answers before and two after: of the evaluation, else of the first and last stored batches."""
    if len(models) > 1 and models[0].examples and models[-1].examples:
        return list(models[0].examples[:2]), list(models[-1].examples[:2])
    return stored(run / config.buffer.path) if config.buffer.path else ([], [])


def table(models: Sequence[ReportModel]) -> list[tuple[str, str, str]]:
    """ReportModel, reward and share solved, as text."""
    return [(model.name, _text(model.reward, ".3f"), _text(model.solved, ".1%")) for model in models]


def words(
    config: Config,
    run: Path,
    records: Records,
    models: Sequence[ReportModel],
    before: Sequence[Example],
    after: Sequence[Example],
) -> Iterator[str]:
    """The report on the terminal."""
    versions, rewards = records.column("reward/mean")
    if rewards:
        yield f"\nmean reward of a batch over versions {versions[0]} to {versions[-1]} (mean of {WINDOW})"
        yield from braille(moving_mean(rewards, WINDOW))
        first, last = rewards[:5], rewards[-20:]
        yield f"reward: first 5 versions {sum(first) / len(first):.3f}, last 20 versions {sum(last) / len(last):.3f}"
    ages = records.column("age/max")[1]
    if ages:
        yield f"largest age {max(ages):.0f} (batch.max_staleness {config.batch.max_staleness})"
    if models:
        yield "\nproblems kept out of training:"
        yield from (f"  reward {reward}  solved {solved}  {name}" for name, reward, solved in table(models))
    for title, found in (("before", before), ("after", after)):
        for example in found:
            source = f"{example.source}, " if example.source else ""
            yield f"\n{title} ({source}reward {example.reward:.2f}): {example.prompt.strip()}"
            yield f"  {example.answer.strip()}"
    yield ""
    yield from places(run)


def places(run: Path) -> Iterator[str]:
    """Where the last checkpoint and the report are."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("v*") if path.is_dir())
    exported = [path / "huggingface" for path in checkpoints if (path / "huggingface" / "config.json").exists()]
    if checkpoints:
        yield f"checkpoint: {checkpoints[-1]}"
    if exported:
        yield f"serve it:   vllm serve {exported[-1]}"
    yield f"report:     {run / 'report.html'}, {run / 'report.png'}"


def _model(entry: dict[str, Any]) -> ReportModel:
    found = [Example(prompt_of(e["problem"]), str(e["answer"]), float(e["reward"])) for e in entry.get("examples", [])]
    return ReportModel(str(entry["model"]), entry.get("reward"), entry.get("solved"), tuple(found))


def _text(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
