"""Every kind of source: formats, folders and globs, other column names, mixtures, images; and each kind of mistake."""

import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffer.problems import Problems, ProblemsError, load_problems
from configs.data.sources import count_rows, needs_truth, problems_with
from configs.load import load as load_config
from configs.schema import DataConfig
from tests.buffer.test_images import RGB, file

ROWS = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(4)]


def text_of(rows: list[dict[str, Any]], name: str) -> bytes:
    """The rows as a file of that name has them."""
    if name.startswith(("jsonl", "ndjson")):
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    if name == "json.list":
        return json.dumps(rows).encode()
    if name.startswith("json"):
        return json.dumps({"version": "1.1", "data": rows}).encode()
    cut = "\t" if name.startswith("tsv") else ","
    lines = [cut.join(rows[0]), *(cut.join(map(str, row.values())) for row in rows)]
    return ("\n".join(lines) + "\n").encode()


def write(path: Path, rows: list[dict[str, Any]], kind: str) -> Path:
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        data = text_of(rows, kind)
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def load(source: Any, truth: bool = True, **data: Any) -> Problems:
    config = DataConfig.model_validate({"train": source, **data})
    return load_problems(config.train, config, truth=truth)


def refusal(source: Any, truth: bool = True, **data: Any) -> str:
    with pytest.raises(ProblemsError) as error:
        load(source, truth, **data)
    assert "\n" not in str(error.value)
    return str(error.value)


KINDS = ["parquet", "jsonl", "ndjson", "json", "json.list", "csv", "tsv", "jsonl.gz", "json.gz", "csv.gz", "tsv.gz"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path / f"train.{kind.removesuffix('.list')}", ROWS, kind)
    problems = load(str(path))
    assert list(problems) == ROWS and problems[-1] == ROWS[-1] and problems[1:3] == ROWS[1:3]
    assert problems.digest == hashlib.sha256(path.read_bytes()).hexdigest()
    assert count_rows(path) == len(problems) == 4 and list(problems_with(path)) == []


def test_a_table_of_text_has_texts_numbers_and_nulls(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b'\xef\xbb\xbfproblem,answer,level,note\r\n"one,\n""two""",007,3,NA\r\nb,1.50,,\r\n')
    assert list(load(str(path))) == [
        {"problem": 'one,\n"two"', "answer": "007", "level": 3, "note": "NA"},
        {"problem": "b", "answer": "1.50", "level": None, "note": None},
    ]
    assert msgpack.unpackb(msgpack.packb(load(str(path))[0]))["level"] == 3


