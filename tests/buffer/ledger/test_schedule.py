"""The arithmetic of admission and batching against its definition, item by item; the order of the problems."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from buffer.ledger import schedule, training
from buffer.ledger.rules import Ledger
from buffer.ledger.schedule import STEP, Drawing, order, ordering
from buffer.ledger.state import EpochOrder

versions = st.integers(0, 6)
opened = st.lists(versions, max_size=20)
groups = st.integers(1, 4)
staleness = st.integers(0, 4)


def sound(open_: list[int], version: int, groups: int, staleness: int) -> bool:
    """The definition: with the items in order, d_i + staleness >= version + i // groups for all i."""
    return all(d + staleness >= version + i // groups for i, d in enumerate(sorted(open_)))


@given(opened, versions, groups, staleness)
def test_feasible_is_the_definition(open_: list[int], version: int, groups: int, staleness: int) -> None:
    assert training.feasible(Counter(open_), version, groups, staleness) == sound(open_, version, groups, staleness)


@given(opened, versions, groups, staleness, versions)
def test_room_is_the_largest_number_that_stays_feasible(
    open_: list[int], version: int, groups: int, staleness: int, dispatched: int
) -> None:
    room = training.room(Counter(open_), version, groups, staleness, dispatched)
    if sound(open_, version, groups, staleness):
        assert sound(open_ + [dispatched] * room, version, groups, staleness)
        assert not sound(open_ + [dispatched] * (room + 1), version, groups, staleness)


@given(opened, versions, groups, staleness)
def test_room_passes_over_items_that_miss_a_tighter_target(
    open_: list[int], version: int, groups: int, staleness: int
) -> None:
    """A server that is up to date may always fill the next batch, whatever stragglers there are."""
    before = [d for d in open_ if d <= version]
    room = training.room(Counter(before), version, groups, staleness, version)
    assert room == max(0, (staleness + 1) * groups - len(before))


@given(st.lists(st.tuples(versions, st.booleans()), max_size=20), groups)
def test_a_batch_leaves_all_but_the_first_stored_items(items: list[tuple[int, bool]], groups: int) -> None:
    stored = sorted(d for d, is_stored in items if is_stored)
    if len(stored) >= groups:
        left = training.left_behind(Counter(d for d, _ in items), Counter(stored), groups)
        assert Counter(d for d, _ in items) - Counter(stored[:groups]) == +Counter(left)


@given(opened, versions, groups, staleness)
def test_what_is_kept_is_sound_and_as_much_as_possible(
    open_: list[int], version: int, groups: int, staleness: int
) -> None:
    items = sorted(open_)
    verdicts = training.keepable(items, version, groups, staleness)
    kept = [d for d, keep in zip(items, verdicts, strict=True) if keep]
    assert sound(kept, version, groups, staleness)
    for index, keep in enumerate(verdicts):
        if not keep:
            assert not sound([*kept, items[index]], version, groups, staleness)


@given(st.integers(1, 50), st.integers(0, 2**31 - 1), st.integers(0, 5))
def test_an_epoch_is_a_permutation_of_its_own(problems: int, seed: int, epoch: int) -> None:
    order = schedule.order(problems, seed, epoch, shuffle=True)
    assert sorted(order) == list(range(problems))
    assert order == schedule.order(problems, seed, epoch, shuffle=True)
    assert list(schedule.order(problems, seed, epoch, shuffle=False)) == list(range(problems))


def test_the_order_is_the_same_on_every_python() -> None:
    """Written down from Python 3.11: a resumed run must not see other problems."""
    assert list(schedule.order(10, 0, 0, True)) == [7, 0, 1, 5, 4, 9, 2, 8, 6, 3]
    assert list(schedule.order(10, 0, 1, True)) == [1, 8, 6, 0, 9, 5, 2, 4, 3, 7]
    assert schedule.order(1000, 0, 0, True) != schedule.order(1000, 1, 0, True)


@given(st.integers(1, 3 * STEP), st.integers(0, 3), st.integers(0, 3), st.integers(0, 5))
def test_an_order_that_is_drawn_in_steps_is_the_order(problems, seed, epoch, steps):
    drawing = Drawing(ordering(problems, seed, epoch, True))
    for _ in range(steps):
        drawing.step()
    assert drawing.rows() == order(problems, seed, epoch, True)
    drawing.step()
    assert drawing.rows() == order(problems, seed, epoch, True)


def test_a_million_rows_take_many_steps():
    steps = sum(1 for _ in ordering(100_000, 0, 0, True))
    assert steps == 100_000 // STEP


def test_the_next_epoch_s_order_is_there_long_before_it_is_needed() -> None:
    ledger = Ledger(4 * STEP, 1, 10**6)
    order, state = ledger.order, ledger.state
    assert isinstance(order, EpochOrder)
    for _ in range(STEP // 4):
        assert order.draw(state) is not None
        state.next_item += 1
    assert order._following and order._following[1].drawn is not None
    state.next_item = 4 * STEP
    assert order.draw(state) == schedule.order(4 * STEP, 0, 1, True)[0]
