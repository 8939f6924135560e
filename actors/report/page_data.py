"""The data of a run's page, as one JSON object."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from actors.report.comparison import Comparison, compare
from actors.report.examples import (
    EvaluatedModel,
    Example,
    batch_examples,
    evaluated_examples,
    evaluated_models,
    stored_batches,
)
from actors.report.missing import reasons
from actors.watch.metrics_log import MOST_VERSIONS, Record, Records, sets_of, shares, short_look
from actors.watch.overview import SERVER_COLUMNS, WAIT_COLUMNS, Overview
from buffer.store.faults import StoreError
from configs.certificate import COLUMNS
from configs.certificate import FILE as CERTIFICATE
from configs.certificate import read as read_certificate
from configs.flow.alerts import FEW_TOKENS, K3_BY_AGE
from configs.origins import disclosed
from configs.schema import Config

DIGITS = 6
"""Significant digits."""
FROZEN_BATCHES = 16
GROUPS, SAMPLES = 3, 4
FROZEN_GROUPS, FROZEN_SAMPLES = 2, 2
MOST_LOOKS = 1500
MOST_CHARS = 4000


def page_data(config: Config, run: Path, records: Records, overview: Overview, live: bool) -> dict[str, Any]:
    """Raises ConfigError for a broken `evaluation.json`."""
    ordered = spread(records.ordered(), MOST_VERSIONS)
    keys = sorted({key for record in ordered for key in record} - {"version"})
    looks = thinned([look for _, look in sorted(records.servers.items())])
    return {
        "name": config.run.name,
        "model": config.model.path,
        "live": live,
        "position": str(records.position),
        "version": [record["version"] for record in ordered],
        "columns": {key: [figure_of(record, key) for record in ordered] for key in keys},
        "looks": [drawn_look(look) for look in looks],
        "evaluations": [evaluation_row(record) for _, record in sorted(records.evaluations.items())],
        "overview": overview_data(overview),
        "reasons": reasons(config),
        "youngest": {"least": FEW_TOKENS, "ages": K3_BY_AGE},
        "settings": [
            [f"{section}.{key}", str(value)]
            for section, values in disclosed(config).items()
            for key, value in values.items()
        ],
        "certificate": certificate_data(run / CERTIFICATE),
        **answers(config, run, frozen=not live),
    }


def certificate_data(file: Path) -> dict[str, Any]:
    """The certificate of the model: its summary, and a table; both empty for a run without one."""
    found = read_certificate(file)
    if found is None:
        return {"summary": "", "columns": COLUMNS, "rows": []}
    return {"summary": found.summary(), "columns": COLUMNS, "rows": [list(check.cells()) for check in found.checks]}


def answers(config: Config, run: Path, frozen: bool) -> dict[str, Any]:
    """A live page asks for its own `samples`."""
    file = run / (config.buffer.path or "")
    models = evaluated_models(run / "evaluation.json")
    found: dict[str, Any] = {"batches": [], "samples": {}, "evaluated": {}, "trouble": "", "models": rows_of(models)}
    compared = Comparison()
    try:
        compared = compare(config, file, models)
        if file.is_file():
            batches = stored_batches(file)
            shown = spread(batches, FROZEN_BATCHES) if frozen else batches
            found["batches"] = shown
            found["samples"] = {
                str(batch): samples_data(config, file, batch, FROZEN_GROUPS, FROZEN_SAMPLES)
                for batch in (shown if frozen else [])
            }
            found["evaluated"] = {
                title: list(map(example_data, some)) for title, some in evaluated_examples(file).items()
            }
    except StoreError as error:  # the records are enough for a page
        found["trouble"] = str(error)
    found["examples"] = {title: list(map(example_data, some)) for title, some in compared.examples.items()}
    return found | {"comparison": [compared.title, compared.note]}


def samples_data(
    config: Config, file: Path, batch: int, groups: int = GROUPS, samples: int = SAMPLES
) -> list[dict[str, Any]]:
    """Answers of `batch` for the page."""
    return list(map(example_data, batch_examples(file, config.model.path, batch, groups, samples)))


def example_data(example: Example) -> dict[str, Any]:
    episode = [
        {
            "title": chapter.title,
            "repeated": chapter.repeated,
            "passages": [
                {"title": one.title, "sampled": one.turn is not None, "pieces": [list(piece) for piece in one.pieces]}
                for one in chapter.passages
            ],
        }
        for chapter in example.episode
    ]
    texts = {"prompt": folded(example.prompt), "answer": folded(example.answer)}
    return {"source": example.source, "reward": short(example.reward), "episode": episode, **texts}


def overview_data(overview: Overview) -> dict[str, Any]:
    """The overview, with the heads of its tables."""
    return asdict(overview) | {
        "alerts": [list(alert) for alert in overview.alerts],
        "server_columns": SERVER_COLUMNS,
        "wait_columns": WAIT_COLUMNS,
    }


def evaluation_row(record: Record) -> dict[str, Any]:
    """Example: `{"version": 10, "figures": {"aime mean@8": 0.4}}`"""
    figures = {f"{name} {key}": short(of[key]) for name, of in sets_of(record).items() for key in shares(of)}
    return {"version": record["eval/version"], "figures": figures}


def drawn_look(look: Record) -> Record:
    """What the page draws of a look at the servers."""
    few = short_look(look)
    return {key: figure_of(few, key) for key in few}


def version_row(record: Record) -> Record:
    """A record as it is sent to a live page."""
    return {key: figure_of(record, key) for key in record}


def rows_of(models: Iterable[EvaluatedModel]) -> list[list[str]]:
    """Rows of the table of `evaluation.json`: name of the model, reward, share solved."""
    return [[f"{model.name} {model.set}".strip(), model.reward, model.solved] for model in models]


def spread(values: Sequence[Any], most: int) -> list[Any]:
    """Evenly spread, with the first and the last."""
    if len(values) <= most:
        return list(values)
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def thinned(looks: Sequence[Record]) -> list[Record]:
    """At most MOST_LOOKS of them."""
    return spread(looks, MOST_LOOKS)


def figure_of(record: Record, key: str) -> object:
    """A time keeps all its digits."""
    value = record.get(key)
    whole = key == "time" and isinstance(value, int | float) and math.isfinite(value)
    return value if whole else short(value)


def short(value: object) -> object:
    """None where it is no finite number."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value if isinstance(value, int | str) else None


def folded(text: str) -> str:
    """`text` with its middle left out where it is long."""
    if len(text) <= MOST_CHARS:
        return text
    return f"{text[: MOST_CHARS // 2]}\n[... {len(text) - MOST_CHARS:,} characters ...]\n{text[-MOST_CHARS // 2 :]}"
