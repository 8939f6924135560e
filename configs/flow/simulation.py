"""Plays a run in milliseconds, the same each time: sequences at a time, age and speed, for assumed lengths and
speeds."""

import heapq
import random
from collections import Counter, deque
from dataclasses import dataclass
from math import ceil, inf, log

from configs.checks import max_sample_tokens
from configs.flow.sequences import MEAN_SHARE, max_sequences, places
from configs.schema import Config

LEARNER_SHARE = 1 / 2
"""Time of training a batch, as a share of that of full servers to generate it."""
STEP_COST = 126
"""A decode step costs as much as so many sequences: 2.9 ms and 23 us a sequence for a 1.5B model on H200."""
SIMULATED_SAMPLES, SIMULATED_VERSIONS, MOST_WARM = 256, 20, 24
"""Larger batches are scaled down. At most MOST_WARM versions precede the measured ones."""


@dataclass(frozen=True)
class Pace:
    """Speed in the unit of time of `simulate`."""

    step_cost: float
    """Cost of a decode step, in sequences."""
    learner: float


@dataclass(frozen=True)
class Flow:
    """A run in steady state."""

    running: float
    """Mean number of sequences that run on all servers."""
    age: float
    """In versions."""
    speed: float
    """Versions in a unit of time that all simulations share."""


def most_running(config: Config) -> int:
    """Sequences that one server can run at a time: its places, or vLLM's `max_num_seqs` if that is fewer."""
    return min(places(config), max_sequences(config, config.rollout.device == "cpu"))


def expected(config: Config, staleness: int, fewer: int | None = None, pace: Pace | None = None) -> Flow:
    batch, servers, most = config.batch, config.rollout.most_servers, most_running(config)
    scale = max(1.0, batch.groups * batch.samples / SIMULATED_SAMPLES)
    groups = max(1, round(batch.groups / scale))
    answer = max_sample_tokens(config) - config.data.max_prompt_tokens
    part = groups / batch.groups * servers
    learner = LEARNER_SHARE * groups * batch.samples * MEAN_SHARE * answer / part * (STEP_COST / most + 1)
    pace = pace or Pace(STEP_COST, learner)
    num_places = max(1, round(part * (fewer or most)))
    flow = simulate(groups, batch.samples, num_places, num_places / (fewer or most), staleness, answer, pace)
    return Flow(flow.running / num_places * servers * (fewer or most), flow.age, flow.speed)


def simulate(
    groups: int, samples: int, num_places: int, servers: float, staleness: int, longest: int, pace: Pace
) -> Flow:
    """The unit of time is what one sequence adds to a step. Admission is as in `buffer.ledger`."""
    draw, mean = random.Random(0), MEAN_SHARE * longest
    now, steps, version, trained, done = 0.0, 0, 0, inf, 0
    running: list[tuple[int, int]] = []  # (step of the end, group)
    waiting: deque[tuple[int, int]] = deque()  # (length, group)
    left: list[int] = []  # samples that a group waits for
    dates: list[int] = []  # version under which a group was dispatched
    opened: Counter[int] = Counter()  # open groups by date
    stored: list[tuple[int, int]] = []  # (date, group)
    ages: list[int] = []
    warm = min(2 * staleness + 4, MOST_WARM)
    area = since = 0.0
    while done < warm + SIMULATED_VERSIONS:
        while len(running) + len(waiting) < num_places and feasible(opened, done, version, groups, staleness):
            opened[done] += 1
            dates.append(done)
            left.append(samples)
            for _ in range(samples):
                length = 1 + int(log(1 - draw.random()) / log(1 - 1 / max(mean, 2)))
                waiting.append((min(longest, length), len(left) - 1))
        while waiting and len(running) < num_places:
            length, group = waiting.popleft()
            heapq.heappush(running, (steps + length, group))
        if trained == inf and len(stored) >= groups:
            stored.sort()
            batch, rest = stored[:groups], opened - Counter(date for date, _ in stored[:groups])
            if feasible(rest, None, version + 1, groups, staleness):
                stored, opened, trained = stored[groups:], rest, now + pace.learner
                ages += [version - date for date, _ in batch] if version >= warm else []
                version += 1
                continue  # admission may have opened
        step = pace.step_cost + len(running) / servers
        ahead = min(running[0][0] - steps if running else inf, ceil((trained - now) / step) if trained < inf else inf)
        if done >= warm:
            area += len(running) * ahead * step
        now, steps = (now + ahead * step, steps + int(ahead)) if running else (trained, steps)
        while running and running[0][0] <= steps:
            _, group = heapq.heappop(running)
            left[group] -= 1
            if not left[group]:
                stored.append((dates[group], group))
        if trained <= now:
            done, trained = done + 1, inf
            since = now if done == warm else since
    return Flow(area / (now - since), sum(ages) / max(1, len(ages)), SIMULATED_VERSIONS / (now - since))


def feasible(opened: Counter[int], another: int | None, version: int, groups: int, staleness: int) -> bool:
    """Whether no open group, with `another` of that date, will be too old."""
    before = 0
    for date in sorted({*opened, *([] if another is None else [another])}):
        before += opened[date] + (date == another)
        if before and date + staleness < version + (before - 1) // groups:
            return False
    return True
