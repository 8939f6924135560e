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

from actors.watch.metrics_log import Records, moving_mean
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


@dataclass(frozen=True)
class Report:
    """What a report shows."""

    config: Config
    records: Records
    models: list[EvaluatedModel]
    examples: dict[str, list[Example]]
    """Answers `before` and `after` the training."""
    failures: str


def figure(records: Records, window: int) -> bytes:
    """PNG: reward with its moving mean over `window` versions, answer length, age."""
    drawing = Figure(figsize=(9, 9), layout="constrained")
    FigureCanvasAgg(drawing)
    for axes, (title, keys) in zip(drawing.subplots(len(PANELS), 1, sharex=True), PANELS, strict=True):
        for key in keys:
            versions, values = records.column(key)
            (line,) = axes.plot(versions, values, label=key, alpha=0.4 if key == "reward/mean" else 0.9)
            if key == "reward/mean" and values:
                smooth = moving_mean(values, window)
                axes.plot(versions, smooth, color=line.get_color(), linewidth=2, label=f"mean of {window}")
        axes.set_ylabel(title)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize="small")
    axes.set_xlabel("policy version")
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
        config=report.config,
        picture=base64.b64encode(png).decode(),
        settings=report.config.model_dump(mode="json"),
        first=records[0],
        last=records[-1],
        keys=sorted({*records[0], *records[-1]}),
    )
