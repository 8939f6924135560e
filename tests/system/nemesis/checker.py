"""Judges a history: was each acknowledged group trained once, in time, and to the byte, by versions that go up by one?

Pure: `check` consumes events in order of time and returns what is wrong. A rewind undoes the versions from there on:
what counts is the last training of each version, and a batch that is trained again has to be the same.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from tests.system.nemesis.history import (
    INITIAL,
    Acknowledged,
    Ended,
    Event,
    Generated,
    Groups,
    Loaded,
    Restored,
    Trained,
    following,
)

Promise = Literal["once", "age", "bytes", "versions"]


@dataclass(frozen=True)
class Violation:
    """A broken promise. `once`: a group was lost, or trained twice. `age`: older than the bound. `bytes`: trained or
    loaded bytes are not those that were made. `versions`: they do not go up by one."""

    promise: Promise
    text: str
    at: float

    def __str__(self) -> str:
        return f"{self.promise}: {self.text}"


def check(history: Iterable[Event], bound: int, samples: int) -> list[Violation]:
    """What is wrong with a history. `bound`: batch.max_staleness; `samples`: of a group."""
    checker = Checker(bound, samples)
    for event in history:
        checker.take(event)
    return checker.violations


KEPT = ("stored", "batched", "quarantined")
"""States of an item at the end whose group is not lost."""


class Checker:
    """Takes one event after another."""

    def __init__(self, bound: int, samples: int) -> None:
        self.bound, self.samples, self.violations = bound, samples, list[Violation]()
        self.generated: dict[int, list[Generated]] = {}
        self.accepted: dict[int, int] = {}
        """The lease under which an item was acknowledged."""
        self.trained_in: dict[int, int] = {}
        """The version that has an item, rewound ones left out."""
        self.batches: dict[int, Groups] = {}
        """What each version was trained on last."""
        self.left_out: dict[int, str] = {}
        """Items that a batch lacked when it was trained again, which only a quarantine allows."""
        self.policies: dict[int, str] = {0: INITIAL}
        self.version = 0
        """The learner's: that of the next batch."""
        self.loaded: dict[str, int] = {}
        """The version of each server."""
        self.restores, self.went_back = 0, Counter[str]()
        """Starts of a learner; and how often each server has gone back, at most once for each start."""
        self._at = 0.0

    def take(self, event: Event) -> None:
        """Judge the next event."""
        self._at = event.at
        match event:
            case Generated():
                self.generated.setdefault(event.item, []).append(event)
            case Acknowledged():
                self._acknowledged(event)
            case Restored():
                self._restored(event)
            case Trained():
                self._trained(event)
            case Loaded():
                self._loaded(event)
            case Ended():
                self._ended(event)

    def _need(self, right: bool, promise: Promise, otherwise: str) -> None:
        if not right:
            self.violations.append(Violation(promise, otherwise, self._at))

    def _acknowledged(self, event: Acknowledged) -> None:
        if not event.accepted:
            return
        before = self.accepted.setdefault(event.item, event.lease)
        text = f"item {event.item} was acknowledged under lease {before}, and again under lease {event.lease}"
        self._need(before == event.lease, "once", f"{text}: the first group was forgotten")
        self.accepted[event.item] = event.lease

    def _restored(self, event: Restored) -> None:
        known = self.policies.get(event.version)
        text = f"{event.who} restored version {event.version}"
        self._need(event.version <= self.version, "versions", f"{text}, and {self.version} was the newest")
        if known is not None:
            self._need(event.policy == known, "bytes", f"{text} with another policy than was trained")
        self.restores += 1
        self._rewind(event.version)

    def _rewind(self, version: int) -> None:
        self.version = version
        self.trained_in = {item: batch for item, batch in self.trained_in.items() if batch < version}

    def _trained(self, event: Trained) -> None:
        version = event.version
        if version != self.version:
            self._need(False, "versions", f"batch {version} was trained where batch {self.version} was due")
            self._rewind(version)
        groups = [(item, digests) for item, digests in event.groups]
        before, self.batches[version] = self.batches.get(version, groups), groups
        names = [[item for item, _ in some] for some in (before, groups)]
        missing = {item for item in names[0] if item not in names[1]}
        text = f"batch {version} was trained on items {names[0]}, and again on {names[1]}"
        self._need([item for item in names[0] if item not in missing] == names[1], "once", text)
        self.left_out |= dict.fromkeys(missing, text)
        for item, digests in groups:
            self._group(version, item, digests)
        known = self.policies.get(version)
        right = known is None or following(known, groups) == event.policy
        self._need(right, "bytes", f"version {version + 1} is not version {version} trained on batch {version}")
        self.policies[version + 1] = event.policy
        self.version = version + 1

    def _group(self, version: int, item: int, digests: list[str]) -> None:
        """A group of batch `version`."""
        what = f"item {item}, trained in batch {version},"
        other = self.trained_in.setdefault(item, version)
        self._need(other == version, "once", f"{what} was trained in batch {other} too")
        self._need(len(digests) == self.samples, "bytes", f"{what} has {len(digests)} of {self.samples} samples")
        made = [each for each in self.generated.get(item, ()) if each.samples == digests]
        self._need(bool(made), "bytes", f"{what} has bytes that no server generated for it")
        if made:
            oldest = max(min(each.oldest, each.dispatched) for each in made)
            age = version - oldest
            self._need(age <= self.bound, "age", f"{what} is of version {oldest}: age {age}, the bound is {self.bound}")

    def _loaded(self, event: Loaded) -> None:
        """A server may still load what a learner that was killed has sent, after its successor has restored."""
        version, who = event.version, event.who
        known, last = self.policies.get(version), self.loaded.get(who, -1)
        self._need(known is not None, "versions", f"{who} loaded version {version}, which nobody trained")
        if known is not None:
            same = event.policy == known
            self._need(same, "bytes", f"{who} loaded weights as version {version} that are not the learner's")
        self.went_back[who] += version <= last
        back = version <= last and self.went_back[who] > self.restores
        self._need(not back, "versions", f"{who} loaded version {version} after version {last}")
        self.loaded[who] = version

    def _ended(self, event: Ended) -> None:
        dropped, trained, left = dict(event.dropped), dict(event.trained), dict(event.open)
        for item, reason in dropped.items():
            self._need(bool(reason), "once", f"item {item} was dropped without a reason")
            self._need(item not in self.trained_in, "once", f"item {item} was trained, and dropped: {reason}")
        for item, batch in trained.items():
            found = self.trained_in.get(item)
            text = f"item {item} was trained in batch {found}, the ledger has it in batch {batch}"
            self._need(found == batch, "once", text)
        for item, text in self.left_out.items():
            self._need(left.get(item) == "quarantined", "once", f"{text}: item {item} is not in quarantine")
        for item in self.accepted:
            kept = (
                item in self.trained_in or dropped.get(item) or left.get(item) in ("stored", "batched", "quarantined")
            )
            state = left.get(item, "unknown to the ledger")
            self._need(bool(kept), "once", f"item {item} was acknowledged, and is lost: it is {state} at the end")
