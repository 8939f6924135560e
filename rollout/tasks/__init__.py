"""Tasks make one sample of a problem, from a problem and `generate`, a row and `chat`, or a row and the URL of a model.
Users' tasks import from here."""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from configs.user_file import is_of_kind, load_function
from rollout.errors import ChatRefused, EpisodeError

if TYPE_CHECKING:
    from rollout.tasks.trajectory import TASKS, Completion, Generate, Problem, Recorded, Task, Trajectory

__all__ = [
    "CONVENTIONS",
    "TASKS",
    "ChatRefused",
    "Completion",
    "EpisodeError",
    "Generate",
    "Problem",
    "Recorded",
    "Task",
    "Trajectory",
    "convention",
    "load_task",
]
CONVENTIONS = {
    "generate": ("problem", "generate"),
    "chat": ("row", "chat"),
    "base_url": ("row", "base_url", "api_key"),
}
"""By the parameter that shows the convention; the first is also passed by position."""


def __getattr__(name: str) -> Any:
    """Import `trajectory.py` on demand: without NumPy, Pillow and pydantic, workers start in a fifth of the time."""
    if name in __all__:
        return getattr(import_module("rollout.tasks.trajectory"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def load_task(name: str) -> Callable[..., Any]:
    """Find the function that `rollout.task` names. Raises ValueError."""
    built_in = {} if ":" in name else __getattr__("TASKS")
    function = built_in[name] if name in built_in else load_function("rollout.task", name)
    convention(name, function)
    return function


def convention(name: str, function: Callable[..., Any]) -> str:
    """Return the task's key of CONVENTIONS. Raises ValueError."""
    if is_of_kind(function, inspect.isgeneratorfunction) or is_of_kind(function, inspect.isasyncgenfunction):
        raise ValueError(f"rollout.task: {name} yields; let it return one Trajectory, or its score")
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise ValueError(f"rollout.task: {name}: its parameters are unknown: {error}; call it in a `def`") from None
    told = next((key for key in CONVENTIONS if key in signature.parameters), "generate")
    try:
        if told == "generate":
            signature.bind(None, None)
        else:
            signature.bind(**dict.fromkeys(CONVENTIONS[told]))
    except TypeError as error:
        words = f"({', '.join(CONVENTIONS[told])})"
        reason = f"rollout.task: {name} cannot be called with {words}: {error}; give it these parameters"
        raise ValueError(reason) from None
    return told
