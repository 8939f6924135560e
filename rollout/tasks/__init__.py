"""Tasks: how one sample of a problem comes about. A task gets a problem and `generate`, and returns a trajectory."""

from rollout.episodes.episode import Task
from rollout.rewards import load_function
from rollout.tasks.single_turn import single_turn

TASKS: dict[str, Task] = {"single_turn": single_turn}


def load_task(name: str) -> Task:
    """The task `rollout.task` names; raises ValueError, in one line, for one that is not there."""
    return TASKS[name] if name in TASKS else load_function("rollout.task", name, TASKS)
