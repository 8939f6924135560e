"""The arithmetic of the ledger: the order of the problems, and whether the open items can be trained within the bound.

Pure functions. Open items are given as counts by dispatch version, `{d: number}`: sorted by d, the item at index i goes
into batch `version + i // groups` at the latest, where `version` is the next batch to be formed. The set is *feasible*
when every item meets `d + staleness >= version + i // groups`. Only the last item of each d can break that, so the cost
of each function is the number of distinct d, at most `staleness + 1`, however many items are open.
"""

import random
from array import array
from collections.abc import Iterable, Mapping


def order(problems: int, seed: int, epoch: int, shuffle: bool) -> "array[int]":
    """Rows of one epoch in the order of their dispatch: a permutation drawn from (seed, epoch).

    Only `Random.random()` is used, the one method whose sequence Python promises to keep for a seed.
    """
    rows = array("q", range(problems))
    if shuffle:
        draw = random.Random(f"{seed}/{epoch}").random
        for last in range(problems - 1, 0, -1):
            other = int(draw() * (last + 1))
            rows[last], rows[other] = rows[other], rows[last]
    return rows


def feasible(counts: Mapping[int, int], version: int, groups: int, staleness: int) -> bool:
    """Whether all open items can still be trained within the bound."""
    end = 0
    for dispatched in sorted(counts):
        end += counts[dispatched]
        if counts[dispatched] and dispatched + staleness < version + (end - 1) // groups:
            return False
    return True


def room(counts: Mapping[int, int], version: int, groups: int, staleness: int, dispatched: int) -> int:
    """How many more items of `dispatched` may be opened.

    Items that sort before the new ones keep their places and are not checked: the bound holds for them already, and a
    straggler that missed a tighter target must not close admission for all.
    """
    end = sum(number for d, number in counts.items() if d <= dispatched)
    free = (dispatched + staleness - version + 1) * groups - end
    for d in sorted(d for d in counts if d > dispatched):
        end += counts[d]
        free = min(free, (d + staleness - version + 1) * groups - end)
    return max(free, 0)


def left_behind(counts: Mapping[int, int], stored: Mapping[int, int], groups: int) -> dict[int, int]:
    """The open items that remain when a batch takes the `groups` stored ones with the smallest d."""
    left, wanted = dict(counts), groups
    for d in sorted(stored):
        taken = min(stored[d], wanted)
        left[d] -= taken
        wanted -= taken
    return left


def keepable(dispatched: Iterable[int], version: int, groups: int, staleness: int) -> list[bool]:
    """For each item in order: whether to keep it, so that the kept ones are feasible and as many as possible."""
    kept, verdicts = 0, []
    for d in dispatched:
        verdicts.append(d + staleness >= version + kept // groups)
        kept += verdicts[-1]
    return verdicts
