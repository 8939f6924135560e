"""Text of users and policies as a terminal, a log or a page may show it, and figures of bounded width. Pure functions.

Each place that shows such text passes it through `visible` where it leaves the process: the log's formatter
(`entrypoint.py`), the keeper's log file, the display, `status`, the screen, the report, the page's JSON, `python -m
buffer show`, Prometheus, and what is printed of a run that ends. What came before may be anything.
"""

import logging
import re
from typing import Any

UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters but tab and line feed: escape sequences begin with one
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # they change the direction of the text beside them
    "\u2028\u2029\ufeff\ufff9-\ufffb\U000e0000-\U000e007f"  # other line breaks, marks and tags that nobody sees
    "\ud800-\udfff]"  # halves of a pair, which no encoding carries
)
COLOUR = re.compile("\x1b\\[[0-9;:]*m")
MOST_CHARS = 4000
"""Of a text that is shown, unless its place says otherwise."""
MOST_LOGGED = 1 << 15
"""Characters of a log record, a traceback included."""
MOST_DIGITS = 14
"""Characters of a figure."""


def visible(text: str, most: int = MOST_CHARS) -> str:
    """`text` of at most `most` characters (the middle is left out), with what a terminal would obey as numbers:
    `"a\\x1b[2J"` -> `"a\\\\u001b[2J"`. Tabs and line feeds stay. What is visible is left as it is."""
    return folded(UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", folded(text, 2 * most)), most)


def colourless(text: str) -> str:
    """`text` without the escape sequences of colours, with which processes print their lines."""
    return COLOUR.sub("", text)


def folded(text: str, most: int) -> str:
    """`text` with its middle left out so that `most` characters are left, with those that say so."""
    if len(text) <= most:
        return text
    said = f" [... {len(text) - most:,} characters and these ...] "
    kept = max(most - len(said), 0)
    return (text[: kept - kept // 3] + said + text[len(text) - kept // 3 :])[:most]


def all_visible(data: Any, most: int = MOST_CHARS) -> Any:
    """The same JSON value with each of its texts, keys too, made visible."""
    if isinstance(data, str):
        return visible(data, most)
    if isinstance(data, dict):
        return {all_visible(key, most): all_visible(value, most) for key, value in data.items()}
    return [all_visible(one, most) for one in data] if isinstance(data, list | tuple) else data


def figure(value: float, form: str) -> str:
    """`value` in the format `form`, or with three digits and an exponent where that is too wide: `"1e+41"`."""
    text = format(value, form)
    return text if len(text) <= MOST_DIGITS else format(value, ".3g")


class PlainFormatter(logging.Formatter):
    """Log records as `visible` text: whatever a user's function or a policy wrote, a log stays a text file."""

    def format(self, record: logging.LogRecord) -> str:
        return visible(super().format(record), MOST_LOGGED)