@pytest.mark.parametrize(
    ("cells", "read"),
    [
        (["001", "1"], ["001", "1"]),
        (["9007199254740993", "0.5"], ["9007199254740993", "0.5"]),
        (["99999999999999999999999", "3"], ["99999999999999999999999", "3"]),
        (["1e400", "3"], ["1e400", "3"]),
        (["-7", " 12"], [-7, 12]),
        (["12:30", "01:00"], ["12:30", "01:00"]),
        (["2024-01-01 10:00:00", ""], ["2024-01-01 10:00:00", None]),
        (["true", "false"], [True, False]),
        (["1.50", "12"], [1.5, 12.0]),
        (["18446744073709551615", ""], ["18446744073709551615", None]),
    ],
)
def test_no_number_of_a_table_of_text_is_changed(tmp_path: Path, cells: list[str], read: list[object]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("problem,answer,level,data_source\n" + "".join(f"q,a,{cell},01\n" for cell in cells))
    assert [(row["level"], row["data_source"]) for row in load(str(path))] == [(each, "01") for each in read]


def test_a_table_of_text_may_have_long_cells_and_texts_among_numbers(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("problem,answer,level\n" + "q,a,1\n" * 200_000 + f"{'x' * 2**21},a,hard\n")
    problems = load(str(path))
    assert (problems[0]["level"], problems[-1]["level"], len(problems[-1]["problem"])) == ("1", "hard", 2**21)


def test_lines_of_each_system_are_counted_as_they_are_read(tmp_path: Path) -> None:
    for end in ("\n", "\r\n", "\r"):
        path = tmp_path / "t.jsonl"
        path.write_bytes(f'{{"problem": "a\u2028b\u0085", "answer": "1"}}{end}'.encode() * 3)
        assert count_rows(path) == len(load(str(path))) == 3


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("model", ["rm", {"style": "rule"}, {"ground_truth": "8"}])
def test_an_answer_that_is_named_takes_the_place_of_reward_model(tmp_path: Path, kind: str, model: object) -> None:
    """The refusal of a `reward_model` without ground truth gives this remedy."""
    path = write(tmp_path / f"t.{kind}", [{"prompt": "q", "reward_model": model, "label": "7", "answer": "9"}], kind)
    assert list(load(str(path), columns={"answer": "label"})) == [{"prompt": "q", "answer": "7"}]
    assert load(str(path), columns={"answer": "answer"})[0]["answer"] == "9"


def test_columns_are_renamed_in_every_format(tmp_path: Path) -> None:
    rows = [{"question": "q", "solution": "s", "problem": "another"}]
    for kind in KINDS:
        path = write(tmp_path / f"t.{kind.removesuffix('.list')}", rows, kind)
        assert list(load(str(path), columns={"problem": "question", "answer": "solution"})) == [
            {"problem": "q", "answer": "s"}
        ]
        line = refusal(str(path), columns={"problem": "query", "answer": "solution"})
        assert "has no column query, which data.columns takes for problem; it has question, solution, problem" in line
        assert "say in data.columns what they are called" in refusal(str(path))


def test_rows_need_an_answer_only_where_the_reward_asks_for_one(tmp_path: Path) -> None:
    for kind in ("jsonl", "parquet", "csv"):
        path = write(tmp_path / f"t.{kind}", [{"prompt": "write a poem"}], kind)
        assert list(load(str(path), truth=False)) == [{"prompt": "write a poem"}]
        assert "needs the columns prompt, reward_model" in refusal(str(path))
        other = write(tmp_path / f"o.{kind}", [{"text": "write a poem"}], kind)
        assert "needs the column prompt or problem; it has text" in refusal(str(other), truth=False)
    mixed = write(tmp_path / "m.jsonl", [{"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}], "jsonl")
    assert load(str(mixed))[0]["answer"] == "2"


@pytest.mark.parametrize(
    ("code", "needed"),
    [
        ("def score(solution_str, extra_info): ...", False),
        ("async def score(solution_str): ...", False),
        ("def score(solution_str, ground_truth): ...", True),
        ("def score(solution_strs, ground_truths): ...", True),
        ("def score(reward_input): ...", True),
        ("def score(solution_str, **kwargs): ...", True),
        ("from other import score", True),
    ],
)
def test_a_function_of_the_user_tells_whether_it_needs_the_truth(tmp_path: Path, code: str, needed: bool) -> None:
    (tmp_path / "own.py").write_text(code)
    keys = ["--model.path=m", "--data.train=d.jsonl"]
    assert needs_truth(load_config([*keys, f"--reward.function={tmp_path}/own.py:score"])) == needed
    assert needs_truth(load_config([*keys, "--reward.function=math"]))
    assert not needs_truth(load_config([*keys, "--reward.function=reasoning_gym"]))


def test_a_folder_and_a_glob_are_their_files_in_order(tmp_path: Path) -> None:
    for number in (10, 2, 1):
        write(tmp_path / f"train-{number:05}.parquet", [ROWS[number % 4] | {"n": number}], "parquet")
    (tmp_path / "README.md").write_text("no data")
    for source in (tmp_path, tmp_path / "train-*.parquet"):
        problems = load(str(source))
        assert [row["n"] for row in problems] == [1, 2, 10] and count_rows(source) == 3
    digests = [hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(tmp_path.glob("*.parquet"))]
    assert problems.digest == hashlib.sha256("".join(digests).encode()).hexdigest()
    one = load(str(tmp_path / "*-00010.parquet"))
    assert one.digest == digests[2] and len(one) == 1
    with pytest.raises(IndexError):
        problems[3]


def test_files_of_one_source_must_fit_together(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", [{"problem": "p", "answer": "1"}], "parquet")
    write(tmp_path / "b.parquet", [{"problem": "p", "answer": 1}], "parquet")
    line = refusal(str(tmp_path))
    assert "b.parquet: column answer is int64, in a.parquet it is string; write the files alike" in line
    write(tmp_path / "b.parquet", [{"problem": "p", "answer": "1", "level": 3}], "parquet")
    assert "column level is int64, in a.parquet it is absent" in refusal(str(tmp_path / "*.parquet"))
    write(tmp_path / "c.jsonl", ROWS, "jsonl")
    assert "has a.parquet and c.jsonl; name files of one kind, as by *.parquet" in refusal(str(tmp_path))
    apart = [{"path": str(tmp_path / name)} for name in ("a.parquet", "b.parquet", "c.jsonl")]
    problems = load(apart)
    assert len(problems) == 6 and problems[1]["level"] == 3 and problems[2] == ROWS[0] and problems.shares == []


def test_sources_with_weights_have_columns_of_their_own(tmp_path: Path) -> None:
    write(tmp_path / "a.csv", [{"question": "q", "answer": "1"}], "csv")
    write(tmp_path / "b.jsonl", ROWS, "jsonl")
    sources = [
        {"path": str(tmp_path / "a.csv"), "weight": 1, "columns": {"problem": "question"}},
        {"path": str(tmp_path / "b.jsonl"), "weight": 3},
    ]
    problems = load(sources)
    assert problems.shares == [(1, 1.0), (4, 3.0)]
    assert list(problems) == [{"problem": "q", "answer": "1"}, *ROWS]
    del sources[1]["weight"]
    assert "b.jsonl has no weight, others have one; give each a weight, or none" in refusal(sources)


WRONG = {
    "lists.json": (b'{"a": [], "b": []}', "not JSON with rows: 2 lists; write a list of rows"),
    "number.json": (b"3", "not JSON with rows: no list"),
    "texts.json": (b'["a"]', "row 0: not an object of columns; write a list of objects"),
    "torn.json": (b'[{"problem": ', "not JSON with rows: "),
    "null.json": (b'[{"problem": "p", "answer": null}]', "row 0: answer is empty; fill it"),
    "torn.jsonl.gz": (gzip.compress(b'{"problem": "p", "answer": "1"}\n')[:-9], "gzip cannot unpack it"),
    "plain.csv.gz": (b"problem,answer\n", "gzip cannot unpack it (Not a gzipped file"),
    "long.csv": (b"problem,answer\na,b,c\n", "not a readable table (CSV parse error: Expected 2 columns, got 3"),
    "empty.csv": (b"problem,answer\na,\n", "row 0: answer is empty"),
    "latin.csv": ("problem,answer\ngrö,1\n".encode("latin-1"), "not UTF-8"),
    "twice.csv": (b"problem,answer,answer\na,b,c\n", "has the column answer more than once"),
    "images.csv": (b"problem,answer,images\na,b,c.png\n", "a table of text has no images"),
    "header.csv": (b"problem,answer\n", "no rows; name a file with problems"),
    "nothing.csv": (b"", "not a readable table (Empty CSV file)"),
    "model.csv": (b"prompt,reward_model\na,b\n", "reward_model is string, not a struct with ground_truth"),
    "pointer.parquet": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n",
        "a pointer of Git LFS, not the",
    ),
    "rows.parquet.gz": (b"x", "none of .parquet, .jsonl"),
    "rows.xlsx": (b"x", "none of .parquet, .jsonl"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_file_is_refused_in_one_line_with_its_name(tmp_path: Path, name: str) -> None:
    data, words = WRONG[name]
    (tmp_path / name).write_bytes(data)
    line = refusal(str(tmp_path / name))
    assert str(tmp_path / name) in line and line.startswith("data.train ")
    assert words in line


def test_a_path_of_nothing_is_refused(tmp_path: Path) -> None:
    assert "no such file" in refusal(str(tmp_path / "x.csv"))
    assert "no file matches it" in refusal(str(tmp_path / "*.csv"))
    assert "a folder without data files" in refusal(str(tmp_path))
    assert count_rows(tmp_path) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("https://example.com/rows.jsonl", "files are read from this machine: download it and name the file"),
        ("openai/gsm8k", "save it: datasets.load_dataset('openai/gsm8k') and to_parquet"),
        ("data/rows.jsonl", "no such file (from"),
    ],
)
def test_what_lies_elsewhere_is_named_with_the_way_to_get_it(name: str, words: str) -> None:
    assert words in refusal(name)


def test_the_images_of_several_files_are_beside_each(tmp_path: Path) -> None:
    for name, kind in (("one", "PNG"), ("two", "JPEG")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.img").write_bytes(file(RGB, kind))
    text = {"problem": "t", "answer": "1"}
    seen = {"problem": "<image>?", "answer": "1", "images": ["a.img"]}
    write(tmp_path / "one" / "t.jsonl", [text, seen], "jsonl")
    write(tmp_path / "two" / "t.parquet", [seen, seen], "parquet")
    write(tmp_path / "plain.jsonl", [text], "jsonl")
    names = ["one/t.jsonl", "plain.jsonl", "two/t.parquet"]
    problems = load([{"path": str(tmp_path / name)} for name in names])
    assert ["images" in row for row in problems] == [False, True, False, True, True]
    assert problems[1]["images"][0] == file(RGB, "PNG") and problems[4]["images"][0] == file(RGB, "JPEG")
    assert problems.images is not None and len(problems.images.num_bytes()) == 3 and len(problems.images.sizes) == 3
    assert problems.images.of(0) is None and problems.images.of(2) is None
    (tmp_path / "two" / "a.img").unlink()
    assert "two/t.parquet: row 0: image 0" in refusal([{"path": str(tmp_path / name)} for name in names])
