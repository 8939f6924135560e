"""Runs of several seeds at the same time: the plan of each seed is cut into runs, which worker processes take in turn.

A run does not know the others: it has a folder, ports, a disk and clocks of its own.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

from tests.harness.ports import keep_to_share
from tests.system.nemesis.faults import KINDS, Kind
from tests.system.nemesis.nemesis import PER_RUN, Nemesis, Outcome

MOST_S = {"long-pause": 60.0, "flip": 30.0}
"""About how long a fault of a family lasts, a new run after a flipped bit included; any other takes OTHERS_S."""
OTHERS_S = 8.0
BROKEN = "broken off"
"""Where a finding stands that ended a worker's run, such as a run that never trains a version."""


@dataclass(frozen=True)
class Stretch:
    """Faults of one seed, until a run has to end. `kinds` are names, which another process can look up."""

    seed: int
    number: int
    kinds: Sequence[str]

    @property
    def lasts_s(self) -> float:
        """A rough estimate."""
        return sum(MOST_S.get(KINDS[name].family, OTHERS_S) for name in self.kinds)


def stretches(seed: int, kinds: Sequence[Kind], faults: int) -> Iterator[Stretch]:
    """The plan of a seed, cut where a run has to end: after a kind that is the last of its run, and after PER_RUN."""
    number, names = 0, list[str]()
    for kind in Nemesis(Path(), kinds, faults, seed).plan:
        names.append(kind.name)
        if kind.last or len(names) == PER_RUN:
            yield Stretch(seed, number, names)
            number, names = number + 1, []
    if names:
        yield Stretch(seed, number, names)


def begin(taken: "Synchronized[int]", workers: int) -> None:
    """In each worker, first of all: take a share of the ports."""
    with taken.get_lock():
        share, taken.value = taken.value, taken.value + 1
    keep_to_share(share, workers)


def strike(stretch: Stretch, folder: Path, deadline: float) -> list[Outcome]:
    """In a worker: all faults of a stretch, in as many runs as it takes. What ends the worker's run is a finding."""

    def say(line: str) -> None:
        print(f"seed {stretch.seed} part {stretch.number:<3}{line}", flush=True)

    nemesis = Nemesis(folder / f"seed-{stretch.seed}-{stretch.number}", [], 0, stretch.seed, say, deadline)
    nemesis.random.seed(f"nemesis/{stretch.seed}/{stretch.number}")
    nemesis.plan = [KINDS[name] for name in stretch.kinds]
    nemesis.with_disk = "disk" in stretch.kinds
    try:
        return nemesis.go()
    except Exception as error:
        return [*nemesis.outcomes, Outcome(BROKEN, findings=[f"{type(error).__name__}: {error}"])]


def strike_all(
    seeds: Sequence[int],
    kinds: Sequence[Kind],
    faults: int,
    folder: Path,
    workers: int,
    deadline: float,
    say: Callable[[str], None],
) -> dict[int, list[Outcome]]:
    """`faults` faults for each seed, by `workers` processes. Returns the outcomes by seed, as many as were in time."""
    work = [stretch for seed in seeds for stretch in stretches(seed, kinds, faults)]
    context = multiprocessing.get_context("spawn")
    outcomes: dict[int, list[Outcome]] = {seed: [] for seed in seeds}
    with ProcessPoolExecutor(workers, context, begin, (context.Value("i", 0), workers)) as pool:
        longest_first = sorted(work, key=lambda stretch: -stretch.lasts_s)
        running = {pool.submit(strike, stretch, folder, deadline): stretch for stretch in longest_first}
        for done, future in enumerate(as_completed(running), 1):
            outcomes[running[future].seed] += future.result()
            say(f"{done} of {len(work)} parts done at {time.strftime('%H:%M:%S')}")
    return outcomes
