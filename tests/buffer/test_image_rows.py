"""Rows with images: every way to write them, one line for each thing that can be wrong, and how little memory they
take."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffer.data.image_rows import ImageUnavailable, num_slots
from buffer.data.images import ImageError
from buffer.problems import ProblemsError, load_problems
from configs.schema import DataConfig
from tests.buffer.test_images import RGB, file

PNG, JPEG = file(RGB), file(RGB, "JPEG")
PROMPT = [{"role": "user", "content": "<image>and<image>: same?"}]
TRUTH = {"reward_model": {"ground_truth": "no"}}


def write(folder: Path, kind: str, rows: list[dict[str, Any]]) -> Path:
    path = folder / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path, **data: Any):
    return load_problems(path, DataConfig(train=path, **data))


@pytest.fixture
def files(tmp_path: Path) -> Path:
    for name, data in (("a.png", PNG), ("b.jpg", JPEG)):
        (tmp_path / name).write_bytes(data)
    return tmp_path


WAYS = {
    "paths": ["a.png", "b.jpg"],
    "structs of paths": [{"path": "a.png", "bytes": None}, {"path": "b.jpg", "bytes": None}],
    "bytes": [PNG, JPEG],
    "structs of bytes": [{"bytes": PNG, "path": None}, {"bytes": JPEG, "path": "gone.jpg"}],
    "both": [{"bytes": PNG, "path": None}, {"bytes": None, "path": "b.jpg"}],
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("way", WAYS)
def test_images_are_read_as_bytes_row_by_row_with_text_rows_between(files, kind, way):
    if kind == "jsonl" and "paths" not in way:
        return  # JSON has no bytes
    first = {"problem": "hi", "answer": "no", "images": []}
    path = write(files, kind, [first, {"problem": "<image><image>?", "answer": "no", "images": WAYS[way]}, first])
    problems = load(path)
    assert problems[0] == {"problem": "hi", "answer": "no"} == problems[2]
    row = dict(problems[1])
    assert (list(row["images"]), len(row["images"])) == ([PNG, JPEG], 2)
    assert f"{len(PNG):,} bytes" in repr(row.pop("images")) and row == {"problem": "<image><image>?", "answer": "no"}
    assert problems.images.num_bytes() == [len(PNG) + len(JPEG)]
    assert problems.images.sizes == [(64, 128)] * 2 and problems.images.broken == []


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_of_verl_ask_for_images_by_marks_or_parts(files, kind):
    (other := files / "photos").mkdir()
    (other / "c.png").write_bytes(PNG)
    images = [{"path": "c.png"}] * 2
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "and <image>: same?"}]
    for content in (PROMPT[0]["content"], parts):
        rows = [{"prompt": [{"role": "user", "content": content}], "images": images, **TRUTH}]
        problems = load(write(files, kind, rows), image_dir=other)
        assert list(problems[0]["images"]) == [PNG, PNG]


def test_places_for_images_are_counted():
    assert num_slots("<image>a<image>") == num_slots(PROMPT) == 2
    assert num_slots([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "<image>"}]}]) == 2
    assert num_slots([{"role": "system", "content": "s"}]) == num_slots(None) == 0


def test_a_text_file_may_speak_of_images(tmp_path):
    for kind in ("parquet", "jsonl"):
        row = {"problem": "what is an <image> tag?", "answer": "HTML"}
        assert load(write(tmp_path, kind, [row]))[0] == row == load(write(tmp_path, kind, [row | {"images": []}]))[0]


def named(says: str, kind: str) -> str:
    """Errors name a line of a text file, counted from 1, and a row of another file, counted from 0."""
    return says.replace("row 1", "line 2").replace("row 0", "line 1") if kind == "jsonl" else says


WRONG = {
    "too few": ([{"path": "a.png"}], "row 1: 2 <image> in its text, but 1 image"),
    "none": ([], "row 1: 2 <image> in its text, but 0 images"),
    "too many": ([{"path": "a.png"}] * 3, "row 1: 3 images, data.max_images is 2"),
    "gone": (
        [{"path": "a.png"}, {"path": "z.png"}],
        "row 1: image 1: .*z.png: No such file or directory; correct data.",
    ),
    "null": ([{"path": "a.png"}, {"path": None}], "row 1: image 1 is empty"),
    "a pipe": ([{"path": "a.png"}, {"path": "pipe"}], "row 1: image 1: .*pipe: not a file; correct data."),
    "no path": ([{"path": "a.png"}, {"path": "a\0b"}], "row 1: image 1: .*: embedded null byte; correct data."),
    "base64": ([{"path": "a.png"}, {"path": "iVBOR" * 999}], "row 1: image 1: [^;]{,330}: File name too long; correct"),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_row_is_refused_by_its_number(files, kind, case):
    images, says = WRONG[case]
    os.mkfifo(files / "pipe")  # whoever reads it waits for ever
    rows = [{"problem": "<image>", "answer": "", "images": [{"path": "a.png"}]}]
    rows.append({"problem": "<image><image>", "answer": "", "images": images})
    with pytest.raises(ProblemsError, match=named(says, kind)) as error:
        load(write(files, kind, rows), max_images=2)
    assert "\n" not in str(error.value) and str(error.value).startswith("data.train ")


OTHER = {
    "numbers": ([3], "row 0: image 0 is int; it must be bytes, a path, or a struct"),
    "a struct of something else": ([{"width": 3, "url": "x"}], "row 0: image 0 is a struct of width, url"),
    "one image": ({"path": "a.png"}, "row 0: images is dict, not a list"),
    "a path": ("a.png", "row 0: images is str, not a list"),
    "lists": ([["a.png"]], "row 0: image 0 is list"),
    "empty": ([""], "row 0: image 0 is empty"),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("case", OTHER)
def test_a_column_of_another_kind_is_refused_by_its_first_row(files, kind, case):
    images, says = OTHER[case]
    with pytest.raises(ProblemsError, match=named(says, kind)):
        load(write(files, kind, [{"problem": "<image>", "answer": "", "images": images}]))


def test_an_image_that_is_gone_or_another_is_an_error_when_it_is_read(files):
    row = load(write(files, "jsonl", [{"problem": "<image>", "answer": "", "images": ["a.png"]}]))[0]
    (files / "a.png").write_bytes(JPEG)
    with pytest.raises(ImageError, match=r"a\.png: changed since the start"):
        list(row["images"])
    (files / "a.png").write_bytes(PNG[:-1] + b"!")
    os.utime(files / "a.png", (1, 1))
    with pytest.raises(ImageError, match=r"a\.png: changed since the start"):
        list(row["images"])
    (files / "a.png").unlink()
    with pytest.raises(ImageError, match=r"a\.png: No such file or directory; bring the image back"):
        row["images"][0]
    assert "a.png" in repr(row["images"])
    with socket.socket(socket.AF_UNIX) as away:  # opening it fails, but not because nothing is there
        away.bind(str(files / "a.png"))
        with pytest.raises(ImageUnavailable, match=r"a\.png: No such device or address; bring the image back"):
            row["images"][0]


def test_some_rows_are_looked_at(tmp_path):
    rows = [{"problem": "<image>", "answer": "", "images": [PNG if row % 4 else b"GIF89a"]} for row in range(2004)]
    problems = load(write(tmp_path, "parquet", rows))
    assert len(problems.images.sizes) == len(problems.images.broken) == 501
    assert problems.images.broken[1].startswith("row 4: image 0: ")


def test_no_room_for_the_copy_is_said(tmp_path):
    path = write(tmp_path, "parquet", [{"problem": "<image>", "answer": "", "images": [PNG]}])
    with pytest.raises(ProblemsError, match=r"no copy of its images in .*absent: No such file"):
        load_problems(path, DataConfig(train=path), room=tmp_path / "absent")


MEMORY = """
import resource, sys
from pathlib import Path
from buffer.problems import load_problems
from configs.schema import DataConfig

def megabytes():
    return int(next(line for line in open("/proc/self/status") if line.startswith("RssAnon")).split()[1]) / 1024

path = Path(sys.argv[1])
before = megabytes()
problems = load_problems(path, DataConfig(train=path), room=path.parent)
sizes = {len(problems[row]["images"][0]) for row in range(len(problems))}
print(sizes, megabytes() - before)
"""


def test_images_take_no_memory(tmp_path):
    """120 MB of images in one row group, as pandas writes them."""
    images = [[np.random.default_rng(row).bytes(1_000_000)] for row in range(120)]
    table = pa.table({"problem": ["<image>"] * 120, "answer": [""] * 120, "images": images})
    pq.write_table(table, tmp_path / "train.parquet")
    del images, table
    line = [sys.executable, "-c", MEMORY, str(tmp_path / "train.parquet")]
    said = subprocess.run(line, capture_output=True, text=True, check=True, timeout=120).stdout
    sizes, grown = said.split("} ")
    assert sizes == "{1000000" and float(grown) < 60, said
