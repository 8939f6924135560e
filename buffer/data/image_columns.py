"""Finds images in columns from which none are read, by the column's name or by its value. A model that sees would be
trained without them, and nobody would say so."""

import json
import re
from collections.abc import Collection, Mapping
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
IMAGE_STRUCT = frozenset(("bytes", "path"))
AN_IMAGE_FILE = re.compile(rf".+\.({ENDINGS})([?#].*)?", re.IGNORECASE | re.DOTALL)
WITH_ENDING = re.compile(r".*\.\w{1,5}", re.DOTALL)
MAGIC = re.compile(
    rb"\x89PNG\r\n|\xff\xd8\xff|GIF8[79]a|II\*\0|MM\0\*|RIFF.{4}WEBP|BM.{4}\0{4}|.{4}ftyp(avif|hei[cfmsx]|mif1)",
    re.DOTALL,
)
"""The first bytes of PNG, JPEG, GIF, TIFF, WEBP, BMP, AVIF and HEIC files."""
AS_TEXT = r"^\s*(data:(image|video)/|(iVBORw0KGgo|/9j/|R0lGOD[dl]h|UklGR.{6}XRUJQ)[A-Za-z0-9+/]{16})"
"""How data URLs begin, and PNG, JPEG, GIF and WEBP files in base64. Arrow reads this pattern too."""
WRITTEN = re.compile(AS_TEXT)
SEPARATE = (IMAGES, "videos", "prompt", "problem", "answer", "reward_model")
"""Columns whose images are read or have an error of their own, and what only the reward sees."""
ALONE = "set model.text_alone: true"


def unread(row: Mapping[str, Any], declared: Collection[str] = ()) -> str:
    """Why an image of a row without `images` would not be seen, or "". `declared`: columns of images by the file's own
    account."""
    if row.get(IMAGES):
        return ""
    names = may_hold(tuple(row))
    for name, value in row.items():
        named, shown = name in names and holds(name, value), name not in SEPARATE and shows(value)
        if named or shown or (name in declared and holds("image", value)):
            return _problem(name)
    return ""


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


def shows(value: Any) -> bool:
    """Whether `value` is an image, or has one in it, under any name."""
    if isinstance(value, str):
        return WRITTEN.match(value) is not None
    if isinstance(value, Mapping):
        return _is_file(value) or any(map(shows, value.values()))
    if isinstance(value, list | tuple):
        return any(map(shows, value))
    return isinstance(value, bytes) and MAGIC.match(value) is not None


def declared_images(metadata: Mapping[bytes, bytes] | None) -> list[str]:
    """The columns of a parquet file that are Hugging Face's `Image` or `Video`, or a list of it. Other programs may
    write anything there."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b""))["info"]["features"].items()
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    return [name for name, feature in features if _kind(feature) in ("Image", "Video")]


def _kind(feature: Any) -> Any:
    """The kind of a feature; for a list or sequence, the kind of its entries."""
    if isinstance(feature, list):
        return _kind(feature[0]) if feature else None
    if not isinstance(feature, Mapping):
        return None
    return _kind(feature["feature"]) if "feature" in feature else feature.get("_type")


def _is_file(struct: Mapping[str, Any]) -> bool:
    """`bytes` and `path` are how Hugging Face stores images. It stores sounds so too, which the path's ending shows."""
    if not any(struct.values()) or not IMAGE_STRUCT.issuperset(struct):
        return False
    path = str(struct.get("path") or "")
    return AN_IMAGE_FILE.fullmatch(path) is not None or (len(struct) == 2 and not WITH_ENDING.fullmatch(path))
