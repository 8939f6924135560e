"""The real buffer serves any value in a row of a data file unchanged, or refuses it with file and row."""

import asyncio
import datetime
import json
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgpack
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from buffer.data import formats, servable
from buffer.data.columns import plain
from buffer.data.entry_maker import EntryError, EntryMaker, GeneratedRows
from buffer.data.servable import MOST_ENTRIES, MOST_KEYS, MOST_NESTED, unservable
from buffer.problems import Problems, ProblemsError, load_problems
from buffer.store.sqlite import Store
from buffer.wire.message import LIMITS, pack, unpack
from buffer.wire.protocol import REQUESTS, Fail
from buffer.wire.sample import Sample
from configs.data.sources import count_rows, generated
from configs.schema import DataConfig
from tests.harness.buffer_process import buffer, make_requests, rollout, sample

SOUND = {"problem": "1 + 1 = ?", "answer": "2"}


class Rows(Sequence[Mapping[str, Any]]):
    """Rows that a test sets while the buffer serves them: item n is `now[n - first]`."""

    def __init__(self) -> None:
        self.first, self.now = 0, Problems(0, lambda index: {}, "")

    def __len__(self) -> int:
        return 10**6

    def __getitem__(self, index: Any) -> Any:
        return self.now[index - self.first]


class Served:
    """One buffer with a file, sockets and a client, shared by all examples."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.rows, self.runner = folder, Rows(), asyncio.Runner()
        self.store = Store(folder / "buffer.sqlite", False, self.rows)
        requests = make_requests(store=self.store, problems=self.rows, groups=10**5, max_staleness=9)  # type: ignore[arg-type]
        self.buffer = buffer(requests)
        self.runner.run(self._enter())

    async def _enter(self) -> None:
        it = await self.buffer.__aenter__()
        self.client = rollout(it.address)
        self.samples = await self.client.__aenter__()

    def close(self) -> None:
        """End both."""

        async def leave() -> None:
            await self.client.__aexit__(None, None, None)
            await self.buffer.__aexit__(None, None, None)

        self.runner.run(leave())
        self.runner.close()

    def serve(self, problems: Problems) -> list[dict[str, Any]]:
        """Return the rows as a rollout server gets them."""
        self.rows.now, found = problems, list[dict[str, Any]]()

        async def ask() -> None:
            while len(found) < len(problems):
                found.extend(item.problem for item in await self.samples.ask(len(problems) - len(found)) or [])

        self.runner.run(asyncio.wait_for(ask(), 60))
        self.rows.first += len(problems)
        return found

    def outcome(self, path: Path, bad: str, rows: Sequence[Any] = ()) -> str:
        """Return the refusal, which names the file and the row `bad`; "" if all rows were served as `rows`, or as they
        were loaded."""
        config = DataConfig.model_validate({"train": path})
        try:
            problems = load_problems(path, config, truth=True)
        except ProblemsError as error:
            assert f"{path}: {bad}" in str(error) and "\n" not in str(error), error
            str(error).encode()  # it can be shown
            return str(error)
        served = self.serve(problems)
        assert len(served) == len(problems)
        for got, row in zip(served, rows or problems, strict=True):
            assert same(got, row), (got, row)
        return ""


def same(one: Any, other: Any) -> bool:
    """Whether both are equal and of equal types; NaN equals NaN."""
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same, one, other))
    nan = isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other)
    return nan or (type(one) is type(other) and one == other)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    it = Served(tmp_path_factory.mktemp("served"))
    yield it
    it.close()


texts = st.text(st.characters(codec=None, categories=None), max_size=8) | st.sampled_from(
    ["\ud83d", "\ud83d\ude00", "\0"]
)
numbers = st.integers() | st.floats() | st.sampled_from([10**30, -(2**63), 2**64 - 1, 2**64, math.nan, math.inf])
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(texts, inside, max_size=3),
    max_leaves=8,
)


def nested(value: Any, levels: int) -> Any:
    """Put `value` into this many nested lists and maps."""
    for level in range(levels):
        value = [value] if level % 2 else {"in": value}
    return value


@settings(deadline=None, max_examples=150)
@given(values, st.sampled_from([0, 0, 0, 1, 60, 97, 98, 99, 100, 130, 240, 500, 700]), st.booleans())
def test_any_value_in_a_row_is_served_or_refused_with_file_and_line(
    served: Served, value: Any, levels: int, as_list: bool
) -> None:
    rows = [SOUND, SOUND | {"extra": nested(value, levels)}, SOUND]
    path = served.folder / ("rows.json" if as_list else "rows.jsonl")
    path.write_text(json.dumps(rows) if as_list else "\n".join(map(json.dumps, rows)))
    deep = levels + 1 > MOST_NESTED
    read = [] if deep else plain(json.loads(json.dumps(rows)))  # two halves of a pair become one character
    refusal = served.outcome(path, "row 1: " if as_list else "line 2: ", read)
    assert bool(refusal) == bool(deep or unservable(read[1]))


@pytest.mark.parametrize("column", ["problem", "answer"])
@settings(deadline=None, max_examples=40)
@given(values)
def test_any_value_as_prompt_or_answer_is_served_or_refused(served: Served, column: str, value: Any) -> None:
    path = served.folder / "columns.jsonl"
    path.write_text(json.dumps(SOUND) + "\n" + json.dumps(SOUND | {column: value}))
    served.outcome(path, "line 2: ")


@pytest.fixture
def small_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set small bounds; the wire's are larger."""
    for name, bound in {"MOST_BYTES": 2**20, "MOST_ENTRIES": 3000, "MOST_KEYS": 2000}.items():
        monkeypatch.setattr(servable, name, bound)
        monkeypatch.setattr(formats, name, bound, raising=False)


