"""Reward functions by name or from a user's file. Imports neither torch nor vllm."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from buffer.keys import load_token
from configs.schema import RewardConfig
from configs.user_file import load_function
from rollout.rewards import countdown, math, reasoning
from rollout.rewards.answer_judge import LIMITS
from rollout.rewards.convention import Reward
from rollout.rewards.models.http_model import HttpModel
from rollout.rewards.models.judge import Judge
from rollout.rewards.models.reward_model import RewardModel
from rollout.rewards.text_match import ExactMatch, LengthPenalty, RegexFormat

REWARDS: dict[str, Callable[..., Any]] = {
    "countdown": countdown.compute_score,
    "math": math.compute_score,
    "reasoning_gym": reasoning.compute_score,
    "math_verify": math.compute_score,
    "exact_match": ExactMatch,
    "regex": RegexFormat,
    "length": LengthPenalty,
    "judge": Judge,
    "reward_model": RewardModel,
}

STARTS = {reasoning.compute_score: reasoning.start, math.compute_score: math.start}


def load_reward(config: RewardConfig, number: int = 0, keys: Path | None = None) -> Reward:
    """Return the run's reward function `number`. `keys`: folder of the run's keys. Raises ValueError."""
    part = config.parts[number]
    several = not isinstance(config.function, str)
    key, name = f"reward.function.{number}" if several else "reward", part.function
    function = REWARDS[name] if name in REWARDS else load_function(key if several else f"{key}.function", name)
    LIMITS.stay_below(config.timeout_s, config.memory_gib)
    if starts := STARTS.get(function):
        starts()
    own = {"url": config.urls, "model": config.model} if part.uses_servers else {}
    reward = Reward(name, function, own | part.kwargs, key)
    made: object = reward.function
    if isinstance(made, HttpModel):
        limit_s = made.timeout_s
        if limit_s and limit_s > config.timeout_s:
            problem = f"{limit_s:g} is more than reward.timeout_s {config.timeout_s:g}, which is of the whole call"
            raise ValueError(f"{key}.kwargs.timeout_s: {problem}; raise that")
        if part.uses_servers:
            made.wait_elsewhere()
            if keys:
                made.show(load_token(keys))
    return reward
