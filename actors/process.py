"""A process of a run as `actors` describes it: its command, when to restart it, and the events in its life.

Plain data that waits for nothing. `supervise/launch.py` makes a `Process` for each role, its keeper reports `Event`s,
and the supervisor and the display consume them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from configs.plain_text import concealed

Role = Literal["buffer", "learner", "rollout", "reward", "teacher"]
EventKind = Literal["line", "started", "failed", "ended", "refused", "gave_up"]
FINAL: tuple[EventKind, ...] = ("ended", "refused", "gave_up")
"""After an event of these kinds the process is not started again."""
PROGRESS: dict[Role, str] = {
    "buffer": "stored a group",
    "learner": "trained a new version",
    "rollout": "delivered a group",
    "reward": "scored an answer",
    "teacher": "scored a group",
}
"""What counts as progress of a process: its code calls `configs.entrypoint.made_progress` there."""
SERVERS: tuple[Role, ...] = ("rollout", "reward", "teacher")
"""Roles with several processes: the run goes on as long as one of them is kept."""
JUDGES: tuple[Role, ...] = ("reward", "teacher")
"""Roles of vLLM's API servers, which `python -m rollout ROLE` runs and rollout servers ask."""


@dataclass(frozen=True)
class Restarts:
    """When to start a failed process again: at once if it made progress since its start (PROGRESS), else after
    `first_s`, doubled each time up to `most_s`.

    The keeper gives up after `failures` failures in a row without progress, however long each one took.
    """

    first_s: float = 1.0
    most_s: float = 60.0
    failures: int = 6


@dataclass(frozen=True)
class Process:
    """One process of a run as a plain command.

    Example: `Process("rollout-0", "rollout", (python, "-m", "rollout", file, "--name", "rollout-0"), log, gpus=2)`.
    """

    name: str
    role: Role
    argv: tuple[str, ...]
    log: Path
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    gpus: int = 0
    nodes: int = 1
    """Nodes that a learner's ranks are spread over, evenly: each runs the command and has `gpus / nodes` GPUs."""
    drain_s: float = 30.0
    """Timeout between SIGTERM and SIGKILL when the process is drained."""
    restarts: Restarts = Restarts()
    concealed: Mapping[str, str] = field(default_factory=concealed, repr=False)
    """Credentials of the run, and what stands in their place in the process's log (`configs.plain_text.conceal`)."""
    pool: str = ""
    """The teacher that a teacher server serves, by the `data_source` of its rows. Only servers of one pool can replace
    each other."""


@dataclass(frozen=True)
class Event:
    """What happened to a process; `number` grows from event to event of a keeper. `code`: exit code of the process.

    Example: `Event(17, "line", "version 3 ...")`, `Event(18, "failed", "exit code 1 after 3 s; again in 2 s", 1)`.
    """

    number: int
    kind: EventKind
    text: str
    code: int | None = None
