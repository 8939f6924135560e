"""What a rollout server needs besides its engine; finds errors in the run file before anything starts."""

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from buffer.data.images import ImageFormat, read_model_file
from buffer.wire.values import LARGEST
from configs.architecture import text_config
from configs.checks import check, max_episode_tokens, max_sample_tokens
from configs.load import ConfigError
from configs.schema import NO_REWARD, Config
from rollout.cage.user_task import UserTask
from rollout.chat.session import ChatLimits, Sessions, TextParser
from rollout.chat.template import ChatTemplate
from rollout.engine.arguments import problems, unknown_parsers
from rollout.engine.door.leant_on import moved
from rollout.engine.vllm_variables import unreadable_variables
from rollout.episodes.episode import Episodes
from rollout.episodes.parser_choice import check_reads_calls, settled_chat
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.episodes.sampler import Sampler
from rollout.rewards.no_reward import NoReward
from rollout.rewards.workers import RewardPool
from rollout.tasks import TASKS, Task
from rollout.teachers.scoring import Teachers
from rollout.teachers.vocabulary import other_vocabularies
from rollout.templates.parsers import AUTO

if TYPE_CHECKING:
    from rollout.engine.vllm_engine import Engine

FILES = (
    *("model.path", "data.chat_template", "data.format_prompt", "reward.function", "rollout.task"),
    *("rollout.agent.command", "rollout.environment.python"),
)


@dataclass(frozen=True)
class RolloutSetup:
    """Prompts, task and rewards of a run. Entering waits for the workers and raises ValueError."""

    prompts: Prompts
    task: Task
    rewards: RewardPool | NoReward | None
    sessions: Sessions | None = None
    teachers: Teachers | None = None
    """None for a run without a teacher, or an evaluation."""
    _entered: AsyncExitStack = field(default_factory=AsyncExitStack)

    @classmethod
    def load(cls, config: Config, name: str) -> "RolloutSetup":
        """Raises ValueError."""
        log, built_in = config.run.path / "logs" / name, TASKS.get(config.rollout.task)
        prompts = Prompts(load_tokenizer(config), config, ImageFormat.of_run(config))
        rewards = load_rewards(config, log)
        if built_in:
            return cls(prompts, built_in, rewards)
        sessions = open_sessions(config, prompts)
        return cls(prompts, UserTask(config, sessions, log), rewards, sessions)

    def with_teachers(self, config: Config) -> "RolloutSetup":
        """Raises ConfigError for another vocabulary, ValueError for a teacher that cannot be asked."""
        if not config.teacher.teachers:
            return self
        if lines := list(other_vocabularies(config, self.prompts.tokenizer)):
            raise ConfigError(lines)
        known = text_config(read_model_file(config.model.path, "config.json") or {}).get("vocab_size") or LARGEST
        return replace(self, teachers=Teachers(config.teacher, config.run.path / "keys", known))

    async def __aenter__(self) -> "RolloutSetup":
        async with AsyncExitStack() as entered:
            entered.callback(self.prompts.close)
            if self.sessions:
                entered.callback(self.sessions.template.close)
            if self.rewards:
                await entered.enter_async_context(self.rewards)
            if self.teachers:
                await entered.enter_async_context(self.teachers)
            if isinstance(self.task, UserTask):
                await entered.enter_async_context(self.task)
            self._entered.push_async_exit(entered.pop_all())
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._entered.aclose()

    def episodes(
        self, config: Config, engine: "Engine", temperature: float, samples: int, max_tokens: int | None = None
    ) -> Episodes:
        """Temperature 0 is greedy. `max_tokens` of an answer; None: as in training."""
        answer = max_tokens or config.sampling.max_tokens
        longest = max(max_sample_tokens(config), config.data.max_prompt_tokens + answer)
        images = config.data.max_images
        sampler = Sampler(engine, self.prompts, temperature, answer, longest, self.prompts.form, images)
        return Episodes(self.prompts, self.task, sampler, self.rewards, samples, config.rollout.sample_attempts)


def load_rewards(config: Config, log: Path) -> RewardPool | NoReward | None:
    """None: the task itself scores."""
    if config.reward.function == NO_REWARD:
        return NoReward()
    return None if config.reward.function == "task" else RewardPool(config.reward, log, config.run.path / "keys")


def open_sessions(config: Config, prompts: Prompts) -> Sessions:
    """Raises ValueError."""
    chat, parser = settled_chat(config, prompts), None
    template = ChatTemplate(prompts, chat.history == "keep", chat.template_kwargs)
    if chat.tool_parser or chat.reasoning_parser:
        from rollout.engine.chat_parser import VllmParser  # takes ten seconds

        parser = VllmParser(template.tokenizer, chat, config.model.path)
        if config.rollout.chat.tool_parser == AUTO and chat.tool_parser:
            check_reads_calls(parser, template, chat.tool_parser)
    limits = ChatLimits(
        context=max_sample_tokens(config),
        answer=config.sampling.max_tokens,
        turns=chat.max_turns,
        tokens=max_episode_tokens(config),
        timeout_s=chat.timeout_s,
    )
    return Sessions(template, parser or TextParser(template), limits)


def check_scored(config: Config) -> None:
    """Raise ConfigError for a run without a reward."""
    if config.reward.function == NO_REWARD:
        problem = f"reward.function: {NO_REWARD}, so nothing says which answers are right"
        raise ConfigError([f"{problem}; name a reward, e.g. --reward.function=math"])


def check_server(config: Config, files: Sequence[str] = ()) -> None:
    """Raises ConfigError."""
    sets = ["data.eval"] if config.eval.every else []
    further = [*problems(config.rollout.engine, config), *unknown_parsers(config), *unreadable_variables(), *moved()]
    check(config, files=(*FILES, *sets, *files), further=further)
