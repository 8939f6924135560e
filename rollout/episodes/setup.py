"""What a server needs before its engine, and what can be wrong in a run file beyond its keys.

Loaded at start by `rollout/__main__.py` and `rollout/evaluate.py`, so that it is refused before anything was started.
"""

from dataclasses import dataclass

from configs.schema import Config
from rollout.episodes.episode import Task
from rollout.episodes.prompts import Prompts, load_tokenizer
from rollout.rewards.workers import RewardPool
from rollout.tasks import load_task

FILES = ("model.path", "data.format_prompt", "reward.function", "rollout.task")
"""Keys whose files a rollout server reads."""


@dataclass(frozen=True)
class Parts:
    """Prompts, task and rewards of a run. `of` raises ValueError, in one line, for what cannot be used."""

    prompts: Prompts
    task: Task
    rewards: RewardPool

    @classmethod
    def of(cls, config: Config) -> "Parts":
        """Tokenizer, templates, stops, task and reward function of the run."""
        return cls(Prompts(load_tokenizer(config), config), load_task(config.rollout.task), RewardPool(config.reward))
