"""A user's task in worker processes: problems, completions and trajectories travel as plain values.

`UserTask` is the server's end, built by `rollout/episodes/setup.py`; `load` and what it returns run in a worker.
"""

from collections.abc import Awaitable, Callable
from dataclasses import fields
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict

from configs.schema import Config, ModelConfig
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.tasks import load_task
from rollout.tasks.trajectory import Completion, Generate, Problem, Trajectory

Plain = Callable[..., Awaitable[dict[str, Any]]]
Finite = Annotated[float, Field(allow_inf_nan=False)]


@with_config(ConfigDict(strict=True, extra="allow"))
class TrajectoryValues(TypedDict):
    """The attributes of a trajectory that a worker may send."""

    tokens: list[Annotated[int, Field(ge=0, lt=2**31)]]
    start: Annotated[int, Field(ge=0)]
    sampled: list[Annotated[int, Field(ge=0, le=1)]]
    logprobs: list[Finite]
    versions: list[Annotated[int, Field(ge=-1, lt=2**31)]]
    finish: Literal["stop", "length"]
    metrics: dict[str, Finite]


VALUES = TypeAdapter(TrajectoryValues)


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
        try:
            await self._cage.__aenter__()
        except CagedError as error:
            raise ValueError(str(error)) from error
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
    """The trajectory with these values. Raises CagedError `unanswerable` if they are none."""
    try:
        checked = VALUES.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise CagedError(
            f"{name} returned a Trajectory that is none: {where}: {first['msg']}", "unanswerable"
        ) from None
    lengths = {column: len(values[column]) for column in ("tokens", "sampled", "logprobs", "versions")}
    if len(set(lengths.values())) > 1 or checked["start"] > len(checked["tokens"]):
        shown = ", ".join(f"{length} {column}" for column, length in lengths.items())
        reason = f"{name} returned a Trajectory that is none: {shown}, of them {checked['start']} of the prompt"
        raise CagedError(reason, "unanswerable")
    trajectory = Trajectory([])
    vars(trajectory).update(checked)
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
        async def sample(tokens: list[int], **options: Any) -> Completion:
            return Completion(**await generate(tokens, **options))

        problem = ProblemInWorker.__new__(ProblemInWorker)
        vars(problem).update(values)
        trajectory = await task(problem, sample)
        if not isinstance(trajectory, Trajectory):
            raise TypeError(f"{type(trajectory).__name__} returned instead of a Trajectory")
        return vars(trajectory)

    return play
