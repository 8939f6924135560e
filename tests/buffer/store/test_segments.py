"""What is cached: the latest groups, within a bound, and never an earlier group of an item."""

from buffer.store.segments import GroupCache


def group(size: int) -> list[bytes]:
    return [bytes(size), bytes(size)]


def test_the_oldest_make_room() -> None:
    cache = GroupCache(100)
    for item in range(5):
        cache.add(item, group(15))
    assert [cache.get(item) is not None for item in range(5)] == [False, False, True, True, True]
    assert cache.bytes == 90
    cache.add(9, group(60))
    assert cache.get(9) is None and cache.bytes == 0, "one that does not fit is not kept, and all made room for it"


def test_a_later_group_of_an_item_takes_the_place_of_the_earlier() -> None:
    cache = GroupCache(100)
    cache.add(1, group(10))
    cache.add(1, group(20))
    assert cache.get(1) == group(20) and cache.bytes == 40


def test_what_is_released_is_forgotten() -> None:
    cache = GroupCache(100)
    for item in range(3):
        cache.add(item, group(10))
    cache.release([0, 2, 7])
    assert [cache.get(item) is not None for item in range(3)] == [False, True, False] and cache.bytes == 20
    cache.forget(0)
    assert cache.bytes == 20
