"""Tasks: how one sample of a problem is made. A task gets a problem and `generate`, and returns a trajectory.

A user's task, `rollout.task: path/to/file.py:function`, imports what it needs from here:
`from rollout.tasks import EpisodeError, Generate, Problem, Trajectory`.
"""

from rollout.errors import EpisodeError
from rollout.rewards import load_function
from rollout.tasks.trajectory import Completion, Generate, Problem, Task, Trajectory, single_turn

__all__ = ["TASKS", "Completion", "EpisodeError", "Generate", "Problem", "Task", "Trajectory", "load_task"]
TASKS: dict[str, Task] = {"single_turn": single_turn}


def load_task(name: str) -> Task:
    """The task that `rollout.task` names. Raises ValueError, in one line, for a file that cannot be used."""
    return TASKS[name] if name in TASKS else load_function("rollout.task", name)