LINES = {
    b'{"problem": "?", "answer": "2", "answer": "3"}': "the key 'answer' appears twice in an object",
    b'{"problem": "?", "answer": {"a": 1, "b": [{"c": 1, "c": 2}]}}': "the key 'c' appears twice in an object",
    b'{"problem": "?", "answer": "\xed\xa0\xbd"}': "answer has half a surrogate pair, '\\ud83d' at character 0",
    b'{"problem": "?", "answer": "2", "\\udc00": 1}': "a key of the row has half a surrogate pair",
    b'{"problem": "?", "answer": "2", "x": [{"y": "a\\udc00"}]}': "x[0].y has half a surrogate pair",
    b'{"problem": "?", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}": "nested more than 100 levels",
    b'{"problem": "?", "answer": ' + b"9" * 5000 + b"}": "a number of 5,000 digits, and Python reads 4,300; write it "
    "as a text",
    b'{"problem": "?", "answer": [-1e999]}': "the number -1e999, and the largest is 1.8e308; write it as a text",
    b'{"problem": "?", "answer": "\xff"}': "not JSON ('utf-8' codec can't decode byte 0xff in position 28: invalid "
    "start byte); write the file as UTF-8",
    b"{}": "needs the columns",
    b"null": "not an object of columns",
    b'{"problem": null, "answer": "2"}': "problem is empty",
    json.dumps(SOUND | {"x": [0] * 3001}).encode(): "x has 3,001 entries, more than 3,000",
    json.dumps(SOUND | {"x": dict.fromkeys(map(str, range(2001)), 0)}).encode(): "x has 2,001 keys, more than 2,000",
    json.dumps(SOUND | {"x": "a" * (2 * 2**20)}).encode(): "it takes 2 MiB, more than 1",
}


@pytest.mark.parametrize(("line", "words"), LINES.items(), ids=list(LINES.values()))
@pytest.mark.parametrize("kind", ["rows.jsonl", "rows.json", "object.json"])
def test_a_wrong_row_is_named(served: Served, small_bounds: None, line: bytes, words: str, kind: str) -> None:
    good, path = json.dumps(SOUND | {"note": 'a "b", [c] {d}, \\'}).encode(), served.folder / kind
    listed = b"[" + b", ".join([good, good, line, good]) + b"]"
    text = {"rows.jsonl": b"\n".join([good, good, line, good]), "rows.json": listed}
    path.write_bytes(text.get(kind, b'{"version": {"no": [1, 2]}, "data": ' + listed + b"}"))
    if words.startswith("not JSON") and kind != "rows.jsonl":
        with pytest.raises(ProblemsError, match="not JSON with rows"):
            load_problems(path, DataConfig.model_validate({"train": path}))
        return
    assert words in served.outcome(path, "line 3: " if kind == "rows.jsonl" else "row 2: ")
    assert count_rows(path) in (4, None)


