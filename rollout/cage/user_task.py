"""A user's task in worker processes: problems, completions and trajectories travel as plain values.

`UserTask` is the server's end, built by `rollout/episodes/setup.py`; `load` and what it returns run in a worker.
"""

from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from configs.schema import Config, ModelConfig
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.tasks import load_task
from rollout.tasks.trajectory import Completion, Generate, Problem, Trajectory

Plain = Callable[..., Awaitable[dict[str, Any]]]

ATTRIBUTES = tuple(vars(Trajectory([])))
"""What travels of a trajectory. The server judges it, in `rollout/episodes/sampler.py`, like that of any other task."""


class UserTask:
    """The task that `rollout.task` names, as an async context manager around its workers. A call is one episode.

    Raises ValueError, in one line, on entering, if the task cannot be loaded; CagedError for an episode without result.
    """

    def __init__(self, config: Config, log: Path | None = None) -> None:
        rollout, model = config.rollout, config.model.model_dump(mode="json")
        self.function = CagedFunction(
            name=rollout.task,
            loader="rollout.cage.user_task:load",
            arguments=[rollout.task, model],
            timeout_s=rollout.task_timeout_s,
            memory_gib=rollout.task_memory_gib,
            prefix="rollout.task_",
            episodes=True,
            log=f"{log}-task" if log else None,
        )
        self._cage = Cage(self.function, rollout.task_workers)

    async def __aenter__(self) -> "UserTask":
        await self._cage.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._cage.close()

    async def __call__(self, problem: Problem, generate: Generate) -> Trajectory:
        """One episode. Raises CagedError, and what `generate` raises."""

        async def sample(tokens: list[int], **options: Any) -> dict[str, Any]:
            return vars(await generate(tokens, **options))

        plain = {field.name: getattr(problem, field.name) for field in fields(problem) if field.name != "tokenizer"}
        return trajectory_of(self.function.name, await self._cage.call(plain, generate=sample))


def trajectory_of(name: str, values: Any) -> Trajectory:
    """The trajectory with these values. Raises CagedError `unanswerable` if they are those of something else."""
    if not isinstance(values, dict) or values.keys() != set(ATTRIBUTES):
        raise CagedError(f"{name}: its worker sent something else than a trajectory", "unanswerable")
    trajectory = Trajectory([])
    vars(trajectory).update(values)
    return trajectory


def load(name: str, model: dict[str, Any]) -> Plain:
    """In a worker: the task `name`, as a function of plain values. Raises ValueError in one line."""
    task = load_task(name)

    @cache
    def tokenizer() -> Any:
        from rollout.episodes.prompts import load_tokenizer

        return load_tokenizer(Config.model_construct(model=ModelConfig(**model)))  # type: ignore[call-arg]

    class ProblemInWorker(Problem):
        """Loads the run's tokenizer when it is first asked for."""

        tokenizer = cached_property(lambda self: tokenizer())

    async def play(values: dict[str, Any], generate: Plain) -> dict[str, Any]:
        async def sample(tokens: list[int], max_tokens: int | None = None, stop: list[str] | None = None) -> Completion:
            return Completion(**await generate(tokens, max_tokens=max_tokens, stop=stop))

        problem = ProblemInWorker.__new__(ProblemInWorker)
        vars(problem).update(values)
        trajectory = await task(problem, sample)
        if not isinstance(trajectory, Trajectory):
            raise TypeError(f"{type(trajectory).__name__} returned instead of a Trajectory")
        return {attribute: getattr(trajectory, attribute) for attribute in ATTRIBUTES}

    return play
