"""The checker of histories: a clean history passes, and each broken promise is found."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.system.nemesis.checker import Promise, check
from tests.system.nemesis.history import (
    INITIAL,
    Acknowledged,
    Ended,
    Event,
    Generated,
    History,
    Loaded,
    Reader,
    Restored,
    Trained,
    following,
)

BOUND, SAMPLES = 2, 2
GROUPS = {item: [f"{item}a", f"{item}b"] for item in range(10)}


def batch(version: int) -> list[tuple[int, list[str]]]:
    """Two groups for each version."""
    return [(item, GROUPS[item]) for item in (2 * version, 2 * version + 1)]


POLICIES = [INITIAL]
for number in range(4):
    POLICIES.append(following(POLICIES[-1], batch(number)))


def made(item: int, oldest: int = 0, lease: int = 1) -> list[Event]:
    """A group is generated and acknowledged."""
    given = Generated(0, "rollout-0#1", item, lease, oldest, oldest, GROUPS[item])
    return [given, Acknowledged(0, "rollout-0#1", item, lease, True)]


def trained(version: int) -> list[Event]:
    """A batch is trained, and its policy loaded."""
    policy = POLICIES[version + 1]
    return [Trained(0, "learner#1", version, batch(version), policy), Loaded(0, "rollout-0#1", version + 1, policy)]


def clean() -> list[Event]:
    """Four batches, the third of which is trained twice: a learner is killed and rewinds."""
    events: list[Event] = [Restored(0, "learner#1", 0, INITIAL), Loaded(0, "rollout-0#1", 0, INITIAL)]
    for item in range(8):
        events += made(item, oldest=item // 4)
    events += [*trained(0), *trained(1), *trained(2), Restored(0, "learner#2", 2, POLICIES[2]), *trained(2)]
    events += [*trained(3), Ended(0, "nemesis#1", [(8, "zero variance")], [(0, 0), (7, 3)], [(9, "leased")])]
    return timed(events)


def timed(events: Sequence[Event]) -> list[Event]:
    return [replace(event, at=float(at)) for at, event in enumerate(events)]


def where(events: Sequence[Event], kind: type[Event], **fields: object) -> int:
    """Position of the last event of this kind with these fields."""
    matching = [
        at
        for at, event in enumerate(events)
        if isinstance(event, kind) and all(getattr(event, name) == value for name, value in fields.items())
    ]
    return matching[-1]


def changed(kind: type[Event], found: dict[str, object], **changes: object) -> Callable[[list[Event]], list[Event]]:
    """The history with another event in place of the last one of `kind` with the fields `found`."""

    def change(events: list[Event]) -> list[Event]:
        at = where(events, kind, **found)
        return [*events[:at], replace(events[at], **changes), *events[at + 1 :]]  # type: ignore[arg-type]

    return change


def without(kind: type[Event], **found: object) -> Callable[[list[Event]], list[Event]]:
    def leave_out(events: list[Event]) -> list[Event]:
        at = where(events, kind, **found)
        return [*events[:at], *events[at + 1 :]]

    return leave_out


def added(*more: Event) -> Callable[[list[Event]], list[Event]]:
    """The history with events before its end."""
    return lambda events: [*events[:-1], *more, events[-1]]


def retrained(groups: list[tuple[int, list[str]]], version: int) -> Callable[[list[Event]], list[Event]]:
    """The last training of `version` has other groups, and all that follows fits."""
    policy = following(POLICIES[version], groups)

    def change(events: list[Event]) -> list[Event]:
        events = changed(Trained, {"version": version}, groups=groups, policy=policy)(events)
        return changed(Loaded, {"version": version + 1}, policy=policy)(events)

    return change


OTHER = "f" * 64
WRONG: dict[str, tuple[Promise, str, Callable[[list[Event]], list[Event]]]] = {
    "an acknowledged group that nobody trains": (
        "once",
        "item 9 was acknowledged, and is lost: it is leased",
        lambda events: [*events[:-1], Acknowledged(99.0, "rollout-0#1", 9, 1, True), events[-1]],
    ),
    "an acknowledged group of which the ledger knows nothing": (
        "once",
        "item 10 was acknowledged, and is lost: it is unknown to the ledger",
        added(Acknowledged(99.0, "rollout-0#1", 10, 1, True)),
    ),
    "a group that was acknowledged, forgotten and made again": (
        "once",
        "acknowledged under lease 1, and again under lease 5",
        added(Acknowledged(99.0, "rollout-0#1", 7, 5, True)),
    ),
    "a group in two batches": ("once", "was trained in batch 0 too", retrained([(0, GROUPS[0]), batch(3)[1]], 3)),
    "a rewound batch that is another one": (
        "once",
        "batch 2 was trained on items [4, 5], and again on [4]",
        retrained([batch(2)[0]], 2),
    ),
    "a drop without a reason": (
        "once",
        "item 8 was dropped without a reason",
        changed(Ended, {}, dropped=[(8, "")]),
    ),
    "a trained group that is dropped": (
        "once",
        "item 7 was trained, and dropped: late",
        changed(Ended, {}, dropped=[(7, "late")], trained=[]),
    ),
    "a ledger with another batch": (
        "once",
        "trained in batch 3, the ledger has it in batch 2",
        changed(Ended, {}, trained=[(7, 2)]),
    ),
    "a ledger with a batch that nobody trained": (
        "once",
        "item 99 was trained in batch None",
        changed(Ended, {}, trained=[(99, 9)]),
    ),
    "a token that is too old": (
        "age",
        "is of version 0: age 3, the bound is 2",
        changed(Generated, {"item": 7}, oldest=0),
    ),
    "a dispatch that is too old": (
        "age",
        "is of version 0: age 3, the bound is 2",
        changed(Generated, {"item": 7}, dispatched=0),
    ),
    "a sample that no server made": (
        "bytes",
        "item 7, trained in batch 3, has bytes that no server generated for it",
        changed(Generated, {"item": 7}, samples=["7a", "7x"]),
    ),
    "samples in another order": (
        "bytes",
        "has bytes that no server generated",
        changed(Generated, {"item": 7}, samples=["7b", "7a"]),
    ),
    "a group that no server made": ("bytes", "item 7, trained in batch 3,", without(Generated, item=7)),
    "a part of a group": (
        "bytes",
        "has 1 of 2 samples",
        lambda events: retrained([batch(3)[0], (7, ["7a"])], 3)(
            changed(Generated, {"item": 7}, samples=["7a"])(events)
        ),
    ),
    "a policy that is not trained on the batch": (
        "bytes",
        "version 4 is not version 3 trained on batch 3",
        lambda events: changed(Loaded, {"version": 4}, policy=OTHER)(
            changed(Trained, {"version": 3}, policy=OTHER)(events)
        ),
    ),
    "a damaged checkpoint": (
        "bytes",
        "restored version 2 with another policy than was trained",
        changed(Restored, {"version": 2}, policy=OTHER),
    ),
    "damaged weights": (
        "bytes",
        "loaded weights as version 4 that are not the learner's",
        changed(Loaded, {"version": 4}, policy=OTHER),
    ),
    "a version that is left out": (
        "versions",
        "batch 3 was trained where batch 2 was due",
        without(Trained, version=2),
    ),
    "a version that is trained twice": (
        "versions",
        "batch 2 was trained where batch 3 was due",
        without(Restored, version=2),
    ),
    "a checkpoint of the future": (
        "versions",
        "restored version 9, and 3 was the newest",
        changed(Restored, {"version": 2}, version=9),
    ),
    "a version that nobody trained": (
        "versions",
        "loaded version 7777, which nobody trained",
        added(Loaded(99.0, "rollout-0#1", 7777, OTHER)),
    ),
    "an older version": (
        "versions",
        "loaded version 1 after version 2",
        added(*(Loaded(99.0, "rollout-0#1", version, POLICIES[version]) for version in (3, 2, 1))),
    ),
}


def test_a_clean_history_passes() -> None:
    assert check(clean(), BOUND, SAMPLES) == []


@pytest.mark.parametrize(("promise", "text", "change"), WRONG.values(), ids=WRONG)
def test_a_broken_promise_is_found(promise: Promise, text: str, change: Callable[[list[Event]], list[Event]]) -> None:
    found = check(change(clean()), BOUND, SAMPLES)
    assert any(each.promise == promise and text in each.text for each in found), found


def test_a_server_may_still_load_what_a_killed_learner_sent() -> None:
    events = clean()
    at = where(events, Restored, version=2)
    late = events.pop(where(events[:at], Loaded, version=3))
    events.insert(at, late)
    assert check(events, BOUND, SAMPLES) == []


def test_groups_that_are_open_at_the_end_are_not_lost() -> None:
    events = [*clean()[:-1], *timed(made(9)[1:]), Ended(99.0, "nemesis#1", [], [], [(9, "stored")])]
    assert check([event for event in events if not isinstance(event, Generated) or event.item < 8], 2, 2) == []


def test_a_rewound_batch_may_lack_a_group_only_if_it_is_in_quarantine() -> None:
    left = [batch(3)[0]]
    again = Trained(0, "learner#3", 3, left, following(POLICIES[3], left))
    events = [*clean()[:-1], Restored(0, "learner#3", 3, POLICIES[3]), again]
    kept = Ended(0, "nemesis#1", [(8, "zero variance")], [(0, 0)], [(7, "quarantined"), (9, "leased")])
    assert check(timed([*events, kept]), BOUND, SAMPLES) == []
    lost = replace(kept, open=[(7, "stored"), (9, "leased")])
    (found,) = check(timed([*events, lost]), BOUND, SAMPLES)
    assert "item 7 is not in quarantine" in str(found)


def test_a_history_is_read_as_it_was_written_by_several_processes(tmp_path: Path) -> None:
    one, other, reader = History(tmp_path, "learner"), History(tmp_path, "rollout-0"), Reader(tmp_path)
    one.add(Restored, version=0, policy=INITIAL)
    other.add(Loaded, version=0, policy=INITIAL)
    assert [type(event) for event in reader.refresh()] == [Restored, Loaded]
    one.add(Trained, version=0, groups=batch(0), policy=POLICIES[1])
    assert [type(event) for event in reader.refresh()] == [Restored, Loaded, Trained]
    assert check(reader.refresh(), BOUND, SAMPLES)[0].promise == "bytes", "nobody generated its groups"
    assert all(event.at > 0 and "#" in event.who for event in reader.events)


def test_a_line_that_is_still_being_written_is_read_later(tmp_path: Path) -> None:
    reader, file = Reader(tmp_path), tmp_path / "learner#1.jsonl"
    line = '{"kind": "Loaded", "at": 1.0, "who": "a#1", "version": 0, "policy": "0"}\n'
    file.write_text(line + line[:20])
    assert len(reader.refresh()) == 1
    file.write_text(line + line)
    assert len(reader.refresh()) == 2 == len(reader.refresh())
