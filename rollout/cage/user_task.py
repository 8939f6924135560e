"""A user's task in workers: problems, completions and trajectories travel as plain values, images as files."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.data.images import ImageError, ImageFormat, decode
from configs.flow.sequences import max_sequences
from configs.schema import Config, DataConfig, ModelConfig
from rollout.cage import CagedError, CagedFunction
from rollout.cage.cage import Cage
from rollout.errors import ChatRefused, EpisodeError
from rollout.tasks.programs import command_name
from rollout.tasks.trajectory import CUT_SCORE, Completion, Generate, PlacedImage, Problem, Recorded, Trajectory, place

if TYPE_CHECKING:
    from rollout.chat.session import Sessions

SENT = ("row", "prompt", "max_tokens")
Plain = Callable[..., Awaitable[dict[str, Any]]]

OWN_PROCESSES, SAMPLE_PROCESSES, HOSTED_PROCESSES = 256, 1, 8
"""Processes of a worker itself, and per sample of a function or an environment."""
ATTRIBUTES = tuple(vars(Trajectory([])))


class UserTask:
    """The task that `rollout.task` names. A call is one episode.

    Entering raises ValueError, an episode without result CagedError.
    """

    def __init__(self, config: Config, sessions: "Sessions", log: Path | None = None) -> None:
        from rollout.tasks.agent import (
            UrlEpisodes,  # workers start faster without the HTTP server
        )

        self.sessions, self.function = sessions, caged_task(config, log)
        self._cage, self._entered = Cage(self.function, config.rollout.task_workers), AsyncExitStack()
        self._by_url = UrlEpisodes(config, self.function, self._cage, sessions)

    async def __aenter__(self) -> "UserTask":
        async with AsyncExitStack() as entered:
            await entered.enter_async_context(self._cage)
            if self._cage.about["convention"] == "base_url":
                await entered.enter_async_context(self._by_url.server)
            self._entered = entered.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._entered.aclose()

    async def __call__(self, problem: Problem, generate: Generate) -> Trajectory | Recorded:
        if self._cage.about["convention"] == "chat":
            return await self._converse(problem, generate)
        if self._cage.about["convention"] == "base_url":
            return await self._by_url(problem, generate)
        return await self._play(problem, generate)

    async def _play(self, problem: Problem, generate: Generate) -> Trajectory:
        shown = ShownImages(problem.format)

        async def sample(tokens: list[int], **options: Any) -> dict[str, Any]:
            if "images" in options:
                options["images"] = await shown.decoded(options["images"])
            return vars(await generate(tokens, **options))

        plain = {name: getattr(problem, name) for name in SENT}
        trajectory = trajectory_of(self.function.name, await self._cage.call(plain, generate=sample))
        trajectory.images = await shown.decoded(trajectory.images)
        return trajectory

    async def _converse(self, problem: Problem, generate: Generate) -> Recorded:
        session = self.sessions.open(generate, problem)

        async def chat(messages: Any, **options: Any) -> dict[str, Any]:
            return (await session.chat(messages, **options)).message

        try:
            result = await self._cage.call({"row": problem.row}, generate=chat)
        except ChatRefused as error:
            if not session.truncated:
                raise EpisodeError(f"{self.function.name}: chat: {error}", origin="ChatRefused") from None
            result = CUT_SCORE
        except CagedError as error:
            raise session.error or error from error.__cause__
        finally:
            session.close()
        return session.recorded(result)


def caged_task(config: Config, log: Path | None) -> CagedFunction:
    rollout, agent, environment = config.rollout, config.rollout.agent, config.rollout.environment
    memory = f"rollout.task_memory_gib ({rollout.task_memory_gib:g} GiB)"
    plain = config.model_dump(mode="json")
    each = HOSTED_PROCESSES if rollout.task == "environment" else SAMPLE_PROCESSES
    name, loader, arguments = {
        "agent": (command_name(agent.command), "programs:load_command", [agent.command, memory]),
        "environment": (
            f"environment {environment.id}",
            "environment:load_environment",
            [plain["rollout"]["environment"]],
        ),
    }.get(rollout.task, (rollout.task, "", [rollout.task, plain["model"], plain["data"], memory]))
    return CagedFunction(
        name=name,
        loader=f"rollout.tasks.{loader}" if loader else "rollout.cage.worker_task:load",
        arguments=arguments,
        timeout_s=rollout.task_timeout_s,
        memory_gib=rollout.task_memory_gib,
        prefix="rollout.task_",
        episodes=True,
        log=f"{log}-task" if log else None,
        max_processes=OWN_PROCESSES + each * max_sequences(config, cpu=False),
    )


class ShownImages:
    """Images of one episode, decoded once although every turn sends them all."""

    def __init__(self, form: ImageFormat | None) -> None:
        self.form = form
        self._known: dict[tuple[int, bytes], PlacedImage] = {}

    async def decoded(self, sent: Any) -> list[PlacedImage]:
        if not sent:
            return []
        if self.form is None:
            raise EpisodeError("its images cannot be shown: the model sees none")
        try:
            keys = [(int(start), bytes(data)) for start, data in sent]
            for key in keys:
                if key not in self._known:
                    picture = await asyncio.to_thread(decode, key[1], self.form)
                    self._known[key] = PlacedImage(key[0], picture, key[1])
            return [self._known[key] for key in keys]
        except (ImageError, TypeError, ValueError) as error:
            raise EpisodeError(f"its images cannot be shown: {type(error).__name__}: {error}") from None


def trajectory_of(name: str, values: Any) -> Trajectory:
    """Raises CagedError for values that are no trajectory."""
    if not isinstance(values, dict) or values.keys() != set(ATTRIBUTES):
        raise CagedError(f"{name}: its worker sent something else than a trajectory", "unanswerable")
    trajectory = Trajectory([])
    vars(trajectory).update(values)
    return trajectory


def load_episode(task: Callable[..., Awaitable[Any]], model: dict[str, Any], data: dict[str, Any]) -> Plain:
    """In a worker: wrap a task that makes a trajectory as a function of plain values."""

    @cache
    def tokenizer() -> Any:
        from rollout.episodes.prompts import load_tokenizer

        return load_tokenizer(Config.model_construct(model=ModelConfig(**model)))  # type: ignore[call-arg]

    @cache
    def form() -> ImageFormat | None:
        return ImageFormat.of(model["path"], DataConfig(**data), text_alone=ModelConfig(**model).text_alone)

    class ProblemInWorker(Problem):
        tokenizer = cached_property(lambda self: tokenizer())
        format = cached_property(lambda self: form())
        images = cached_property(lambda self: images_of(self))

    async def play(values: dict[str, Any], generate: Plain) -> dict[str, Any]:
        async def sample(
            tokens: list[int],
            max_tokens: int | None = None,
            stop: list[str] | None = None,
            images: Sequence[PlacedImage] = (),
        ) -> Completion:
            more = {"images": files(images)} if images else {}
            return Completion(**await generate(tokens, max_tokens=max_tokens, stop=stop, **more))

        problem = ProblemInWorker.__new__(ProblemInWorker)
        vars(problem).update(values)
        trajectory = await task(problem, sample)
        if not isinstance(trajectory, Trajectory):
            raise TypeError(f"{type(trajectory).__name__} returned instead of a Trajectory")
        return {name: getattr(trajectory, name) for name in ATTRIBUTES} | {"images": files(trajectory.images)}

    return play


def images_of(problem: Problem) -> list[PlacedImage]:
    form = problem.format
    return place(problem.prompt, [decode(data, form) for data in problem.row.get("images", ())]) if form else []


def files(images: Sequence[PlacedImage]) -> list[tuple[int, bytes]]:
    return [(image.start, image.data) for image in images]
