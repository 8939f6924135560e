"""Makes text of users and policies safe to show in a terminal, a log or a page, and bounds figures. Pure functions.

Each place that shows such text passes it through `visible` just before the text leaves the process: the log's formatter
(`entrypoint.py`), the keeper's log file, the display, `status`, the screen, the report, the page's JSON, `python -m
buffer show`, Prometheus, and the last lines about a run. Before that point the text may hold any character.
"""

import logging
import re
from typing import Any

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters, except tab and line feed; escape sequences begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # change the direction of nearby text
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # other line breaks, invisible marks and tags
    "\ud800-\udfff]"  # lone surrogates, which no encoding can hold
)
COLOUR = re.compile("\x1b\\[[0-9;:]*m")
MOST_CHARS = 4000
"""Most characters of a shown text, unless a place has its own limit."""
MOST_LOGGED = 1 << 15
"""Most characters of a log record, with its traceback."""
MOST_DIGITS = 14
"""Most characters of a figure."""


def visible(text: str, most: int = MOST_CHARS) -> str:
    """Return `text` with control characters written as numbers: `"a\\x1b[2J"` -> `"a\\\\u001b[2J"`.

    Keeps tabs and line feeds. A text of more than `most` characters loses its middle.
    """
    return folded(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", folded(text, 2 * most)), most)


def colourless(text: str) -> str:
    """Remove the escape sequences of colours from `text`."""
    return COLOUR.sub("", text)


def folded(text: str, most: int) -> str:
    """Shorten `text` to `most` characters: a note replaces its middle."""
    if len(text) <= most:
        return text
    said = f" [... {len(text) - most:,} or more characters left out ...] "
    kept = max(most - len(said), 0)
    return (text[: kept - kept // 3] + said + text[len(text) - kept // 3 :])[:most]


def all_visible(data: Any, most: int = MOST_CHARS) -> Any:
    """Make each text of a JSON value visible, its keys included."""
    if isinstance(data, str):
        return visible(data, most)
    if isinstance(data, dict):
        return {all_visible(key, most): all_visible(value, most) for key, value in data.items()}
    return [all_visible(one, most) for one in data] if isinstance(data, list | tuple) else data


def figure(value: float, form: str) -> str:
    """Format `value` by `form`, or with three digits and an exponent if that is too wide: `"1e+41"`."""
    text = format(value, form)
    return text if len(text) <= MOST_DIGITS else format(value, ".3g")


class PlainFormatter(logging.Formatter):
    """Log records as `visible` text: whatever a user's function or a policy wrote, a log stays a text file."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), MOST_LOGGED)
