"""The report as a picture and as a page: one PNG, one HTML file that holds it and needs nothing else.

Used by `actors/report/summary.py`; consumes records, settings and examples that it is given. Waits for nothing.
"""

import base64
import io
from collections.abc import Sequence

import jinja2
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from actors.report.samples import Example
from actors.watch.metrics_log import Records, moving_mean
from configs.schema import Config

PANELS = (
    ("reward", ("reward/mean",)),
    ("answer length, tokens", ("length/mean",)),
    ("age, versions", ("age/mean", "age/max")),
)
"""Title and metrics of each panel of the picture."""


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
    target = io.BytesIO()
    drawing.savefig(target, format="png", dpi=110)
    return target.getvalue()


def page(
    config: Config,
    records: Records,
    png: bytes,
    models: Sequence[tuple[str, str, str]],
    before: Sequence[Example],
    after: Sequence[Example],
) -> str:
    """The HTML page; all texts are escaped."""
    settings = [
        (f"{section}.{key}", value)
        for section, keys in config.model_dump(mode="json").items()
        for key, value in keys.items()
    ]
    found = records.ordered()
    return PAGE.render(
        config=config,
        picture=base64.b64encode(png).decode(),
        models=models,
        examples=[("before", before), ("after", after)],
        settings=settings,
        first=found[0],
        last=found[-1],
        keys=sorted({*found[0], *found[-1]}),
    )


PAGE = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string("""\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{ config.run.name }} - Headrace</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222; }
  img { max-width: 100%; }
  table { border-collapse: collapse; }
  td, th { padding: .15rem .8rem .15rem 0; text-align: left; vertical-align: top; border-bottom: 1px solid #eee; }
  pre { background: #f6f6f6; padding: .6rem; white-space: pre-wrap; overflow-wrap: anywhere; }
</style>
<h1>{{ config.run.name }}</h1>
<p>{{ config.model.path }}: {{ last.version }} of {{ config.run.versions }} versions</p>
<img alt="curves over policy versions" src="data:image/png;base64,{{ picture }}">
{% if models %}
<h2>Problems kept out of training</h2>
<table><tr><th>model<th>reward<th>solved</tr>
{% for name, reward, solved in models %}<tr><td>{{ name }}<td>{{ reward }}<td>{{ solved }}</tr>
{% endfor %}</table>
{% endif %}
{% for title, found in examples if found %}
<h2>Samples {{ title }}</h2>
{% for example in found %}<p>{{ example.source }} reward {{ '%.2f' % example.reward }}</p>
<pre>{{ example.prompt }}</pre><pre>{{ example.answer }}</pre>
{% endfor %}{% endfor %}
<h2>First and last record</h2>
<table>{% for key in keys %}<tr><td>{{ key }}<td>{{ first.get(key, '') }}<td>{{ last.get(key, '') }}</tr>
{% endfor %}</table>
<h2>Settings</h2>
<table>{% for key, value in settings %}<tr><td>{{ key }}<td>{{ value }}</tr>
{% endfor %}</table>
</html>
""")
