"""What drawing by difficulty saves: tokens to learn the fit problems among trivial and impossible ones.

`python -m benchmarks.difficulty` runs on one core by itself, in about a minute, and waits for nothing. The ledger is
the buffer's own, with its admission and its draws; model and learner are simulated. Like Countdown's, the data set has
problems that are always solved, fit ones and impossible ones. A fit problem of hardness b is solved with probability
sigmoid(skill - b). A sample of an impossible problem is as long as `sampling.max_tokens` lets it be, the others have
geometric lengths. Each version raises the skill by the mean of p (1 - p) of its batch, measured from the groups'
rewards: the size of a policy gradient whose baseline is the group's mean. A group without variance teaches nothing. A
group is sampled with the skill of the version under which it was dispatched, as old as the bound on age lets it be.

Prints one table; writes `benchmarks/results/difficulty.json`: sampled tokens until the fit problems are solved with a
mean probability of .7, uniformly drawn and by difficulty, three seeds, staleness 0 and 4.
"""

import argparse
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean

from benchmarks.weights.table import ResultRow, progress, write
from buffer.ledger.difficulty import Shares
from buffer.ledger.rules import Ledger
from buffer.ledger.types import SampleStats
from configs.schema import DifficultyConfig

GOAL = 0.7
"""Mean probability with which the fit problems are to be solved."""
TARGET = 0.6
"""Tokens by difficulty, as a share of those of uniform drawing, at most."""
MIXTURES = {"40/20/40": (0.4, 0.2, 0.4), "60/20/20": (0.6, 0.2, 0.2), "20/60/20": (0.2, 0.6, 0.2)}
"""Shares of trivial, fit and impossible problems. Most problems of the last mixture are fit: it has no target."""
LITTLE_TO_SAVE = "20/60/20"
SHORT, LONGEST = 120, 512
"""Mean tokens of a sample, and most; samples of impossible problems have the most."""
RATE, BEGINNING = 0.1, -2.0
"""Gain of skill for a batch whose groups all have p (1 - p) = 1/4; skill of the model that training begins with."""


@dataclass
class Simulation:
    """A model that learns from what a ledger draws."""

    seed: int
    staleness: int
    by_difficulty: bool
    mixture: tuple[float, float, float]
    problems: int = 2000
    groups: int = 32
    samples: int = 8
    skills: list[float] = field(default_factory=lambda: [BEGINNING])
    """By version."""
    tokens: int = 0
    lessons: dict[int, float] = field(default_factory=dict)
    """By item that is not trained yet: 4 p (1 - p) of its rewards."""

    def __post_init__(self) -> None:
        chance, given = random.Random(self.seed), DifficultyConfig()
        shares = Shares(given.shares, given.rest, given.return_after) if self.by_difficulty else None
        trivial, fit, _ = self.mixture
        kinds = [chance.random() for _ in range(self.problems)]
        self.hardness = [
            -math.inf if kind < trivial else chance.gauss(0.0, 1.0) if kind < trivial + fit else math.inf
            for kind in kinds
        ]
        self.chance = chance
        self.ledger = Ledger(self.problems, self.groups, self.staleness, seed=self.seed, difficulty=shares)

    def chance_of(self, row: int, skill: float) -> float:
        """Probability that a sample of the problem is solved."""
        return 1 / (1 + math.exp(min(700.0, self.hardness[row] - skill)))

    @property
    def solved(self) -> float:
        """Mean probability with which the newest policy solves the fit problems."""
        fit = [row for row, hardness in enumerate(self.hardness) if math.isfinite(hardness)]
        return mean(self.chance_of(row, self.skills[-1]) for row in fit)

    def group(self, row: int, version: int) -> tuple[SampleStats, ...]:
        """One group, sampled by the policy of `version`."""
        chance, probability = self.chance, self.chance_of(row, self.skills[version])
        made = []
        for _ in range(self.samples):
            length = LONGEST if self.hardness[row] == math.inf else min(LONGEST, 1 + int(chance.expovariate(1 / SHORT)))
            made.append(SampleStats(length, length, float(chance.random() < probability)))
        self.tokens += sum(sample.sampled for sample in made)
        return tuple(made)

    def step(self) -> None:
        """Generate what is admitted, and train a batch."""
        ledger, version = self.ledger, self.ledger.state.version
        for it in ledger.ask("server#1", version, 10**9, 0.0, version + 1):
            made = self.group(it.index, it.version)
            ledger.put("server#1", it.item, it.lease, made, 0.0)
            solved = mean(sample.reward for sample in made)
            self.lessons[it.item] = 4 * solved * (1 - solved)
        batch = ledger.batches.take(version)
        assert batch, "all groups that were admitted are made"
        ledger.batches.trained(version)
        ledger.batches.prune(version)
        self.skills.append(self.skills[-1] + RATE * mean(self.lessons.pop(item) for item in batch.items))

    def tokens_to_goal(self, most_versions: int = 3000) -> int:
        """Sampled tokens until `solved` is GOAL."""
        for _ in range(most_versions):
            if self.solved >= GOAL:
                return self.tokens
            self.step()
        raise RuntimeError(f"{self.solved:.2f} of the fit problems solved after {most_versions} versions")


def rows(seeds: int, problems: int) -> Iterator[ResultRow]:
    """A row for each mixture, staleness and seed, and for the worst of all."""
    worst = 0.0
    for name, mixture in MIXTURES.items():
        for staleness in (0, 4):
            for seed in range(seeds):
                progress(f"{name}, staleness {staleness}, seed {seed}")
                uniform, by_difficulty = (
                    Simulation(seed, staleness, chosen, mixture, problems) for chosen in (False, True)
                )
                tokens, peer = by_difficulty.tokens_to_goal(), uniform.tokens_to_goal()
                versions = len(by_difficulty.skills) - 1, len(uniform.skills) - 1
                case, what = f"{name} {staleness}", f"seed {seed}, staleness {staleness}"
                bound: tuple[str, float | None] = ("target", TARGET)
                yield ResultRow(f"{what}: sampled tokens to .7", tokens, "", "uniform drawing", peer, case)
                yield ResultRow(f"{what}: versions to .7", versions[0], "", "uniform drawing", versions[1], case)
                if name == LITTLE_TO_SAVE:
                    bound = ("", None)
                else:
                    worst = max(worst, tokens / peer)
                yield ResultRow(f"{what}: share of the tokens", tokens / peer, "", *bound, case)
    yield ResultRow("share of the tokens, worst of those with a target", worst, "", "target", TARGET)


def main() -> None:
    """Print the table and write it."""
    parser = argparse.ArgumentParser("python -m benchmarks.difficulty", allow_abbrev=False)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--problems", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results/difficulty.json")
    args = parser.parse_args()
    write(args.out, "difficulty", [row.line() for row in rows(args.seeds, args.problems)])


if __name__ == "__main__":
    main()
