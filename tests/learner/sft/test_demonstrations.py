"""Rows that cannot be trained are refused with file and line; the order is a function of the seed alone."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.load import ConfigError
from learner.sft.answers import AnswerReader, TrainedText
from learner.sft.demonstrations import Demonstrations, SourceRows, read_demonstrations
from learner.sft.packing import cut, laid_out, num_trained
from tests.harness.demonstrated import TURNS, chatml_tokenizer, demonstrations, jsonl, sft_config

LONG = {"problem": "1+1=", "answer": "2" * 200}


def read(folder: Path, rows: Any = None, **changes: Any) -> Demonstrations:
    config = sft_config(folder, rows, **changes)
    reader = AnswerReader(chatml_tokenizer(), config)
    try:
        return read_demonstrations(config, "data.train", config.data.train, reader)
    finally:
        reader.close()


def refused(folder: Path, rows: Any = None, **changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        read(folder, rows, **changes)
    return list(error.value.problems)


def test_a_wrong_row_is_named_by_its_line(tmp_path: Path, mesh) -> None:
    """Blank lines are no rows, but count as lines."""
    file = tmp_path / "bad.jsonl"
    jsonl(file, [{"messages": TURNS}, {"messages": TURNS[:1]}, {"messages": TURNS}, {"messages": []}])
    file.write_text("\n" + file.read_text().replace("\n", "\n\n", 1))
    (first, second) = refused(tmp_path, data={"train": str(file)})
    assert first == f"data.train {file}: line 4: no message is trained with sft.turns: all; correct it or the row"
    assert second.startswith(f"data.train {file}: line 6: the messages of the row are []")


def test_many_wrong_rows_are_counted(tmp_path: Path, mesh) -> None:
    found = refused(tmp_path, [{"messages": TURNS[:1]}] * 14)
    assert len(found) == 11 and found[-1] == "and 4 more rows that cannot be trained"


def test_a_wrong_row_of_parquet_is_named_by_its_number(tmp_path: Path, mesh) -> None:
    pq.write_table(pa.table({"problem": ["a", "b"], "answer": ["1", " "]}), tmp_path / "d.parquet")
    (line,) = refused(tmp_path, data={"train": str(tmp_path / "d.parquet")})
    assert line.startswith(f"data.train {tmp_path / 'd.parquet'}: row 1: message 1 is an answer without text")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "line 1: not JSON"),
        ('{"prompt": "a", "reward_model": {"ground_truth": 1}}', "line 1: supervised fine-tuning needs the columns"),
        ('{"problem": "a", "answer": null}', "line 1: answer is empty"),
        ("", "no rows"),
    ],
)
def test_a_file_of_other_rows_is_refused(tmp_path: Path, mesh, text: str, why: str) -> None:
    (tmp_path / "d.jsonl").write_text(text)
    (line,) = refused(tmp_path, data={"train": str(tmp_path / "d.jsonl")})
    assert why in line


def test_a_long_row_is_refused_or_dropped_and_counted(tmp_path: Path, mesh) -> None:
    rows = [*demonstrations(4), LONG]
    (line,) = refused(tmp_path, rows, sft={"max_tokens": 128})
    assert "line 5: it has 225 tokens, more than sft.max_tokens (128); shorten it, or set sft.too_long: drop" in line
    (line,) = refused(tmp_path, rows, learner={"tokens_per_microbatch": 140})
    assert "more than sft.max_tokens (auto, 140)" in line
    made = read(tmp_path, rows, sft={"max_tokens": 128, "too_long": "drop"})
    assert (len(made), made.dropped) == (4, 1) and made.longest <= 128
    assert read(tmp_path, rows).longest == 225
    assert "every row is too long" in refused(tmp_path, [LONG], sft={"max_tokens": 9, "too_long": "drop"})[0]


def test_an_epoch_has_each_row_once_in_an_order_of_its_own(tmp_path: Path, mesh) -> None:
    made, again = read(tmp_path), read(tmp_path)
    orders = [list(made.order(epoch)) for epoch in range(3)]
    assert all(sorted(order) == list(range(24)) for order in orders) and orders[0] != orders[1]
    assert orders == [list(again.order(epoch)) for epoch in range(3)] and made.digest == again.digest
    other = read(tmp_path, run={"seed": 1})
    assert list(other.order(0)) != orders[0] and other.digest == made.digest
    assert list(read(tmp_path, data={"train": str(tmp_path / "train.jsonl"), "shuffle": False}).order(1)) == [
        *range(24)
    ]


def test_batches_go_on_over_the_end_of_an_epoch(tmp_path: Path, mesh) -> None:
    made = read(tmp_path)
    one_by_one = [made.drawn(position, 1)[0] for position in range(40)]
    in_batches = [text for position in range(0, 40, 10) for text in made.drawn(position, 10)]
    assert all(np.array_equal(a.tokens, b.tokens) for a, b in zip(one_by_one, in_batches, strict=True))


def test_sources_with_weights_have_their_shares(tmp_path: Path, mesh) -> None:
    """A dropped row counts in no source."""
    files = [
        {"path": str(jsonl(tmp_path / f"{name}.jsonl", rows)), "weight": weight}
        for name, rows, weight in (("a", [LONG, *demonstrations(6)], 3.0), ("b", demonstrations(12), 1.0))
    ]
    made = read(tmp_path, data={"train": files}, sft={"max_tokens": 128, "too_long": "drop"})
    first = [index for epoch in range(2) for index in made.order(epoch)]
    assert len(made) == 18 and sum(index < 6 for index in first) == 27
    (line,) = refused(tmp_path, data={"train": files}, sft={"max_tokens": 5, "too_long": "drop"})
    assert line.startswith(f"data.train: {files[0]['path']} and 1 more: every row is too long")
    jsonl(tmp_path / "b.jsonl", [LONG])
    (line,) = refused(tmp_path, data={"train": files}, sft={"max_tokens": 128, "too_long": "drop"})
    assert line.startswith(f"data.train: {files[1]['path']}: every row is too long")


def test_data_of_other_tokens_have_another_digest(tmp_path: Path, mesh) -> None:
    rows = demonstrations(6)
    digests = [read(tmp_path, rows).digest, read(tmp_path, rows[::-1]).digest, read(tmp_path, rows[:5]).digest]
    digests.append(read(tmp_path, rows, sft={"turns": "last"}).digest)
    assert len({*digests}) == 4


TEXTS = st.lists(st.integers(2, 40), min_size=1, max_size=30)


@settings(max_examples=60, deadline=None)
@given(lengths=TEXTS, world=st.integers(1, 4), budget=st.integers(16, 64))
def test_ranks_have_all_texts_once_in_as_many_microbatches(lengths: list[int], world: int, budget: int) -> None:
    texts = [TrainedText(np.full(n, i, np.int32), np.arange(n) > 0) for i, n in enumerate(lengths)]
    shares = [cut(texts, rank, world, budget) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    rows = [laid_out(chosen) for share in shares for chosen in share]
    found = [text for row in rows for text in _texts(row) if len(set(text.tolist())) == 1 and row.sampled.any()]
    assert sorted((int(text[0]), len(text)) for text in found) == list(enumerate(lengths))
    assert sum(int(row.sampled.sum()) for row in rows) == num_trained(texts)
    assert all(len(row.tokens) <= budget or len(row.cu_seqlens) == 2 for row in rows)


def _texts(row: Any) -> list[np.ndarray]:
    bounds = row.cu_seqlens.tolist()
    return [row.tokens[start:stop].numpy() for start, stop in pairwise(bounds)]


def test_a_range_of_rows_without_weight_counts_by_rows() -> None:
    text = TrainedText(np.array([1, 2], np.int32), np.array([False, True]))
    made = Demonstrations([[text]] * 4, [SourceRows(0, 2, None), SourceRows(2, 4, None)])
    assert list(made.order(0)) == [0, 1, 2, 3]
