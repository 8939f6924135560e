"""A run over a mixture that is started again goes on with the same problems, and refuses other data."""

import json
from pathlib import Path

import pytest

from buffer.__main__ import restored
from buffer.ledger.types import Transaction
from buffer.problems import Problems, load_problems
from buffer.store.faults import StoreError
from buffer.store.sqlite import Store
from buffer.wire.server import ListeningClock
from configs.load import load
from configs.schema import Config


def run_file(folder: Path, weights: tuple[int, int] = (1, 4)) -> Config:
    names = [f"{{path: {folder}/{name}.jsonl, weight: {weight}}}" for name, weight in zip("ab", weights, strict=True)]
    words = ["--model.path=m", "--reward.function=math", "--batch.groups=4", "--batch.max_staleness=50"]
    return load([*words, "--data.epochs=2", f"--data.train=[{', '.join(names)}]"])


def problems(folder: Path) -> Problems:
    config = run_file(folder)
    return load_problems(config.data.train, config.data)


def test_it_goes_on_where_it_was(tmp_path: Path) -> None:
    for name, number in (("a", 3), ("b", 9)):
        rows = [{"problem": f"{name}{row}", "answer": "1"} for row in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, drawn = problems(tmp_path), []
    for _ in range(4):
        with Store(tmp_path / "buffer.sqlite", False, data, data.digest) as store:
            ledger = restored(run_file(tmp_path), store, data, ListeningClock())
            drawn += [data[lease.index]["problem"] for lease in ledger.ask(f"s{len(drawn)}#1", 0, 5, 0.0)]
            store.commit(Transaction(ledger.drain()))
    whole = restored(run_file(tmp_path), Store(None), data, ListeningClock())
    assert drawn == [data[lease.index]["problem"] for lease in whole.ask("s#1", 0, 20, 0.0)]
    assert sum(name.startswith("b") for name in drawn) == 16
    (tmp_path / "b.jsonl").write_text('{"problem": "b", "answer": "2"}\n')
    other = problems(tmp_path)
    with pytest.raises(StoreError, match="undo the change of the problems"):
        Store(tmp_path / "buffer.sqlite", False, other, other.digest)
