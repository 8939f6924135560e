"""Problems, completions and trajectories as plain values, as they travel between the server and a caged task."""

import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from rollout.cage import CagedError
from rollout.cage.caged_task import CagedTask

if TYPE_CHECKING:
    from rollout.tasks.trajectory import Generate, Problem, Trajectory


def load(name: str) -> Callable[[dict[str, Any], Callable[..., Awaitable[dict[str, Any]]]], Awaitable[dict[str, Any]]]:
    """In a worker: the task `name` (`rollout.task`), as a function of plain values. Raises ValueError in one line."""
    from rollout.tasks.trajectory import Completion, Problem, Trajectory
    from rollout.tasks import load_task

    task = load_task(name)

    async def play(problem: dict[str, Any], generate: Callable[..., Awaitable[dict[str, Any]]]) -> dict[str, Any]:
        async def sample(tokens: list[int], **options: Any) -> Completion:
            return Completion(**await generate(tokens, **options))

        trajectory = await task(Problem(**problem), sample)
        if not isinstance(trajectory, Trajectory):
            raise TypeError(f"it returned a {type(trajectory).__name__}; a Trajectory is needed")
        return {name: vars(trajectory)[name] for name in vars(Trajectory([]))}

    return play


async def play(caged: CagedTask, problem: "Problem", generate: "Generate") -> "Trajectory":
    """In the server: one episode, with the signature of a task but for `caged`. Raises CagedError."""

    async def sample(tokens: list[int], **options: Any) -> dict[str, Any]:
        return vars(await generate(tokens, **options))

    return trajectory_of(caged.function.name, await caged.run(vars(problem), sample))


def trajectory_of(name: str, values: Any) -> "Trajectory":
    """The trajectory with these values. Raises CagedError `unanswerable` if they are none."""
    from rollout.tasks.trajectory import Trajectory

    trajectory = Trajectory([])
    fault = _fault(values, set(vars(trajectory)))
    if fault:
        raise CagedError("unanswerable", f"{name} returned a Trajectory that is none: {fault}")
    vars(trajectory).update(values)
    return trajectory


def _fault(values: Any, names: set[str]) -> str:
    """What is wrong with the values of a trajectory; nothing: an empty text."""
    if not isinstance(values, dict) or not names <= set(values):
        return f"it needs the fields {', '.join(sorted(names))}"
    for name, kind in (("tokens", int), ("sampled", int), ("versions", int), ("logprobs", float)):
        column = values[name]
        if not isinstance(column, list) or not all(type(value) in (kind, int) for value in column):
            return f"{name} must be a list of {kind.__name__}"
        if len(column) != len(values["tokens"]):
            return f"{len(column)} {name} for {len(values['tokens'])} tokens"
    if not all(0 <= token < 2**31 for token in values["tokens"]):
        return "a token is not in [0, 2**31)"
    if not all(-(2**31) <= version < 2**31 for version in values["versions"]):
        return "a version is not in [-2**31, 2**31)"
    if not all(value in (0, 1) for value in values["sampled"]):
        return "sampled must be 0 or 1"
    if not all(map(math.isfinite, values["logprobs"])):
        return "a log-probability is not finite"
    if type(values["start"]) is not int or not 0 <= values["start"] <= len(values["tokens"]):
        return "start must be the length of the prompt"
    if values["finish"] not in ("stop", "length"):
        return "finish must be stop or length"
    metrics = values["metrics"]
    if not isinstance(metrics, dict) or not all(
        isinstance(name, str) and isinstance(value, int | float) and math.isfinite(value)
        for name, value in metrics.items()
    ):
        return "metrics must be finite numbers by name"
    return ""
