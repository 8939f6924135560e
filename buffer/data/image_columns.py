"""Finds images in columns from which none are read. A model that sees would be trained without them, and nobody would
say so."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from buffer.data.image_rows import IMAGES

NAME = re.compile(
    r"(.*_)?(image|img|picture|photo|(video))s?(_?\d+)?(_?(path|file|url|bytes|base64)s?)?", re.IGNORECASE
)
"""Examples: `image`, `Images`, `image_1`, `decoded_image`, `img_path`, `image_urls`, `video`."""
LIKE_A_FILE = re.compile(r"(https?|file|data):.+|\S+/\S+|.+\.(bmp|gif|jpe?g|png|tiff?|webp|mp4|mov|avi|mkv|webm)", re.I)
"""Paths, addresses, and bytes in base64, which have slashes too."""
HOLDERS = ("bytes", "path", "url")
"""Keys of a struct that holds an image."""
ALONE = "set model.text_alone: true"


def unread(row: Mapping[str, Any]) -> str:
    """Why an image of a row without `images` would not be seen, or ""."""
    names = may_hold(tuple(row))
    if not names or row.get(IMAGES):
        return ""
    return next((_problem(name) for name in names if holds(name, row[name])), "")


@lru_cache(1024)
def may_hold(names: tuple[str, ...]) -> tuple[str, ...]:
    """The columns or keys that may hold an image that is not read. Most rows of a file have the same."""
    return tuple(name for name in names if name not in (IMAGES, "videos") and NAME.fullmatch(name))


def _problem(name: str) -> str:
    found = NAME.fullmatch(name)
    if found and found[3]:
        return f"a column {name}, and only text and still images are shown to the model; leave it out, or {ALONE}"
    problem = f"a column {name}, and images are read from a list in the column {IMAGES}"
    return f"{problem}; write it so, leave it out, or {ALONE}"


def holds(name: str, value: Any) -> bool:
    """Whether `value`, of a column or key whose name is one of an image, is an image."""
    if isinstance(value, Mapping):
        return any(value.get(key) for key in HOLDERS)
    if isinstance(value, list):
        return any(holds(name, each) for each in value)
    if isinstance(value, str):
        return bool(value) if name == "image" else LIKE_A_FILE.fullmatch(value.strip()) is not None
    return isinstance(value, bytes) and bool(value)
