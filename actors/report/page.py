"""The page of a run as one HTML file, live or frozen as the report.

Texts of users and models stand in a block of JSON that cannot end early, and reach the page as text only. The security
policy lets only our scripts run.
"""

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import SandboxedEnvironment
from markupsafe import Markup

from configs.plain_text import all_visible, visible

HERE = Path(__file__).parent
MOST_SHOWN = 8000
POLICY = (
    "default-src 'none'; base-uri 'none'; form-action 'none'; connect-src 'self'; img-src data:; "
    "style-src 'unsafe-inline'; script-src {scripts}"
)


def render(data: dict[str, Any]) -> str:
    """The HTML file."""
    scripts = [_text("vendor/uPlot.iife.min.js"), _text("page.js")]
    return _template().render(
        title=visible(data["name"]),
        policy=POLICY.format(scripts=" ".join(f"'sha256-{_digest(script)}'" for script in scripts)),
        styles=Markup(_text("vendor/uPlot.min.css") + _text("page.css")),
        scripts=[Markup(script) for script in scripts],
        data=Markup(embedded(data)),
    )


def embedded(data: dict[str, Any]) -> str:
    """JSON for a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(all_visible(data, MOST_SHOWN), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


@cache
def _template() -> jinja2.Template:
    return SandboxedEnvironment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(_text("page.html"))


@cache
def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
