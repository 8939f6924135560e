"""Finds images in columns from which none are read, by the column's name or by its value. A model that sees would be
trained without them, and nobody would say so."""

import json
import re
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

import numpy as np

from buffer.data.columns import is_missing
from buffer.data.image_rows import IMAGES, MARK

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
AS_LINE = r"(?m)^[ \t]*data:(image|video)/[\w.+-]+(;[^,\s]*)?,\S{16,}\s*$"
"""A data URL on a line by itself. Within a line it may be code that the prompt is about."""
A_LINE = re.compile(AS_LINE)
SEPARATE = (IMAGES, "videos", "prompt", "problem", "answer", "reward_model")
"""Columns whose images are read or have an error of their own, and what only the reward sees."""
APART = (
    *("answer", "answers", "ground_truth", "solution", "reward_model"),
    *("tools", "tool_calls", "function_call", "arguments", "parameters"),
)
"""Keys of truths, and of calls and their definitions: names and addresses of images are facts there."""
PARTS = ("image", "image_url", "input_image")
"""Types of parts of messages."""
LEAST_SIDE, LEAST_BRIGHT, BRIGHTEST = 8, 16, 255
"""An array of pixels has sides of LEAST_SIDE and a value of LEAST_BRIGHT at least. Worlds of a game made of cells are
smaller or have fewer kinds."""
CHANNELS = (3, 4)
ALONE = "set model.text_alone: true"


def unread(row: Mapping[str, Any], declared: Collection[str] = ()) -> str:
    """Why an image of a row without `images` would not be seen, or "". `declared`: columns of images by the file's own
    account."""
    if row.get(IMAGES):
        return ""
    names = may_hold(tuple(row))
    for name, value in row.items():
        if name in ("prompt", "problem") and spells(value):
            problem = f"a data URL of an image in {name}, and images are read from a list in the column {IMAGES}"
            return f"{problem}; move it there, and write {MARK} in its place, or {ALONE}"
        named, shown = name in names and holds(name, value), name not in SEPARATE and shows(value)
        shown = shown or (name not in SEPARATE and name not in APART and hides(value))
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


def hides(value: Any) -> bool:
    """Whether a struct in `value` names an image by its keys, or a list in it is an array of pixels."""
    if isinstance(value, Mapping):
        names_one = any(holds(_as(key), value[key]) for key in image_keys(tuple(value)))
        return names_one or _is_part(value) or any(hides(part) for key, part in value.items() if key not in APART)
    return isinstance(value, list | tuple) and (_is_pixels(value) or any(map(hides, value)))


@lru_cache(1024)
def image_keys(keys: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of a struct that may hold an image. Addresses of videos are common facts of texts."""
    found = ((key, NAME.fullmatch(key)) for key in keys if key not in APART)
    return tuple(key for key, match in found if match and not match["video"])


def may_hide(keys: Collection[str]) -> bool:
    """Whether a struct with these keys may have an image for `hides` or `shows`."""
    return bool(image_keys(tuple(keys))) or "type" in keys or IMAGE_STRUCT.issubset(keys)


def spells(value: Any) -> bool:
    """Whether a line of a text, or of the texts of messages, is a data URL of an image."""
    if isinstance(value, str):
        return A_LINE.search(value) is not None
    if isinstance(value, Mapping):
        return value.get("role") != "assistant" and (spells(value.get("content")) or spells(value.get("text")))
    return isinstance(value, list) and any(map(spells, value))


def declared_as(metadata: Mapping[bytes, bytes] | None, *kinds: str) -> list[str]:
    """The columns of a parquet file that have these kinds of Hugging Face, or are a list of them. Other programs may
    write anything there."""
    try:
        features = json.loads((metadata or {}).get(b"huggingface", b""))["info"]["features"].items()
    except (ValueError, LookupError, TypeError, AttributeError):
        return []
    return [name for name, feature in features if _kind(feature) in kinds]


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


def _as(key: str) -> str:
    """The name by which a key is judged. `image` in a struct often names a container."""
    return "image_name" if key in ("image", IMAGES) else key


def _is_part(struct: Mapping[str, Any]) -> bool:
    """Whether a struct is a part of a message, or `bytes` and `path` with further keys, as a number may count bytes."""
    if struct.get("type") in PARTS and holds("image_name", struct):
        return True
    is_file = IMAGE_STRUCT.issubset(struct) and not isinstance(struct["bytes"], int)
    return is_file and AN_IMAGE_FILE.fullmatch(str(struct["path"] or "")) is not None


def _is_pixels(value: Any) -> bool:
    """[height, width, channels] whole numbers."""
    first = value
    for least in (LEAST_SIDE, LEAST_SIDE, min(CHANNELS)):
        if not isinstance(first, list | tuple) or len(first) < least:
            return False
        first = first[0]
    try:
        array = np.array(value)
    except (ValueError, OverflowError):  # the lists differ in length
        return False
    is_image = array.ndim == 3 and array.dtype.kind in "iu" and array.shape[2] in CHANNELS
    return is_image and array.min() >= 0 and LEAST_BRIGHT <= array.max() <= BRIGHTEST
