"""What a buffer checks of its ledger at a start, and how long that takes with a million rows.

`python -m benchmarks.restart [--items 1000000] [--samples 1000000]` makes a ledger in a temporary folder here, with so
many trained items and so many rows of samples (`buffer.keep: all`; with `checkpoints` a run has few), and prints one
table: reading every page (`PRAGMA quick_check`), the rules for rows, the CRC32C of all pages, and the whole opening,
against what the opening took before: everything but these. Writes `benchmarks/results/restart.json`. Takes a minute on
two cores; the file is in the page cache.
"""

import argparse
import json
import os
import platform
import sqlite3
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from buffer.store import sql, start_checks, witness
from buffer.store.opening import RULES, require_whole
from buffer.store.sqlite import Store

RESULTS = Path(__file__).parent / "results"
GROUP, SAMPLE_BYTES, SEGMENT = 8, 13_000, 1
NUMBERS = "WITH RECURSIVE numbers(n) AS (SELECT 0 UNION ALL SELECT n + 1 FROM numbers WHERE n + 1 < ?)"
ITEMS = f"""{NUMBERS} INSERT INTO items SELECT n, n % 50000, n / 50000, 'trained', '', n / 64, 'rollout-1#3f2a9c',
    n + 1, n / 8, 1, n / 32, {GROUP}, 9000, 8000, 1, 1.7e9, 1.7e9, 1.7e9, 0 FROM numbers"""
BATCHES = f"{NUMBERS} INSERT INTO batches SELECT n, 1, 1.7e9, 1.7e9 FROM numbers"
SAMPLES = f"""{NUMBERS} INSERT INTO samples SELECT n / {GROUP}, n % {GROUP}, 1100, 1000, 0.5, 0, {SEGMENT},
    n * {SAMPLE_BYTES}, {SAMPLE_BYTES}, n * 7919 FROM numbers"""


def make(path: Path, items: int, samples: int) -> None:
    """A ledger as a long run leaves it. The samples' bytes are a hole in one file."""
    Store(path).close()
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN")
        db.execute(ITEMS, [items])
        db.execute(BATCHES, [-(-items // 32)])
        db.execute(SAMPLES, [samples])
        db.execute(f"UPDATE items SET bytes = {GROUP * SAMPLE_BYTES} WHERE item < ?", [samples // GROUP])
        db.execute("INSERT INTO segments VALUES (?, ?, ?)", [SEGMENT, samples * SAMPLE_BYTES, samples * SAMPLE_BYTES])
        last = -(-items // 32)
        db.executemany("INSERT INTO meta VALUES (?, ?)", [("version", last), ("oldest", last - 4)])
        db.execute("COMMIT")
    file = path.with_name(f"{path.name}-samples") / f"{SEGMENT:06}.samples"
    file.touch()
    os.truncate(file, samples * SAMPLE_BYTES)
    witness.file_of(path).unlink()
    start_checks.begin_sums(path)


def seconds(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def rows(path: Path) -> list[dict[str, Any]]:
    """A row for each check, and one for the whole."""
    with closing(sqlite3.connect(path)) as db:
        quick = seconds(lambda: db.execute("PRAGMA quick_check(1)").fetchall())
        rules = seconds(lambda: [db.execute(f"{query} LIMIT 1").fetchall() for query in RULES.values()])
    crc = seconds(lambda: require_whole(path, None))
    whole = seconds(lambda: Store(path).close())
    found = {"quick_check of all pages": quick, "rules for rows": rules, "CRC32C of all pages": crc}
    before = max(whole - sum(found.values()), 0.0)
    found["opening the ledger, all checks"] = whole
    return [row(what, value, before if what.startswith("opening") else None) for what, value in found.items()]


def row(what: str, value: float, before: float | None) -> dict[str, Any]:
    against = "without the checks" if before is not None else ""
    print(f"{what:<36} {value:>8.2f} s  {against} {'' if before is None else f'{before:.2f}'}", flush=True)
    return {"what": what, "value": value, "unit": "s", "against": against, "against_value": before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=10**6)
    parser.add_argument("--samples", type=int, default=10**6)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = Path(folder, "buffer.sqlite")
        make(path, given.items, given.samples)
        size = path.stat().st_size
        print(f"{given.items:,} items, {given.samples:,} samples, {size / 2**20:.0f} MiB; {sql.SCHEMA=}", flush=True)
        found = rows(path)
    report = {
        "date": time.strftime("%Y-%m-%d"),
        "hardware": f"{os.cpu_count()} x {platform.machine()}; {os.getloadavg()[0]:.1f} processes were running",
        "versions": {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version},
        "command": f"python -m benchmarks.restart --items {given.items} --samples {given.samples}",
        "rows": found,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "restart.json").write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
