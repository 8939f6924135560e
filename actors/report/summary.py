"""`python -m actors report RUN|CONFIG.yaml`: what a run did, on the terminal and as `report.html`. Reads only the run's
folder.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.console import Console
from rich.text import Text

from actors.report.comparison import Comparison, compare
from actors.report.examples import EvaluatedModel, evaluated_models
from actors.report.page import render
from actors.report.page_data import page_data
from actors.watch.figures import without_effect
from actors.watch.metrics_log import Records, evaluation_lines
from actors.watch.overview import Overview, look_over
from actors.watch.run_state import ending, failures, find_run, last_life, stored, when
from actors.watch.tuning import is_tuned
from buffer.store.faults import StoreError
from buffer.transcript import lines
from configs.entrypoint import BAD_INPUT, DONE, FAILED
from configs.load import ConfigError
from configs.plain_text import figure, output, print_visible, visible_line
from configs.schema import Config
from configs.writing import write_text

HEARTBEATS = 10
"""A server reports at each heartbeat: in fewer, a run's mean of what servers did says nothing."""


@dataclass(frozen=True)
class Report:
    """What the terminal shows, and the overview that the page begins with."""

    config: Config
    records: Records
    models: list[EvaluatedModel]
    comparison: Comparison
    failures: str
    overview: Overview


def main(argv: Sequence[str]) -> int:
    """Write the page and print a summary."""
    config, run = find_run(argv, "python -m actors report")
    records = Records(run / "metrics.jsonl")
    try:
        report = read_report(config, run, records)
        if not records.by_version:
            print_visible(f"{records.path}: no records yet, nothing to report", sys.stderr)
            return FAILED
        page = render(page_data(config, run, records, report.overview, live=False))
    except ConfigError as error:
        print_visible(error, sys.stderr)
        return BAD_INPUT
    write_text(run / "report.html", page)
    console = Console(file=output(), highlight=False, soft_wrap=True)
    for line in [*summary(report), *outputs(run)]:
        console.print(Text(spaced(line)) if isinstance(line, str) else line)
    return DONE


def read_report(config: Config, run: Path, records: Records) -> Report:
    """Raises ConfigError for a broken `evaluation.json`."""
    models = evaluated_models(run / "evaluation.json")
    file, held, comparison = run / (config.buffer.path or ""), None, Comparison()
    try:
        comparison = compare(config, file, models)
        held = stored(file) if file.is_file() else None
    except StoreError as error:  # the records are enough for a report
        print_visible(error, sys.stderr)
    ended = ending(config, run, held, say_ago=False, records=records)
    ended = ended or f"not finished; last sign of life at {when(last_life(config, run), say_ago=False)}"
    overview = look_over(config, records, held, time.time(), ended)
    return Report(config, records, models, comparison, failures(held) if held else "", overview)


def spaced(line: str) -> str:
    """The line made visible."""
    words = line.lstrip("\n")
    return line[: len(line) - len(words)] + visible_line(words)


def summary(report: Report) -> Iterator[str | Text]:
    """The report on the terminal."""
    yield f"\n{report.overview.advice}"
    if rewards := report.records.column("reward/mean")[1]:
        yield f"\nreward: {both_ends(rewards)}"
    if tuned := is_tuned(report.config) and report.records.column("loss")[1]:
        yield f"\nloss: {both_ends(tuned)}"
    yield from without_effect(report.records)
    if ages := report.records.column("age/max")[1]:
        yield f"largest age {max(ages):.0f} (batch.max_staleness {report.config.batch.max_staleness})"
    running, places = (report.records.column(f"servers/{name}")[1] for name in ("running", "places"))
    times = report.records.column("time")[1]
    short = bool(times) and times[-1] - times[0] < HEARTBEATS * report.config.rollout.heartbeat_s
    if sum(places) and not short:
        share = f"{sum(running) / sum(places):.0%} of their places (rollout.sequences)"
        yield f"the servers ran {fmean(running):,.0f} sequences at a time in the mean, {share}"
    if report.failures:
        yield report.failures
    evaluations = sorted(report.records.evaluations.items())
    for version, record in evaluations[:1] + evaluations[1:][-1:]:
        yield f"\nversion {version} evaluated while training on"
        yield from (f"  {line}" for line in evaluation_lines(record))
    if report.models:
        yield "\nevaluation problems:"
        for model in report.models:
            yield f"  reward {model.reward}  solved {model.solved}  {model.name} {model.set}".rstrip()
    if report.comparison.title:
        yield f"\n{report.comparison.title}"
    if report.comparison.note:
        yield report.comparison.note
    for title, examples in report.comparison.examples.items():
        for example in examples:
            source = f"{example.source}, " if example.source else ""
            head = f"\n{title} ({source}reward {figure(example.reward, '.2f')}):"
            if example.episode:
                yield head
                yield from lines(example.episode)
            else:
                yield f"{head} {example.prompt.strip()}"
                yield f"  {example.answer.strip()}"
    yield ""


def both_ends(values: Sequence[float]) -> str:
    """Mean of the first and of the last versions; one mean of few versions."""
    if len(values) < 10:
        return f"mean of {len(values)} version{'s' * (len(values) > 1)} {figure(fmean(values), '.3f')}"
    first, last = values[:5], values[5:][-20:]
    then, now = figure(fmean(first), ".3f"), figure(fmean(last), ".3f")
    return f"first {len(first)} versions {then}, last {len(last)} versions {now}"


def outputs(run: Path) -> Iterator[str]:
    """Where the last checkpoint and the report are."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("v*") if path.is_dir())
    exported = [path / "huggingface" for path in checkpoints if (path / "huggingface" / "config.json").exists()]
    adapters = [path / "adapter" for path in checkpoints if (path / "adapter" / "adapter_config.json").exists()]
    if checkpoints:
        yield f"checkpoint: {checkpoints[-1]}"
    if exported:
        yield f"serve it:   vllm serve {exported[-1]}"
    if adapters:
        yield f"adapter:    {adapters[-1]}; whole weights: python -m learner merge {adapters[-1].parent} OUT"
    yield f"report:     {run / 'report.html'}"
