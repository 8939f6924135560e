"""Images in columns from which none are read: a model that sees is not trained without them in silence."""

import json
from base64 import b64encode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest

from actors.doctor.run_file import judge
from buffer.data.formats import _without_pixels
from buffer.data.image_columns import unread
from buffer.data.images import FILE_KINDS
from buffer.problems import ProblemsError, check_images, load_problems
from configs.load import ConfigError, load
from configs.schema import Config, DataConfig
from rollout.evaluation.players import load_sets
from tests.buffer.test_images import CONFIG, PROCESSOR, RGB, file, model
from tests.harness.weightless import add_weights

PNG = file(RGB)
PIXELS = [[[200, 0, 7]] * 8] * 9
URL = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUg"
TEXT = {"problem": "which?", "answer": "red"}
SEEN = {"problem": "<image>which?", "answer": "red", "images": ["a.png"]}

HELD = {
    "a path": {"image": "a.png"},
    "a path without an ending": {"image": "a"},
    "an address": {"image_url": "https://example.org/7"},
    "base64": {"image_base64": "data:image/png;base64,iVBORw0KGgo"},
    "bytes": {"img": PNG},
    "a struct of bytes": {"picture": {"bytes": PNG, "path": None}},
    "a list": {"image_paths": ["photos/7"]},
    "a list of structs": {"decoded_image": [{"bytes": None, "path": "a.png"}]},
    "one of several": {"image_1": "a.png", "image_2": None},
    "capitals": {"Images": ["a.png"]},
    "a photo": {"photo_file": "a.JPEG"},
    "a name": {"imageFileName": "a.png"},
    "a struct of something else": {"image": {"src": "a"}},
    "a number": {"image": 7},
    "a list written as a text": {"image_paths": '["a.png", "b.png"]'},
    "a screenshot": {"screenshots": ["a.png"]},
    "a column of webdataset": {"jpg": {"bytes": PNG, "path": None}},
    "a struct of base64": {"img": {"base64": "iVBORw0KGgo"}},
    "an address by name": {"image_name": "https://example.org/7"},
}
BY_VALUE = {
    "a struct of bytes": {"bytes": PNG, "path": None},
    "a struct of bytes of no known kind": {"bytes": b"?", "path": None},
    "a struct of bytes and a path": {"bytes": PNG, "path": "a.wav"},
    "a struct of a path": {"bytes": None, "path": "photos/7"},
    "a struct of a path alone": {"path": "a.PNG"},
    "a list of structs": [{"bytes": PNG, "path": None}],
    "a struct in a struct": {"caption": "red", "drawn": {"bytes": None, "path": "a.png"}},
    "a list in a struct": {"caption": "red", "drawn": [{"path": "a.png", "bytes": None}]},
    "a data URL": "data:image/png;base64,iVBORw0KGgo",
    "data URLs": ["data:image/svg+xml,%3Csvg"],
    "a data URL in a struct": {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo"}},
    "pixels": PIXELS,
    "pixels in a struct": {"state": PIXELS},
    "several arrays of pixels": [PIXELS, PIXELS],
    "an address in a struct": {"image": {"url": "https://example.org/7"}},
    "names in a struct": {"split": "train", "images": ["a.png"]},
    "a path in a struct": {"split": "train", "image_path": "photos/7"},
    "a list of structs with names": [{"caption": "red", "image": "a.png"}],
    "a part of a message": [{"type": "image", "url": "a"}],
    "a struct of a path and sizes": {"bytes": None, "path": "a.png", "width": 3},
    "bytes": PNG,
    **{f"{kind} bytes": file(RGB, kind) for kind in FILE_KINDS},
    **{f"{kind} in base64": b64encode(file(RGB, kind)).decode() for kind in ("GIF", "JPEG", "PNG", "WEBP")},
}
FACTS = {
    "ids and sizes": {"image_id": "a.png", "width": 7, "sha256": "9f"},
    "a sound": {"bytes": b"RIFFsizeWAVE", "path": "a.wav"},
    "bytes": b"BM, and no bitmap",
    "an empty struct": {"bytes": None, "path": None},
    "a path": "/9j/photos",
    "words on data URLs": "begins with data:image/png",
    "text": {"path": "src/main.py"},
    "numbers": [1, 2.0, None],
    "an address in a text": "https://example.org/a.png has a red house",
    "the name of a file": {"file_name": "a.png", "source": "https://example.org/a.png"},
    "a container": {"environment": {"image": "ubuntu:22.04", "cpus": 1}},
    "a container by its parts": {"image": {"name": "ubuntu", "tag": "22.04"}},
    "a truth": {"ground_truth": {"image_path": "photos/7.png"}, "solution": {"image": "a.png"}},
    "a call": [{"name": "detect", "arguments": {"image_url": "https://example.org/7.png"}}],
    "a definition of a tool": {"properties": {"image_url": {"type": "string", "description": "a.png"}}},
    "the address of a video": {"video_url": "https://example.org/7"},
    "no images": {"split": "train", "images": [], "image": None, "image_path": ""},
    "a world of a game": [[[2, 5, 0]] * 8] * 8,
    "grids": [[[1, 9] * 8] * 16] * 3,
    "triples": [[[1, 200, 3]] * 3] * 20,
    "vectors": [[[0.5, 20.0, 1.0]] * 9] * 9,
    "numbers beyond a byte": [[[256, 0, 0]] * 8] * 8,
}
NONE = {
    "nothing": {"image": None, "img": b"", "pictures": [], "photo": {"bytes": None, "path": None}, "image_url": ""},
    "an empty cell": {"image": float("nan"), "image_path": "N/A", "photo_url": None},
    "an empty struct": {"image": {"bytes": None, "path": None}},
    "facts of an image": {"image_id": "a.png", "image_width": 7, "has_image": True, "num_images": 2, "image_1": 7},
    "words": {"picture": "a red house", "question_image": "none"},
    "images that are read": {"images": ["a.png"], "image": "b.png"},
    "containers": {"docker_image": "swebench/sweb:latest", "image_name": "swebench/sweb.eval.x86_64.django"},
    "other names": {"mirage": "a.png", "imagery": "a.png", "source": "photos/a.png"},
    "videos, which are dropped with their reason": {"videos": ["a.mp4"]},
}


def as_lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.with_suffix(".jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    return path.with_suffix(".jsonl")


def as_json(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.with_suffix(".json").write_text(json.dumps(rows))
    return path.with_suffix(".json")


def as_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path.with_suffix(".parquet"))
    return path.with_suffix(".parquet")


def as_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    pa.csv.write_csv(pa.Table.from_pylist(rows), path.with_suffix(".csv"))
    return path.with_suffix(".csv")


Write = Callable[[Path, list[dict[str, Any]]], Path]


@pytest.mark.parametrize("row", HELD.values(), ids=HELD)
def test_images_that_would_not_be_seen_are_found(row: dict[str, Any]) -> None:
    problem = f"a column {next(iter(row))}, and images are read from a list in the column images; write it so, leave it"
    assert unread(TEXT | row).startswith(problem) and unread(TEXT | row | {"images": []}).startswith(problem)


def written(folder: Path, write: Write, value: Any) -> str:
    """The line of `Problems` on rows of which the second has `value` in a column `it`."""
    path = write(folder / "train", [TEXT | {"it": None}, TEXT | {"it": value}])
    return load_problems(path, DataConfig(train=path)).unread


def has_bytes(value: Any) -> bool:
    """JSON has none."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return isinstance(value, bytes) or any(map(has_bytes, parts))


@pytest.mark.parametrize("value", BY_VALUE.values(), ids=BY_VALUE)
def test_images_are_found_under_any_name(tmp_path: Path, value: Any) -> None:
    for write in (as_parquet, as_lines, as_json)[: 1 if has_bytes(value) else 3]:
        line = written(tmp_path, write, value)
        assert "the row has a column it, and images are read from a list in the column images; write it so" in line
    assert not unread(TEXT | {"it": value, "images": ["a.png"]})


@pytest.mark.parametrize("value", FACTS.values(), ids=FACTS)
def test_values_that_are_no_images_pass(tmp_path: Path, value: Any) -> None:
    for write in (as_parquet, as_lines)[: 1 if has_bytes(value) else 2]:
        assert written(tmp_path, write, value) == ""


def test_an_image_that_only_the_reward_sees_passes() -> None:
    assert (
        unread({"problem": "draw", "answer": PNG, "reward_model": {"ground_truth": {"bytes": PNG, "path": None}}}) == ""
    )


@pytest.mark.parametrize("feature", [{"_type": "Image"}, {"_type": "Sequence", "feature": {"_type": "Image"}}])
def test_a_column_is_an_image_if_its_file_declares_it_so(tmp_path: Path, feature: dict[str, Any]) -> None:
    paths: Any = "a" if feature["_type"] == "Image" else ["a"]
    for kind, found in ((feature, True), ({"dtype": "string", "_type": "Value"}, False)):
        declared = {b"huggingface": json.dumps({"info": {"features": {"it": kind}}}).encode()}
        table = pa.Table.from_pylist([TEXT | {"it": paths}]).replace_schema_metadata(declared)
        pq.write_table(table, path := tmp_path / "train.parquet")
        assert bool(load_problems(path, DataConfig(train=path)).unread) == found


@pytest.mark.parametrize("kind", ["Array3D", "Value"])
def test_an_array_that_its_file_declares_is_an_image_in_any_order_of_sides(tmp_path: Path, kind: str) -> None:
    feature = {"shape": [3, 4, 5], "dtype": "uint8", "_type": kind}
    declared = {b"huggingface": json.dumps({"info": {"features": {"it": feature}}}).encode()}
    pixels = pa.list_(pa.list_(pa.list_(pa.uint8())))
    table = pa.table({"it": pa.array([None, [[[0, 90, 7, 0, 255]] * 4] * 3], pixels)})
    for name, value in TEXT.items():
        table = table.append_column(name, [[value] * 2])
    pq.write_table(table.replace_schema_metadata(declared), path := tmp_path / "train.parquet")
    line = load_problems(path, DataConfig(train=path)).unread
    assert ("row 1: the row has a column it, and images are read" in line) == (kind == "Array3D") and bool(line) == (
        kind == "Array3D"
    )


def test_columns_of_pixels_are_never_python_s_numbers(tmp_path: Path) -> None:
    """A file of ten thousand photos would take minutes and many GiB."""
    table, pixels = _without_pixels(pa.Table.from_pylist([TEXT | {"it": None}, TEXT | {"it": [PIXELS]}]), ())
    assert pixels == {"it"} and table.column("it").to_pylist() == [False, True]


SPELLED = {
    "a prompt": URL,
    "a line of a prompt": f"Which colour?\n{URL}\n",
    "a message": [{"role": "system", "content": "Look."}, {"role": "user", "content": URL}],
    "a part of a message": [{"role": "user", "content": [{"type": "text", "text": URL}]}],
    "a drawing": "data:image/svg+xml,%3Csvg%20width='9'%3E",
}
PROMPTS = {
    "code": f"Shorten `background: url({URL})`.",
    "a question": "data:image/png;base64 is how what begins?",
    "its own shortest form": "data:image/gif;base64,R0lGOD",
    "a path": "Which colour has photos/a.png?",
    "an address": "https://example.org/a.png",
    "what the model said": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": URL}],
}


@pytest.mark.parametrize("name", ["prompt", "problem"])
@pytest.mark.parametrize("write", [as_parquet, as_lines])
@pytest.mark.parametrize("prompt", [*SPELLED.values(), *PROMPTS.values()], ids=[*SPELLED, *PROMPTS])
def test_a_prompt_that_is_a_data_url_is_found(tmp_path: Path, write: Write, name: str, prompt: Any) -> None:
    first: Any = [{"role": "user", "content": "which?"}] if isinstance(prompt, list) else "which?"
    if isinstance(prompt, list) and isinstance(prompt[-1]["content"], list):
        first = [{"role": "user", "content": [{"type": "text", "text": "which?"}]}]
    path = write(tmp_path / "train", [{name: first, "answer": "red"}, {name: prompt, "answer": "red"}])
    line = load_problems(path, DataConfig(train=path)).unread
    problem = f"the row has a data URL of an image in {name}, and images are read from a list in the column images"
    assert (f"{'row 1' if write is as_parquet else 'line 3'}: {problem}; move it" in line) == bool(line)
    assert bool(line) == (prompt in SPELLED.values())


def test_a_video_is_not_to_be_written_as_images() -> None:
    assert unread(TEXT | {"video": "a.mp4"}).startswith("a column video, and only text and still images are shown")


@pytest.mark.parametrize("row", NONE.values(), ids=NONE)
def test_other_columns_are_left_alone(row: dict[str, Any]) -> None:
    assert unread(TEXT | row) == ""


FORMATS: dict[Write, str] = {as_lines: "line 3", as_json: "row 1", as_parquet: "row 1", as_csv: "row 1"}
"""The place of the second row."""
ROWS = [TEXT | {"image": None}, TEXT | {"image": "a.png"}]


@pytest.fixture
def seeing(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(PNG)
    add_weights(Path(model(tmp_path, CONFIG, preprocessor_config=PROCESSOR)))
    return tmp_path


def run(folder: Path, train: Path, **settings: Any) -> Config:
    given = {"model.path": folder, "data.train": train, "reward.function": "math", "run.folder": folder}
    return load([f"--{name}={value}" for name, value in (given | settings).items()])


def refused(config: Config, key: str = "train") -> str:
    with pytest.raises(ProblemsError) as error:
        check_images(config, load_problems(config.data.sources()[key], config.data), key)
    return str(error.value)


@pytest.mark.parametrize("write", FORMATS)
def test_rows_whose_images_are_in_another_column_are_refused_in_each_format(seeing: Path, write: Write) -> None:
    path = write(seeing / "train", ROWS)
    problem = "the row has a column image, and images are read from a list in the column images; write it so, leave it"
    line = f"data.train {path}: {FORMATS[write]}: {problem} out, or set model.text_alone: true"
    config = run(seeing, path)
    assert refused(config) == line
    assert line in judge(config).refused, "before anything starts"


@pytest.mark.parametrize("write", [as_lines, as_parquet])
def test_rows_between_others_with_images_are_found(seeing: Path, write: Write) -> None:
    null = {"images": None, "image": None}
    path = write(seeing / "train", [null | SEEN, null | TEXT, null | SEEN | {"image": "a.png"}])
    assert check_images(run(seeing, path), load_problems(path, run(seeing, path).data))
    path = write(seeing / "train", [null | SEEN, null | TEXT, null | TEXT | {"image": "a.png"}])
    assert "line 5: the row has a column image" in refused(run(seeing, path)).replace("row 2: ", "line 5: ")


def test_a_row_of_the_second_file_is_named_by_its_file(seeing: Path) -> None:
    for name, rows in (("a", [TEXT] * 3), ("b", ROWS)):
        as_lines(seeing / name, rows)
    config = run(seeing, seeing / "*.jsonl")
    assert refused(config).startswith(f"data.train {seeing / 'b.jsonl'}: line 3: the row has a column image, and")


def test_evaluation_sets_and_demonstrations_are_refused_too(seeing: Path) -> None:
    train, other = as_lines(seeing / "train", [TEXT]), as_parquet(seeing / "other", ROWS)
    evaluated = run(seeing, train, **{"data.eval": other})
    line = f"data.eval {other}: row 1: the row has a column image, and images are read"
    assert refused(evaluated, "eval").startswith(line)
    assert any(each.startswith(line) for each in judge(evaluated).refused)
    with pytest.raises(ConfigError, match="row 1: the row has a column image, and images are read"):
        load_sets(evaluated)
    shown = run(seeing, train, **{"data.demonstrations.path": other})
    line = line.replace("data.eval", "data.demonstrations")
    assert any(each.startswith(line) for each in judge(shown).refused)


def test_who_does_not_see_or_shows_images_itself_may_have_such_columns(seeing: Path) -> None:
    path = as_lines(seeing / "train", ROWS)
    task = seeing / "task.py"
    task.write_text("def task(row, chat):\n    return 1.0\n")
    for settings in ({"model.text_alone": "true"}, {"rollout.task": f"{task}:task"}):
        config = run(seeing, path, **settings)
        problems = load_problems(path, config.data)
        assert check_images(config, problems) is None and problems[1] == ROWS[1]


def test_a_row_is_found_however_often_its_file_was_read(seeing: Path) -> None:
    """The index of a file's lines, which lets a restart skip the check of each row, is not kept for such a file."""
    path = as_lines(seeing / "train", ROWS)
    config = run(seeing, path)
    for _ in range(2):
        problems = load_problems(path, config.data, index=seeing / "index")
        with pytest.raises(ProblemsError, match="the row has a column image"):
            check_images(config, problems)
