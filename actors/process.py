"""A process of a run as plain data: its command, when to restart it, and the events in its life."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from configs.plain_text import concealed

Role = Literal["buffer", "learner", "rollout", "reward", "teacher"]
EventKind = Literal["line", "started", "failed", "ended", "refused", "gave_up"]
FINAL: tuple[EventKind, ...] = ("ended", "refused", "gave_up")
"""A process is not started again after these."""
PROGRESS: dict[Role, str] = {
    "buffer": "stored a group",
    "learner": "trained a new version",
    "rollout": "delivered a group",
    "reward": "scored an answer",
    "teacher": "scored a group",
}
"""What a process reports with `configs.entrypoint.made_progress`."""
SERVERS: tuple[Role, ...] = ("rollout", "reward", "teacher")
"""The run needs one kept process of such a role."""
JUDGES: tuple[Role, ...] = ("reward", "teacher")
"""vLLM's API servers, which `python -m rollout ROLE` runs."""


@dataclass(frozen=True)
class Restarts:
    """Starts a failed process again at once after progress, else after `first_s`, doubled each time up to `most_s`;
    gives up after `failures` in a row without progress."""

    first_s: float = 1.0
    most_s: float = 60.0
    failures: int = 6


@dataclass(frozen=True)
class Process:
    """One process of a run as a plain command."""

    name: str
    role: Role
    argv: tuple[str, ...]
    log: Path
    cwd: str = ""
    env: Mapping[str, str] = field(default_factory=dict, repr=False)
    gpus: int = 0
    nodes: int = 1
    """Each node runs the learner's command and has `gpus / nodes` GPUs."""
    drain_s: float = 30.0
    """From SIGTERM to SIGKILL."""
    restarts: Restarts = Restarts()
    concealed: Mapping[str, str] = field(default_factory=concealed, repr=False)
    """Credentials, and what the log has in their place."""
    pool: str = ""
    """Only servers of one pool, such as a teacher's, replace each other."""


@dataclass(frozen=True)
class Event:
    """What happened to a process; `number` grows."""

    number: int
    kind: EventKind
    text: str
    code: int | None = None
