"""Segments hold what was appended; the cache holds the latest groups, within a bound, and never an earlier group of an
item."""

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from buffer.store import segments
from buffer.store.segments import BUFFERS, Segments
from buffer.wire.batches import GroupCache


def group(size: int) -> list[bytes]:
    return [bytes(size), bytes(size)]


def test_the_oldest_make_room() -> None:
    cache = GroupCache(100)
    for item in range(5):
        cache.add(item, group(15))
    assert [cache.groups.get(item) is not None for item in range(5)] == [False, False, True, True, True]
    assert cache.bytes == 90
    cache.add(9, group(60))
    assert cache.groups.get(9) is None and cache.bytes == 0, "one that does not fit is not kept, and all made room"


def test_a_later_group_of_an_item_takes_the_place_of_the_earlier() -> None:
    cache = GroupCache(100)
    cache.add(1, group(10))
    cache.add(1, group(20))
    assert cache.groups.get(1) == group(20) and cache.bytes == 40


def test_what_is_released_is_forgotten() -> None:
    cache = GroupCache(100)
    for item in range(3):
        cache.add(item, group(10))
    cache.forget([0, 2, 7])
    assert [cache.groups.get(item) is not None for item in range(3)] == [False, True, False] and cache.bytes == 20
    cache.forget([0])
    assert cache.bytes == 20


@pytest.mark.parametrize("most", [1, 700, 10**9])
def test_what_one_call_of_the_system_leaves_over_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    pwritev, pwrite = os.pwritev, os.pwrite

    def short(descriptor: int, buffers: Sequence[bytes], position: int) -> int:
        return pwritev(descriptor, [b"".join(buffers)[:most]], position)

    monkeypatch.setattr(segments.os, "pwritev", short)
    monkeypatch.setattr(segments.os, "pwrite", lambda descriptor, data, at: pwrite(descriptor, data[:most], at))
    samples = [bytes([number % 256]) * 3 for number in range(2 * BUFFERS + 1)]
    store = Segments(tmp_path / "samples", 1, 0, fsync=False)
    try:
        with store.appended({7: samples, 8: [b"next"]}) as places:
            pass
        assert store.read(places[7], [3] * len(samples)) == samples
        assert store.read(places[8], [4]) == [b"next"]
    finally:
        store.close()
