"""Problems with images for benchmarks: `write_photos(file, ...)` writes a parquet file in EasyR1's columns.

An image is smooth noise with grain, which compresses about as a photo does, as JPEG or PNG, of random sides. The same
arguments give the same rows; a file that they made is kept.
"""

import io
import json
import random
from dataclasses import asdict
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from buffer.data.image_rows import MARK
from buffer.data.images import ImageFormat
from examples.kept import is_kept, record_made

LONGER = 1.8
"""Most that one side of an image is longer than the other."""
SMOOTH, GRAIN = 12, 6
"""Colours at so many points of the shorter side, smooth in between; and the standard deviation of each pixel's own."""


def photo(form: ImageFormat, tokens: int, draw: np.random.Generator, kind: str) -> bytes:
    """The file of an image of about `tokens` tokens."""
    ratio = LONGER ** draw.uniform(-1.0, 1.0)
    area = tokens * form.factor**2
    height, width = round(sqrt(area * ratio)), round(sqrt(area / ratio))
    points = draw.integers(0, 256, (SMOOTH, SMOOTH, 3), dtype=np.uint8)
    smooth = np.asarray(Image.fromarray(points).resize((width, height), Image.Resampling.BICUBIC), np.float32)
    grain = draw.standard_normal((height, width, 1), np.float32)
    file = io.BytesIO()
    Image.fromarray((smooth + GRAIN * grain).clip(0, 255).astype(np.uint8)).save(file, kind, quality=90)
    return file.getvalue()


def write_photos(
    file: Path, form: ImageFormat, rows: int, tokens: tuple[int, int], letters: str, length: int, text_only: int
) -> Path:
    """`rows` problems of `length` letters, each with an image of `tokens[0]` to `tokens[1]` tokens, but every
    `text_only`-th. Every fourth image is a PNG."""
    record, asked = file.with_suffix(".json"), [asdict(form), rows, list(tokens), letters, length, text_only]
    if is_kept(record, {"photos": json.loads(json.dumps(asked))}, file):
        return file
    record.unlink(missing_ok=True)
    draw, words = np.random.default_rng(0), random.Random(0)
    made: list[dict[str, Any]] = []
    for row in range(rows):
        text, images = "".join(words.choices(letters, k=length)), list[dict[str, Any]]()
        if row % text_only:
            wanted, kind = int(draw.integers(tokens[0], tokens[1] + 1)), "JPEG" if row % 4 else "PNG"
            images.append({"bytes": photo(form, wanted, draw, kind), "path": None})
        made.append({"problem": MARK * len(images) + text, "answer": "", "images": images})
    column = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    schema = pa.schema([("problem", pa.string()), ("answer", pa.string()), ("images", column)])
    part = file.with_suffix(".part")
    pq.write_table(pa.Table.from_pylist(made, schema), part, row_group_size=64)
    part.replace(file)  # whoever finds it finds it complete
    record_made(record, {"photos": asked})
    return file
