"""The runs of the chaos test: their config, and problems of which some fail, hang or have rewards without variance.

Shared by `chaos.py`, the processes it starts and the audit. A row's `answer` is KIND:NUMBER.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import load
from configs.schema import Config
from tests.harness.ports import free_port
from tests.harness.toy import ROOT

PERMANENT = {"long": "data.max_prompt_tokens"}
"""Kinds that fail for good, and a part of the reason: dropped at the first attempt."""
HOPELESS = {
    "dead": "the task gave up",
    "hang": "took longer",
    "crash": "ended its process",
    "wrong": "raised ValueError",
}
"""Kinds that fail each time, and a part of the reason; dropped after `rollout.attempts`."""
SAME = "same"
"""Kind whose rewards are all equal."""
FLAKY = "flaky"
"""Kind that fails half of the time."""
SERVERS = 3
AGENT = ROOT / "tests" / "system" / "chaos_agent.py"
ASKS = "?"
"""What an agent says between two answers of the model."""
LONGEST_PROMPT = 24


@dataclass(frozen=True)
class Variant:
    """Settings in which the runs differ; with `epochs` None, `run.versions` ends the run."""

    name: str
    groups: int
    samples: int
    staleness: int
    epochs: int | None
    skip_zero_variance: bool = False
    max_gib: float = 8.0
    agents: bool = False
    """Samples are episodes of several turns, of an agent by URL."""


AGENTS = Variant("agents", 4, 2, 2, epochs=1, agents=True)
VARIANTS = (
    Variant("filtered", 4, 3, 2, epochs=2, skip_zero_variance=True, max_gib=4e-5),
    Variant("synchronous", 6, 2, 0, epochs=1),
    Variant("versions", 5, 2, 4, epochs=None),
    AGENTS,
)


@dataclass(frozen=True)
class Run:
    """One run's folder and everything below it."""

    folder: Path

    @property
    def file(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def ledger(self) -> Path:
        return self.folder / "chaos" / "buffer.sqlite"

    @property
    def journal(self) -> Path:
        return self.folder / "journal.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def calm(self) -> Path:
        """Exists after the last kill: from then on the stand-ins work without pauses."""
        return self.folder / "calm"

    @property
    def hold(self) -> Path:
        """While it exists, the learner trains no batch."""
        return self.folder / "hold"

    @property
    def held(self) -> Path:
        """Made by the learner when it meets `hold`."""
        return self.folder / "held"

    def clock(self, name: str) -> Path:
        """Seconds by which the wall clock of process `name` is off; none while it does not exist."""
        return self.folder / f"clock-{name}"

    def gate(self, name: str) -> Path:
        """While it exists, process `name` of `scaled.py` does not start."""
        return self.folder / f"gate-{name}"

    def log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def config(self) -> Config:
        return load([str(self.file)])

    @classmethod
    def make(cls, folder: Path, variant: Variant, groups: int, seed: int) -> "Run":
        """Write problems and config for a run of about `groups` groups."""
        it = cls(folder)
        folder.mkdir(parents=True)
        it.checkpoints.mkdir()
        rows = groups // (variant.epochs or 2)
        data = folder / "train.jsonl"
        data.write_text("".join(json.dumps(row(number)) + "\n" for number in range(rows)))
        it.file.write_text(json.dumps(sections(folder, variant, groups, seed)))  # JSON is YAML
        return it


def sections(folder: Path, variant: Variant, groups: int, seed: int) -> dict[str, Any]:
    """The run file."""
    agents = {"task": f"{AGENT}:solve", "task_timeout_s": 60.0, "max_sample_tokens": 200} if variant.agents else {}
    return {
        "run": {
            "name": "chaos",
            "folder": str(folder),
            "seed": seed,
            "versions": 10**6 if variant.epochs else groups // variant.groups,
        },
        "model": {"path": "none"},
        "data": {
            "train": str(folder / "train.jsonl"),
            "epochs": variant.epochs,
            "max_prompt_tokens": LONGEST_PROMPT,
        },
        "reward": {"function": str(ROOT / "tests" / "system" / "chaos_reward.py:score"), "timeout_s": 1.0},
        "sampling": {"max_tokens": 40},
        "batch": {
            "groups": variant.groups,
            "samples": variant.samples,
            "max_staleness": variant.staleness,
            "skip_zero_variance": variant.skip_zero_variance,
        },
        "learner": {"checkpoint_every": 5},
        "rollout": {"sequences": 4 * variant.samples, "attempts": 4, "heartbeat_s": 0.4} | agents,
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}", "keep": "all", "max_gib": variant.max_gib},
    }


def turns_of(number: int, config: Config) -> int:
    """How many answers of the model a sample of this row has."""
    return 2 + number % 2 if config.rollout.task.startswith(str(AGENT)) else 1


def row(number: int) -> dict[str, str]:
    kind = kind_of(number)
    problem = f"{kind} {number} " + "and so on " * (10 * (kind == "long"))
    return {"problem": problem, "answer": f"{kind}:{number}"}


def kind_of(number: int) -> str:
    """The kind of this row: a few of each kind in every 100 rows, one of each among the first 60."""
    rare = {7: "hang", 18: "crash", 27: "wrong", 38: "dead", 47: "long"}
    if number % 100 in rare and (number < 100 or number % 300 < 100):
        return rare[number % 100]
    if number % 10 == 3:
        return SAME
    return FLAKY if number % 20 == 5 else "good"