def test_half_a_surrogate_pair_is_refused_with_its_line(served: Served, tmp_path: Path) -> None:
    path = tmp_path / "surrogate.jsonl"
    lines = [{"problem": f"What does {sign} stand for?", "answer": "a"} for sign in ("+", "\ud83d", "-")]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "problem has half a surrogate pair, '\\ud83d' at character 10" in served.outcome(path, "line 2: ")


def test_an_index_of_an_earlier_format_is_not_used(served: Served, tmp_path: Path) -> None:
    path, config = tmp_path / "rows.jsonl", DataConfig.model_validate({"train": tmp_path / "rows.jsonl"})
    path.write_text(json.dumps(SOUND))
    load_problems(path, config, index=tmp_path / "index")
    (index,) = (tmp_path / "index").iterdir()
    path.write_text(json.dumps(SOUND | {"answer": "\ud83d"}))
    with pytest.raises(ProblemsError, match="line 1: answer has half"):
        load_problems(path, config, index=tmp_path / "index")
    assert list((tmp_path / "index").iterdir()) == [index]


def broken_text() -> pa.Array:
    """A column of text whose second value is not UTF-8."""
    offsets = pa.array([0, 1, 3, 4], pa.int32()).buffers()[1]
    return pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xff\xfeb")])


def three(middle: Any, kind: pa.DataType | None = None, around: Any = None) -> pa.Array:
    return pa.array([around, middle, around], kind)


EPOCH = datetime.datetime(2026, 11, 27)
COLUMNS: dict[str, tuple[pa.Array, str]] = {
    "float16": (three(1.5, pa.float16()), ""),
    "NaN": (three(math.nan, pa.float32()), ""),
    "uint64": (three(2**64 - 1, pa.uint64()), ""),
    "decimal": (three(Decimal("1.50")), ""),
    "date": (three(EPOCH.date()), ""),
    "date beyond Python": (three(2**30, pa.int32()).cast(pa.date32()), "row 1: "),
    "datetime": (three(EPOCH), ""),
    "datetime with a zone": (three(EPOCH, pa.timestamp("us", tz="Europe/Berlin")), ""),
    "datetime with a zone that is none": (
        three(EPOCH, pa.timestamp("us", tz="Europe/Nowhere")),
        "row 1: no such time zone: 'Europe/Nowhere'; cast the column",
    ),
    "list of datetimes with a zone that is none": (
        three([EPOCH], pa.list_(pa.timestamp("us", tz="x"))),
        "row 1: no such time zone: 'x'; cast the column",
    ),
    "nanoseconds": (three(1, pa.timestamp("ns")), "row 1: Nanosecond resolution temporal type 1 is not safely"),
    "time": (three(datetime.time(1, 2)), ""),
    "duration": (three(datetime.timedelta(1)), "row 1: x is a timedelta, which is neither text nor a number"),
    "bytes": (three(b"\xff\0"), ""),
    "fixed bytes": (three(b"ab", pa.binary(2)), ""),
    "image": (three({"bytes": b"\x89PNG", "path": None}), ""),
    "map": (three([("a", 1)], pa.map_(pa.string(), pa.int64())), ""),
    "map of numbers": (three([(1, 1)], pa.map_(pa.int64(), pa.int64())), ""),
    "dictionary": (pa.array(["a", "b", "a"]).dictionary_encode(), ""),
    "list of structs": (three([{"role": "user", "content": "?"}]), ""),
    "large list": (three(["a"], pa.large_list(pa.large_string())), ""),
    "null": (pa.nulls(3), ""),
    "no UTF-8": (broken_text(), "row 1: 'utf-8' codec can't decode byte 0xff"),
    "no UTF-8 in a struct": (pa.StructArray.from_arrays([broken_text()], ["y"]), "row 1: 'utf-8' codec"),
    "a long list": (three([0] * 3001), "row 1: x has 3,001 entries, more than 3,000"),
    "a long list in a struct": (three({"y": [0] * 3001}), "row 1: x.y has 3,001 entries"),
    "a long list in a list": (three([[], [0] * 3001]), "row 1: x[1] has 3,001 entries"),
    "a long text": (three("a" * (2 * 2**20)), "row 1: it takes 2 MiB, more than 1"),
    "a text of half a megabyte": (three("a" * 2**19), ""),
    "uuid": (three(uuid.UUID(int=1).bytes, pa.binary(16)).cast(pa.uuid()), "row 1: x is a UUID, which"),
    "names twice": (
        pa.StructArray.from_arrays([three(1), three(2)], names=["a", "a"]),
        "row 0: Converting to Python dictionary is not supported when duplicate field names are present",
    ),
}


