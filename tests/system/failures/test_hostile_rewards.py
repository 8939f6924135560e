"""The hostile rewards of the table, all in one launched run, beside good ones that are scored as if they were alone."""

import sqlite3
from contextlib import closing
from pathlib import Path
from textwrap import indent

import psutil
import pytest

from buffer.store.sqlite import reading
from buffer.wire.sample import Sample
from tests.system.failures.cases import CASES, GOOD, NOTHING, ONCE, Case, merged
from tests.system.failures.story import tell

HOSTILE = list({case.reward: case for case in CASES if case.code == 1 and case.reward != GOOD}.values())
"""Every reward of the table that no group survives."""
EVERY = 3
"""One row in so many is a hostile one's."""
LIMITS = {"reward": {"timeout_s": 15.0, "memory_gib": 0.5, "workers": 6}}
KEPT = {"buffer": {"keep": "all"}, "run": {"versions": 99}}


def among_good_ones() -> Case:
    """A run of all of them: row EVERY * n has the reward of HOSTILE[n], the others have the good one."""
    reward = ""
    for number, case in enumerate(HOSTILE):
        reward += f"if number == {EVERY * number}:\n{indent('    ' + case.reward, '    ')}\n    "
    settings = merged(merged(ONCE, LIMITS), KEPT)
    ends = NOTHING.replace("after version 0 of 4", "after version")
    return Case("hostile rewards", "", 3, ends, reward + GOOD, rows=EVERY * len(HOSTILE), settings=settings)


@pytest.mark.long
@pytest.mark.timeout(500)
def test_good_groups_are_scored_beside_hostile_ones_and_each_of_these_is_named(tmp_path: Path) -> None:
    assert len(HOSTILE) >= 20
    before = psutil.Process().children(recursive=True)
    story = tell(among_good_ones(), tmp_path)
    assert story.code == 3, story.text[-3000:]
    with closing(reading(tmp_path / "run" / "buffer.sqlite")) as db:
        db.row_factory = sqlite3.Row
        items = {item["row"]: item for item in db.execute("SELECT * FROM items")}
        query = "SELECT row, data_of(segment, position, s.bytes) FROM samples s JOIN items i ON s.item = i.item"
        made = [(row, Sample.unpack(data)) for row, data in db.execute(query)]
    assert sorted(items) == list(range(EVERY * len(HOSTILE)))
    good = [row for row in items if row % EVERY]
    for row, case in enumerate(HOSTILE):
        item = items[EVERY * row]
        assert (item["state"], item["samples"]) == ("dropped", 0), case.name
        assert case.says in item["reason"], (case.name, item["reason"])
    assert {items[row]["state"] for row in good} == {"trained"}
    assert sorted(row for row, _ in made) == sorted(good * 2)
    assert all(sample.reward == len(sample.answer) % 2 for _, sample in made)
    _, left = psutil.wait_procs({*psutil.Process().children(recursive=True)} - {*before}, 30)
    assert not left
