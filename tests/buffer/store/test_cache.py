"""What is kept at hand: the latest groups, within a bound, and never an earlier group of an item."""

from buffer.ledger.types import SampleStats
from buffer.store.cache import Recent

FACTS = SampleStats(4, 2, 1.0)


def group(size: int) -> list[tuple[bytes, SampleStats]]:
    return [(bytes(size), FACTS), (bytes(size), FACTS)]


def test_the_oldest_make_room() -> None:
    recent = Recent(100)
    for item in range(5):
        recent.add(item, group(15))
    assert [recent.get(item) is not None for item in range(5)] == [False, False, True, True, True]
    assert recent.bytes == 90
    recent.add(9, group(60))
    assert recent.get(9) is None and recent.bytes == 0, "one that does not fit is not kept, and all made room for it"


def test_a_later_group_of_an_item_takes_the_place_of_the_earlier() -> None:
    recent = Recent(100)
    recent.add(1, group(10))
    recent.add(1, group(20))
    assert recent.get(1) == group(20) and recent.bytes == 40


def test_what_is_not_kept_is_forgotten() -> None:
    recent = Recent(100)
    for item in range(3):
        recent.add(item, group(10))
    recent.keep({1, 7})
    assert [recent.get(item) is not None for item in range(3)] == [False, True, False] and recent.bytes == 20
    recent.forget(0)
    assert recent.bytes == 20
