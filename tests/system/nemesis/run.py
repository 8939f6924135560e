"""A run under the nemesis: its folder, its run file, and the ports by which its processes reach each other.

Shared by all processes of a run. `outer` has what no fault touches: data, history, ports, clocks. The run's own folder,
which the launcher makes, is `config.run.path` below it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.load import load
from configs.schema import Config
from tests.harness.ports import free_port
from tests.system.nemesis.history import History

SERVERS = ("rollout-0", "rollout-1")
CLIENTS = ("learner", *SERVERS)
"""Processes that reach the buffer through a proxy."""
ROWS, GROUPS, SAMPLES, STALENESS = 5000, 4, 2, 2
ENDLESS = 10**6


@dataclass(frozen=True)
class NemesisRun:
    """The folder `outer`, and everything below it."""

    outer: Path

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.outer / "chaos"

    @property
    def first_file(self) -> Path:
        """The run file of the first launch; later ones go on with `file`, as a person does."""
        return self.outer / "run.yaml"

    @property
    def file(self) -> Path:
        return self.path / "config.yaml"

    @property
    def ledger(self) -> Path:
        return self.path / "buffer.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def calm(self) -> Path:
        """Never there: the engine of the chaos test generates without pauses once it is."""
        return self.outer / "calm"

    @property
    def ports(self) -> Path:
        """By process: the proxy's port towards the buffer, and a server's towards the learner."""
        return self.outer / "ports.json"

    @property
    def weights_wire(self) -> Path:
        """The learner writes the address of its weights wire there."""
        return self.outer / "weights-wire"

    def clock(self, name: str) -> Path:
        """Seconds by which the wall clock of process `name` is off; none while it does not exist."""
        return self.outer / f"clock-{name}"

    def log(self, name: str) -> Path:
        return self.path / "logs" / f"{name}.log"

    @property
    def terminal(self) -> Path:
        """What the launcher prints."""
        return self.outer / "terminal.log"

    def config(self) -> Config:
        """As the processes of the run read it."""
        return load([str(self.file)])

    def history(self, name: str) -> History:
        return History(self.histories, name)

    @property
    def histories(self) -> Path:
        return self.outer / "history"

    def port_of(self, name: str, wire: str) -> int:
        """The proxy's port by which process `name` reaches the `buffer` or the learner (`weights`)."""
        ports: dict[str, dict[str, int]] = json.loads(self.ports.read_text())
        return ports[name][wire]

    @classmethod
    def make(cls, outer: Path, seed: int) -> "NemesisRun":
        """Write data, ports and run file."""
        run = cls(outer)
        outer.mkdir(parents=True)
        rows = ({"problem": f"{number} +", "answer": str(number)} for number in range(ROWS))
        (outer / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        wires = {"learner": ["buffer"], **{name: ["buffer", "weights"] for name in SERVERS}}
        run.ports.write_text(json.dumps({name: {wire: free_port() for wire in some} for name, some in wires.items()}))
        run.first_file.write_text(json.dumps(sections(outer, seed)))  # JSON is YAML
        return run


def sections(outer: Path, seed: int) -> dict[str, Any]:
    """The run file: small groups, short leases and timeouts, a checkpoint every few versions."""
    return {
        "run": {"name": "chaos", "folder": str(outer), "seed": seed, "versions": ENDLESS},
        "model": {"path": "none"},
        "data": {"train": str(outer / "train.jsonl"), "max_prompt_tokens": 24},
        "reward": {"function": "task"},
        "sampling": {"max_tokens": 40},
        "batch": {"groups": GROUPS, "samples": SAMPLES, "max_staleness": STALENESS},
        "learner": {"checkpoint_every": 3, "device": "cpu"},
        "rollout": {
            "task": f"{Path(__file__).with_name('server.py')}:task",
            "servers": len(SERVERS),
            "sequences": 8 * SAMPLES,
            "attempts": 6,
            "heartbeat_s": 0.4,
            "drain_s": 2.0,
            "device": "cpu",
        },
        "weights": {"bucket_mib": 1, "timeout_s": 6.0, "probe_every": 5},
        "buffer": {"address": f"tcp://127.0.0.1:{free_port()}", "keep": "all"},
        "log": {"display": "plain"},
    }
