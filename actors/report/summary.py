"""`python -m actors report RUN|CONFIG.yaml`: what a run did, on the terminal, as `report.png` and as `report.html`.

Consumes the run's folder: `metrics.jsonl`, `config.yaml`, `buffer.sqlite`, the checkpoints, and `evaluation.json` if
`python -m rollout evaluate` wrote one. Needs no process of the run and waits for nothing. Run by hand, and by the
launcher when a run is done. `page.py` renders the picture and the page.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.text import Text

from actors.report.page import EvaluatedModel, Example, Report, figure, page
from actors.watch.metrics_log import Records, evaluation_lines
from actors.watch.run_state import failures, find_run, stored
from buffer.inspect import tokenizer_of
from buffer.store.sqlite import StoreError, reading
from buffer.transcript import chapters, lines
from buffer.wire.sample import Sample, num_turns
from configs.entrypoint import BAD_INPUT, DONE, FAILED
from configs.load import ConfigError
from configs.schema import Config

WINDOW = 10
"""Versions that a point of the smooth curve averages over."""
EXAMPLES = 2
"""Answers shown of the first and of the last policy, each."""
EVALUATED = """
SELECT version, samples FROM evaluations WHERE state = 'done' AND samples <> ''
    AND due IN ((SELECT MIN(due) FROM evaluations), (SELECT MAX(due) FROM evaluations WHERE state = 'done'))
ORDER BY due
"""
FIRST_SAMPLES = """
SELECT batch, problem, data_of(segment, position, bytes), reward FROM (
    SELECT items.batch, problem, segment, position, samples.bytes, reward
    FROM items JOIN samples USING (item) LEFT JOIN problems USING (row)
    WHERE items.batch >= 0 AND samples.idx = 0 AND segment IS NOT NULL
    ORDER BY items.batch {order}, items.item {order} LIMIT ?
)
"""


def main(argv: Sequence[str]) -> int:
    """Write both files and print a summary. Exit code 2: not the folder of a run, 1: the run has no records."""
    config, run = find_run(argv, "python -m actors report")
    records = Records(run / "metrics.jsonl")
    try:
        report = read_report(config, run, records)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return BAD_INPUT
    if not records.by_version:
        print(f"{records.path}: no records yet, nothing to report", file=sys.stderr)
        return FAILED
    png = figure(records, WINDOW)
    (run / "report.png").write_bytes(png)
    (run / "report.html").write_text(page(report, png), encoding="utf-8")
    console = Console(highlight=False, soft_wrap=True)
    for line in [*summary(report), *outputs(run)]:
        console.print(Text(line) if isinstance(line, str) else line)
    return DONE


def read_report(config: Config, run: Path, records: Records) -> Report:
    """All that the report shows. The examples are those of the evaluation, else of the first and last stored batches.

    Raises ConfigError for an `evaluation.json` that is none. A buffer file that cannot be read costs a line on stderr.
    """
    models = evaluated_models(run / "evaluation.json")
    file = run / (config.buffer.path or "")
    examples, evaluated, failed = {}, {}, ""
    if file.is_file():
        try:
            examples, failed = stored_examples(file, config.model.path), failures(stored(file))
            evaluated = evaluated_examples(file)
        except StoreError as error:  # the records are enough for a report
            print(error, file=sys.stderr)
    if len(models) > 1 and models[0].examples and models[-1].examples:
        examples = {"before": models[0].examples[:EXAMPLES], "after": models[-1].examples[:EXAMPLES]}
    return Report(config, records, models, examples, failed, evaluated)


def evaluated_models(path: Path) -> list[EvaluatedModel]:
    """The models of `evaluation.json` in its order (before, after), none without that file. Raises ConfigError."""
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
        "" if (value := entry.get(key)) is None else format(value, form)
        for key, form in (("reward", ".3f"), ("solved", ".1%"))
    )
    name = "" if entry.get("set") in (None, "eval") else str(entry["set"])
    return EvaluatedModel(str(entry["model"]), reward, solved, examples, name)


def stored_examples(file: Path, model: str) -> dict[str, list[Example]]:
    """`EXAMPLES` answers each of the first and of the last batches whose samples are still stored; `model` has the
    tokenizer, for those of several turns."""
    found = {}
    with closing(reading(file)) as db:
        for title, order in (("before", "ASC"), ("after", "DESC")):
            rows = db.execute(FIRST_SAMPLES.format(order=order), [EXAMPLES])
            found[title] = [_example(model, *row) for row in rows if row[2]]
    return found


def evaluated_examples(file: Path) -> dict[str, list[Example]]:
    """`EXAMPLES` answers of each set, of the first evaluation and of the last one whose samples are kept."""
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


def _example(model: str, batch: int, problem: str | None, data: bytes, reward: float) -> Example:
    sample, prompt = Sample.unpack(data), prompt_of(json.loads(problem or "{}"))
    episode = []
    if num_turns(sample.sampled.numpy()) > 1 and (tokenizer := tokenizer_of(model)):
        read = chapters(sample, tokenizer)
        episode = [replace(each, passages=[passage.folded() for passage in each.passages]) for each in read]
    return Example(prompt, sample.answer, reward, f"batch {batch}", episode)


def prompt_of(problem: dict[str, Any]) -> str:
    """The text of a problem: TinyZero's last message, EasyR1's `problem`, or a plain prompt."""
    prompt = problem.get("prompt", problem.get("problem", ""))
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], dict):
        prompt = prompt[-1].get("content", "")
    return str(prompt)


def summary(report: Report) -> Iterator[str | Text]:
    """The report on the terminal."""
    if rewards := report.records.column("reward/mean")[1]:
        first, last = rewards[:5], rewards[-20:]
        yield f"\nreward: first {len(first)} versions {fmean(first):.3f}, last {len(last)} versions {fmean(last):.3f}"
    if ages := report.records.column("age/max")[1]:
        yield f"largest age {max(ages):.0f} (batch.max_staleness {report.config.batch.max_staleness})"
    running, places = (report.records.column(f"servers/{name}")[1] for name in ("running", "places"))
    if sum(places):
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
    for title, examples in report.examples.items():
        for example in examples:
            source = f"{example.source}, " if example.source else ""
            head = f"\n{title} ({source}reward {example.reward:.2f}):"
            if example.episode:
                yield head
                yield from lines(example.episode)
            else:
                yield f"{head} {example.prompt.strip()}"
                yield f"  {example.answer.strip()}"
    yield ""


def outputs(run: Path) -> Iterator[str]:
    """Where the last checkpoint and the report are."""
    checkpoints = sorted(path for path in (run / "checkpoints").glob("v*") if path.is_dir())
    exported = [path / "huggingface" for path in checkpoints if (path / "huggingface" / "config.json").exists()]
    if checkpoints:
        yield f"checkpoint: {checkpoints[-1]}"
    if exported:
        yield f"serve it:   vllm serve {exported[-1]}"
    yield f"report:     {run / 'report.html'}, {run / 'report.png'}"
