"""The report as a picture and as a page: one PNG, and one HTML file that contains it and needs nothing else.

Used by `summary.py`; renders a `Report` with the template `page.html`. Waits for nothing.
"""

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jinja2
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from actors.watch.metrics_log import Records, moving_mean, sets_of, shares
from buffer.transcript import Chapter
from configs.schema import Config

PANELS = (
    ("reward", ("reward/mean",)),
    ("answer length, tokens", ("length/mean",)),
    ("age, versions", ("age/mean", "age/max")),
)
"""Title and metrics of each panel of the picture."""


@dataclass(frozen=True)
class Example:
    """One answer. Example: `Example("8 6 4=2", "<answer>6-8+4</answer>", 1.0, "batch 0")`."""

    prompt: str
    answer: str
    reward: float
    source: str = ""
    episode: Sequence[Chapter] = ()
    """The whole sample, where it has several turns."""


@dataclass(frozen=True)
class EvaluatedModel:
    """One model of `evaluation.json`. Example: `EvaluatedModel("initial", "0.250", "25.0%", [...])`."""

    name: str
    reward: str
    solved: str
    """Share of the evaluation problems."""
    examples: list[Example]
    set: str = ""
    """Name of the set, where the file has several."""


@dataclass(frozen=True)
class Report:
    """What a report shows."""

    config: Config
    records: Records
    models: list[EvaluatedModel]
    examples: dict[str, list[Example]]
    """Answers `before` and `after` the training."""
    failures: str
    evaluated: dict[str, list[Example]]
    """Answers of evaluations while it trained, by version and set."""


def curves(records: Records) -> dict[str, tuple[list[int], list[float]]]:
    """Versions and values of each figure of evaluations that is a share, by `SET FIGURE`."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for version, record in sorted(records.evaluations.items()):
        for name, figures in sets_of(record).items():
            for key in shares(figures):
                versions, values = found.setdefault(f"{name} {key}", ([], []))
                versions.append(version)
                values.append(figures[key])
    return found


def evaluation_table(records: Records) -> list[list[str]]:
    """Head and a row for each evaluation: version, and the figures of `curves`."""
    shown = curves(records)
    values = {name: dict(zip(*curve, strict=True)) for name, curve in shown.items()}
    rows = [
        [str(version), *(f"{values[name][version]:.3f}" if version in values[name] else "" for name in shown)]
        for version in sorted(records.evaluations)
    ]
    return [["version", *shown], *rows] if rows else []


def figure(records: Records, window: int) -> bytes:
    """PNG: reward with its moving mean over `window` versions, answer length, age; evaluations, if there are any."""
    shown = curves(records)
    number = len(PANELS) + bool(shown)
    drawing = Figure(figsize=(9, 3 * number), layout="constrained")
    FigureCanvasAgg(drawing)
    panels = drawing.subplots(number, 1, sharex=True)
    for name, (versions, values) in shown.items():
        panels[-1].plot(versions, values, label=name, marker="o", markersize=3)
        panels[-1].set_ylabel("evaluation")
    for axes, (title, keys) in zip(panels, PANELS, strict=False):
        for key in keys:
            versions, values = records.column(key)
            (line,) = axes.plot(versions, values, label=key, alpha=0.4 if key == "reward/mean" else 0.9)
            if key == "reward/mean" and values:
                smooth = moving_mean(values, window)
                axes.plot(versions, smooth, color=line.get_color(), linewidth=2, label=f"mean of {window}")
        axes.set_ylabel(title)
    for axes in panels:
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    panels[-1].set_xlabel("policy version")
    png = io.BytesIO()
    drawing.savefig(png, format="png", dpi=110)
    return png.getvalue()


def page(report: Report, png: bytes) -> str:
    """The HTML page; all texts are escaped."""
    records = report.records.ordered()
    templates = jinja2.FileSystemLoader(Path(__file__).parent)
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, loader=templates)
    return environment.get_template("page.html").render(
        report=report,
        evaluations=evaluation_table(report.records),
        config=report.config,
        picture=base64.b64encode(png).decode(),
        settings=report.config.model_dump(mode="json"),
        first=records[0],
        last=records[-1],
        keys=sorted({*records[0], *records[-1]}),
    )
