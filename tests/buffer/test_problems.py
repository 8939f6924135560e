"""The data file: both row formats from both file types, and one line for each thing that can be wrong with it."""

import datetime
import decimal
import json
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from buffer.ledger.rules import Ledger
from buffer.ledger.types import Transaction
from buffer.problems import Problems, ProblemsError, load_problems
from buffer.store.sqlite import Store
from buffer.wire.batches import ServedRows
from configs.schema import DataConfig

TINYZERO = [
    {
        "data_source": "countdown",
        "prompt": [{"role": "user", "content": f"make {n}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": {"target": n, "numbers": [n, 1]}},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(5)
]
EASYR1 = [{"problem": f"{n} + 1 = ?", "answer": str(n + 1)} for n in range(5)]


def write(folder: Path, kind: str, rows: list[Any]) -> Path:
    path = folder / f"train.{kind}"
    if kind == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def load(path: Path) -> Problems:
    return load_problems(path, DataConfig(train=path))


@pytest.mark.parametrize("rows", [TINYZERO, EASYR1], ids=["tinyzero", "easyr1"])
@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
def test_rows_come_back_as_they_are(tmp_path: Path, kind: str, rows: list[Any]) -> None:
    problems = load(write(tmp_path, kind, rows))
    assert len(problems) == 5
    assert list(problems) == rows
    assert problems[-1] == rows[-1] and problems[1:3] == rows[1:3]
    assert msgpack.unpackb(msgpack.packb(problems[3])) == rows[3]
    with pytest.raises(IndexError):
        problems[5]


def test_a_row_that_is_served_and_then_written_to_the_ledger_is_read_once() -> None:
    read = list[int]()

    def row(index: int) -> dict[str, Any]:
        read.append(index)
        return dict(EASYR1[index])

    problems = Problems(len(EASYR1), row, "digest")
    served, ledger = ServedRows(problems), Ledger(len(EASYR1), groups=1, max_staleness=4)
    with Store(None, problems=problems) as store:
        for lease in ledger.ask("a", 0, 4, 0.0):
            assert served.problem(lease.index) == EASYR1[lease.index]
        store.commit(Transaction(ledger.drain()))
        assert store._db.execute("SELECT COUNT(*) FROM problems").fetchone() == (4,)
    assert len(read) == len(set(read)) == 4


def test_types_of_parquet_become_types_of_messagepack(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    row = {
        "problem": "p",
        "answer": decimal.Decimal("1.50"),
        "when": datetime.datetime(2025, 1, 2, 3, 4),
        "vector": [1.5, 2.5],
        "small": 7,
    }
    schema = pa.schema(
        [
            ("problem", pa.large_string()),
            ("answer", pa.decimal128(10, 2)),
            ("when", pa.timestamp("us")),
            ("vector", pa.list_(pa.float32(), 2)),
            ("small", pa.uint8()),
        ]
    )
    pq.write_table(pa.Table.from_pylist([row], schema), path)
    expected = {"problem": "p", "answer": "1.50", "when": "2025-01-02T03:04:00", "vector": [1.5, 2.5], "small": 7}
    assert msgpack.unpackb(msgpack.packb(load(path)[0])) == expected


def test_arguments_of_calls_in_parquet_are_those_that_the_call_has(tmp_path: Path) -> None:
    """There each call has the keys of all, null where it has none."""
    rows = [
        {"problem": "p", "answer": "a", "messages": [{"tool_calls": [{"function": {"arguments": each}}]}]}
        for each in ({"city": "Rome", "when": {"day": 1}}, {"zone": "CET"}, {})
    ]
    problems = load(write(tmp_path, "parquet", rows))
    assert [row["messages"] for row in problems] == [row["messages"] for row in rows]
    kept = load(write(tmp_path, "jsonl", [rows[0] | {"messages": [{"tool_calls": [{"a": None}]}]}]))
    assert kept[0]["messages"] == [{"tool_calls": [{"a": None}]}], "a null that somebody wrote stays"


def test_a_number_too_large_for_messagepack_becomes_text(tmp_path: Path) -> None:
    row = load(write(tmp_path, "jsonl", [{"problem": "2 ** 70", "answer": 2**70}]))[0]
    assert msgpack.unpackb(msgpack.packb(row))["answer"] == str(2**70)


def test_empty_image_columns_are_left_out(tmp_path: Path) -> None:
    for kind in ("parquet", "jsonl"):
        assert load(write(tmp_path, kind, [{**row, "images": []} for row in EASYR1]))[2] == EASYR1[2]


def test_the_digest_tells_files_apart(tmp_path: Path) -> None:
    first = load(write(tmp_path, "jsonl", EASYR1)).digest
    assert load(write(tmp_path, "jsonl", EASYR1)).digest == first
    assert load(write(tmp_path, "jsonl", EASYR1[:4])).digest != first


WRONG = {
    "columns": (
        [{"question": "q", "answer": "a"}],
        ["prompt, reward_model", "problem, answer", "it has question, answer"],
    ),
    "no rows": ([], ["no rows"]),
    "truth": ([TINYZERO[0] | {"reward_model": {"style": "rule"}}], ["ground_truth"]),
    "null": ([EASYR1[0], EASYR1[1] | {"answer": None}], ["answer is empty"]),
    "NaN, as pandas writes an empty cell": (
        [{"problem": "p", "answer": 1.5}, {"problem": "q", "answer": float("nan")}],
        ["answer is empty"],
    ),
    "NaN as truth": ([{"prompt": "p", "reward_model": {"ground_truth": float("nan")}}], ["ground_truth"]),
}


@pytest.mark.parametrize("kind", ["parquet", "jsonl"])
@pytest.mark.parametrize("case", WRONG)
def test_wrong_rows_are_refused_in_one_line(tmp_path: Path, kind: str, case: str) -> None:
    if (case, kind) == ("no rows", "parquet"):
        path = tmp_path / "train.parquet"
        pq.write_table(pa.table({"problem": pa.array([], pa.string()), "answer": pa.array([], pa.string())}), path)
    else:
        path = write(tmp_path, kind, WRONG[case][0])
    with pytest.raises(ProblemsError) as error:
        load(path)
    text = str(error.value)
    assert "\n" not in text and text.startswith(f"data.train {path}: ")
    assert all(part in text for part in WRONG[case][1]), text


def test_a_line_that_is_wrong_is_named(tmp_path: Path) -> None:
    path = write(tmp_path, "jsonl", EASYR1)
    for line, part in (("{", "not JSON"), ("[1]", "not an object"), ('{"problem": "p"}', "it has problem")):
        path.write_text(json.dumps(EASYR1[0]) + "\n\n" + line + "\n")
        with pytest.raises(ProblemsError, match=rf"line 3: .*{part}"):
            load(path)


@pytest.mark.parametrize("name", ["absent.parquet", "absent.jsonl", "folder.parquet", "torn.parquet", "table.csv"])
def test_an_unreadable_file_is_refused_in_one_line(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    if name.startswith("folder"):
        path.mkdir()
    elif name.startswith("torn"):
        whole = write(tmp_path, "parquet", EASYR1).read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
    elif name.endswith("csv"):
        path.write_text("problem,answer\n")
    with pytest.raises(ProblemsError) as error:
        load(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_the_key_of_the_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "kept_out.jsonl"
    with pytest.raises(ProblemsError, match=r"^data\.eval "):
        load_problems(path, DataConfig(train=tmp_path / "train.jsonl", eval=path))


def test_each_row_is_named_by_its_file_and_line(tmp_path: Path) -> None:
    first, second = json.dumps(EASYR1[0]), json.dumps(EASYR1[1])
    (tmp_path / "lines.jsonl").write_text(f"\n{first}\n  \n\n{second}\r\n{first}")
    (tmp_path / "list.json").write_text(f"[{first}, {second}]")
    write(tmp_path, "parquet", EASYR1)
    data = {"train": [{"path": str(tmp_path / name)} for name in ("lines.jsonl", "list.json", "train.parquet")]}
    config = DataConfig.model_validate(data)
    for _ in range(2):  # the second time from the index of its lines
        problems = load_problems(config.train, config, index=tmp_path / "index")
        places = [problems.place(row).removeprefix(f"{tmp_path}/") for row in range(len(problems))]
        assert places[:3] == ["lines.jsonl line 2", "lines.jsonl line 5", "lines.jsonl line 6"]
        assert places[3:6] == ["list.json row 0", "list.json row 1", "train.parquet row 0"]