@pytest.mark.parametrize(("column", "words"), COLUMNS.values(), ids=list(COLUMNS))
def test_any_column_of_a_parquet_file_is_served_or_refused_with_file_and_row(
    served: Served, small_bounds: None, column: pa.Array, words: str
) -> None:
    path = served.folder / "rows.parquet"
    table = pa.table({"problem": ["a", "b", "c"], "answer": ["1", "2", "3"], "x": column})
    pq.write_table(table, path)
    assert words in served.outcome(path, words.partition(": ")[0]) if words else not served.outcome(path, "")


def test_paths_of_images_that_are_no_text_are_refused(served: Served) -> None:
    path, broken = served.folder / "images.parquet", pa.ListArray.from_arrays([0, 1, 2, 3], broken_text())
    pq.write_table(pa.table({"problem": ["a", "b", "c"], "answer": ["1", "2", "3"], "images": broken}), path)
    with pytest.raises(ProblemsError, match=f"{path}: its images cannot be read .'utf-8' codec"):
        load_problems(path, DataConfig.model_validate({"train": path}))


def test_an_entry_of_a_set_that_cannot_be_served_is_dropped_with_its_reason(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = {
        0: {"question": "?", "answer": "\ud83d", "sha256": "0"},
        1: {"question": "?", "answer": "2", "sha256": "0"},
        2: {"error": "a \ud83d went wrong"},
    }
    child = f"""
import json, sys
answers = json.loads({json.dumps(json.dumps(answers))})
for line in sys.stdin:
    _, number, verb, arguments = json.loads(line)
    answer = {{"version": "1"}} if verb == "about" else answers[str(arguments[2])]
    print(json.dumps([number, answer]), flush=True)
"""
    maker = EntryMaker(["-c", child])
    monkeypatch.setattr("buffer.data.entry_maker.entry_maker", lambda: maker)
    made = generated("reasoning_gym:leg_counting?size=3&seed=1")
    assert made
    rows = GeneratedRows(made)
    bad, good, unmade = served.serve(Problems(3, rows, ""))
    assert bad["unmade"].startswith("entry 0 of leg_counting: answer has half a surrogate pair, '\\ud83d'")
    assert good["answer"] == "2" and unmade["unmade"] == "a \\ud83d went wrong"
    maker.close()
    with pytest.raises(EntryError, match=r"its config.words has half a surrogate pair"):
        GeneratedRows(made._replace(config={"words": "\ud83d"}))


def test_a_row_is_refused_exactly_if_the_wire_cannot_read_it() -> None:
    """The bounds are the wire's."""
    for keys, entries in ((MOST_KEYS, MOST_ENTRIES), (MOST_KEYS + 1, 1), (1, MOST_ENTRIES + 1)):
        row = {"keys": dict.fromkeys(map(str, range(keys))), "entries": [None] * entries}
        packed = msgpack.packb(row)
        if unservable(row):
            with pytest.raises(ValueError, match="exceeds max"):
                msgpack.unpackb(packed, **LIMITS)
        else:
            assert msgpack.unpackb(packed, **LIMITS) == row


def test_half_a_surrogate_pair_in_a_reason_or_answer_is_sent_escaped() -> None:
    """Users' code raises errors and returns texts of any kind; the server must survive them."""
    _, fail = unpack(pack(1, Fail(item=0, lease=0, reason="no \ud83d here")), REQUESTS)
    assert isinstance(fail, Fail) and fail.reason == "no \\ud83d here"
    answered = sample().model_copy(update={"answer": "\udcff", "metrics": {"\udc00": 1.0}})
    assert Sample.unpack(answered.pack()).answer == "\\udcff"
