"""Finds images in columns from which none are read. A model that sees would be trained without them, and nobody would
say so."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from buffer.data.columns import is_missing
from buffer.data.image_rows import IMAGES

HOLDER = r"(path|(file_?)?name|file|ur[il]|src|data|bytes|base64|b64)s?"
KIND = "image|img|picture|photo|screen_?shot|jpe?g|png|webp|(?P<video>video)"
NAME = re.compile(rf"(?!(.*_)?(docker|container)_)(.*_)?({KIND})s?(_?\d+)?(_?{HOLDER})?", re.IGNORECASE)
"""Examples: `image`, `Images`, `image_1`, `decoded_image`, `img_path`, `imageUrls`, `video`; not `docker_image`."""
ENDINGS = "bmp|gif|jpe?g|png|tiff?|webp|mp4|mov|avi|mkv|webm"
NAMED = rf"(https?|file|data):.+|.+\.({ENDINGS})[\"'\]]*"
A_FILE = re.compile(NAMED, re.IGNORECASE)
"""An address, the name of a file, or a list of them written as a text."""
LIKE_A_FILE = re.compile(rf"(?!n/a$)({NAMED}|\S+/\S+)", re.IGNORECASE)
"""Also paths without an ending, and bytes in base64, which have slashes too."""
OF_A_CONTAINER = re.compile(r"(.*_)?image_?names?", re.IGNORECASE)
"""May name a container: `image_name: swebench/sweb.eval.x86_64.django`."""
HOLDERS = ("bytes", "path", "url", "uri", "src", "data", "base64", "file")
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
    if found and found["video"]:
        return f"a column {name}, and only text and still images are shown to the model; leave it out, or {ALONE}"
    problem = f"a column {name}, and images are read from a list in the column {IMAGES}"
    return f"{problem}; write it so, leave it out, or {ALONE}"


def holds(name: str, value: Any) -> bool:
    """Whether `value`, of a column or key whose name is one of an image, is an image. `image` holds nothing else."""
    if isinstance(value, Mapping):
        return any(value.values()) if name == "image" else any(value.get(key) for key in HOLDERS)
    if isinstance(value, list):
        return any(holds(name, each) for each in value)
    if name == "image":
        return bool(value) and not is_missing(value)
    if isinstance(value, str):
        like = A_FILE if OF_A_CONTAINER.fullmatch(name) else LIKE_A_FILE
        return like.fullmatch(value.strip()) is not None
    return isinstance(value, bytes) and bool(value)
