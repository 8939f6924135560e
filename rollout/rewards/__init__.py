"""Reward functions: the named ones, users' own files, and the ways in which they are called.

A function is called as verl and TinyZero call theirs (`data_source, solution_str, ground_truth, extra_info`, each
only if the function takes it) or as EasyR1 does (`reward_input`, a dict), one answer or, with the plural names, a
group at a time. It returns a number, or a dict with `score` or `overall`; further numbers in the dict become
metrics. Loaded by the rollout server at start, to refuse what is wrong, and by its reward workers (`pool.py`);
imports neither torch nor vllm.
"""

import importlib.util
import inspect
import math as arithmetic
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from configs.schema import RewardConfig
from rollout.rewards import countdown, math

REWARDS: dict[str, Callable[..., Any]] = {"countdown": countdown.compute_score, "math": math.compute_score}


class RewardError(Exception):
    """An answer could not be scored; the text says why, in one line. Its group is failed, never scored 0."""


@dataclass(frozen=True)
class Answer:
    """What a reward function is told: an answer's text, its length in tokens, and the row of the data set."""

    text: str
    num_tokens: int
    row: dict[str, Any]

    def verl(self) -> dict[str, Any]:
        """Keyword arguments as verl and TinyZero name them."""
        return {
            "data_source": self.row.get("data_source", ""),
            "solution_str": self.text,
            "ground_truth": self.truth(),
            "extra_info": self.row.get("extra_info") or {},
        }

    def easyr1(self) -> dict[str, Any]:
        """EasyR1's `reward_input`."""
        return {"response": self.text, "response_length": self.num_tokens, "ground_truth": self.truth()}

    def truth(self) -> Any:
        """`reward_model.ground_truth` of verl's rows, `answer` of EasyR1's."""
        return self.row["reward_model"]["ground_truth"] if "reward_model" in self.row else self.row.get("answer")


@dataclass(frozen=True)
class Score:
    """A reward and the other numbers its function returned. Example: `Score(1.0, {"format": 1.0})`."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


def _verl(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [answer.verl() for answer in answers]


def _verl_batch(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    rows = [answer.verl() for answer in answers]
    plural = {"data_source": "data_sources", "solution_str": "solution_strs", "ground_truth": "ground_truths"}
    return [{plural.get(key, f"{key}s"): [row[key] for row in rows] for key in rows[0]}]


def _easyr1(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{"reward_input": answer.easyr1()} for answer in answers]


def _easyr1_batch(answers: Sequence[Answer]) -> list[dict[str, Any]]:
    return [{"reward_inputs": [answer.easyr1() for answer in answers]}]


CONVENTIONS = {
    "solution_str": _verl,
    "solution_strs": _verl_batch,
    "reward_input": _easyr1,
    "reward_inputs": _easyr1_batch,
}
"""By the parameter that gives a convention away: the keyword arguments of each call that scores these answers."""


class Reward:
    """A reward function and how to call it. Raises ValueError, in one line, for one that cannot be called so."""

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.name, self.function, self.kwargs = name, function, kwargs
        parameters = inspect.signature(function).parameters
        self.open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.accepted = {
            key for key, value in parameters.items() if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY)
        }
        self.convention = next(
            (key for key in CONVENTIONS if key in self.accepted), "solution_str" if self.open else ""
        )
        if not self.convention:
            known = ", ".join(CONVENTIONS)
            raise ValueError(f"reward.function {name}: takes none of {known}; name its parameters as verl or EasyR1 do")
        self.batch = self.convention in ("solution_strs", "reward_inputs")
        offered = set(CONVENTIONS[self.convention]([Answer("", 0, {})])[0])
        self._check(parameters, offered)

    def _check(self, parameters: Any, offered: set[str]) -> None:
        unknown = sorted(set(self.kwargs) - self.accepted) if not self.open else []
        if unknown:
            raise ValueError(
                f"reward.kwargs.{unknown[0]}: {self.name} takes no such argument; it takes {', '.join(parameters)}"
            )
        twice = sorted(set(self.kwargs) & offered)
        if twice:
            raise ValueError(f"reward.kwargs.{twice[0]}: this argument comes from the data; remove the key")
        lacking = [
            key
            for key in self.accepted - offered - set(self.kwargs)
            if parameters[key].default is inspect.Parameter.empty
        ]
        if lacking:
            raise ValueError(
                f"reward.function {self.name}: nothing gives its argument {lacking[0]}; add reward.kwargs.{lacking[0]}"
            )

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score for each answer. Raises RewardError for results that are none, and what the function raises."""
        results: list[Any] = []
        for offered in CONVENTIONS[self.convention](answers):
            given = offered if self.open else {key: value for key, value in offered.items() if key in self.accepted}
            result = self.function(**given, **self.kwargs)
            results.extend(result if self.batch else [result])
        if len(results) != len(answers):
            raise RewardError(f"{self.name} returned {len(results)} rewards for {len(answers)} answers")
        return [self._read(result) for result in results]

    def _read(self, result: Any) -> Score:
        parts = dict(result) if isinstance(result, dict) else {"score": result}
        key = "overall" if "overall" in parts else "score"
        numbers = {name: number for name, value in parts.items() if (number := _number(value)) is not None}
        if key not in numbers:
            needed = "a finite number, or a dict with one as score or overall"
            raise RewardError(f"{self.name} returned {repr(result)[:200]}; {needed} is needed")
        return Score(numbers.pop(key), numbers)


def _number(value: Any) -> float | None:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if arithmetic.isfinite(number) else None


def load_reward(config: RewardConfig) -> Reward:
    """The reward of the run. Raises ValueError, in one line, for a name, file, function or argument that is wrong."""
    if config.function in REWARDS:
        return Reward(config.function, REWARDS[config.function], config.kwargs)
    return Reward(config.function, load_function("reward.function", config.function, REWARDS), config.kwargs)


def load_function(key: str, name: str, known: dict[str, Any]) -> Callable[..., Any]:
    """The user's function `path/to/file.py:function`, the value of config key `key`. Raises ValueError in one line."""
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py"):
        raise ValueError(f"{key}: {name!r} is neither one of {', '.join(known)} nor path/to/file.py:function")
    if not Path(path).is_file():
        raise ValueError(f"{key}: {path}: no such file (paths are relative to the working directory)")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything; here it becomes one line that names it
        raise ValueError(f"{key}: {path} cannot be imported: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] | None = getattr(module, attribute, None)
    if function is None or not callable(function):
        raise ValueError(f"{key}: {path} has no function {attribute!r}")
    return function
