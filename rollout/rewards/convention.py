"""How reward functions are called, and what they may return.

A function is called as verl and TinyZero call theirs (`data_source, solution_str, ground_truth, extra_info`, each
only if the function takes it) or as EasyR1 does (`reward_input`, a dict): once per answer or, with the plural names,
once per group. It returns a number, or a dict with `score` or `overall`; further numbers in the dict become metrics.
A function that names `turns` is told which text was sampled. docs/rewards.md is the page for users.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

from rollout.errors import RewardError


class Turn(TypedDict):
    """A stretch of an answer. Example: `{"text": "7 apples", "sampled": False}`: a tool or the environment said it."""

    text: str
    sampled: bool


@dataclass(frozen=True)
class Answer:
    """What a reward function is given: an answer's text, its length in tokens, and the row of the data set."""

    text: str
    num_tokens: int
    row: dict[str, Any]
    turns: list[Turn] | None = None
    """The same text in order, cut where what was sampled and what was given meet; None: all of it was sampled."""

    def verl(self) -> dict[str, Any]:
        """Keyword arguments as verl and TinyZero name them."""
        return {
            "data_source": self.row.get("data_source", ""),
            "solution_str": self.text,
            "ground_truth": self.truth(),
            "extra_info": self.row.get("extra_info") or {},
            TURNS: self.all_turns(),
        }

    def easyr1(self) -> dict[str, Any]:
        """EasyR1's `reward_input`."""
        known = {"response": self.text, "response_length": self.num_tokens, "ground_truth": self.truth()}
        return known | {TURNS: self.all_turns()}

    def all_turns(self) -> list[Turn]:
        """The turns of any answer, one at least."""
        return self.turns or [{"text": self.text, "sampled": True}]

    def shown_truth(self) -> str:
        """The ground truth in words, for people."""
        model = self.row.get("reward_model")
        truth = model.get("ground_truth") if isinstance(model, Mapping) else self.row.get("answer")
        return "none" if truth is None else repr(truth)

    def truth(self) -> Any:
        """`reward_model.ground_truth` of verl's rows, `answer` of EasyR1's."""
        return self.row["reward_model"]["ground_truth"] if "reward_model" in self.row else self.row.get("answer")


@dataclass(frozen=True)
class Score:
    """A reward and the other numbers its function returned. Example: `Score(1.0, {"format": 1.0})`."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


TURNS = "turns"
"""Our addition to verl's and EasyR1's words: a function gets it if it names it, not if it takes `**kwargs`."""

CONVENTIONS: dict[str, Callable[[Sequence[Answer]], list[dict[str, Any]]]] = {
    "solution_str": lambda answers: [answer.verl() for answer in answers],
    "solution_strs": lambda answers: [
        {key if key == TURNS else f"{key}s": [answer.verl()[key] for answer in answers] for key in answers[0].verl()}
    ],
    "reward_input": lambda answers: [{"reward_input": answer.easyr1()} for answer in answers],
    "reward_inputs": lambda answers: [{"reward_inputs": [answer.easyr1() for answer in answers]}],
}
"""From the parameter that tells the convention to the keyword arguments of each call that scores these answers."""


class Reward:
    """A reward function and its calling convention. Raises ValueError, in one line, for one that fits none."""

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any]) -> None:
        self.name, self.function, self.kwargs = name, function, kwargs
        parameters = inspect.signature(function).parameters
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.accepted = {
            key for key, value in parameters.items() if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY)
        }
        default = "solution_str" if self.takes_any else ""
        self.convention = next((key for key in CONVENTIONS if key in self.accepted), default)
        if not self.convention:
            known = ", ".join(CONVENTIONS)
            raise ValueError(f"reward.function {name}: takes none of {known}; name its parameters as verl or EasyR1 do")
        self.batch = self.convention in ("solution_strs", "reward_inputs")
        """Whether one call scores a whole group."""
        self._check_arguments(parameters)

    def _check_arguments(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        """`reward.kwargs` and the convention together must give the function what it needs, and nothing else."""
        given, offered = set(self.kwargs), set(CONVENTIONS[self.convention]([Answer("", 0, {})])[0])
        needed = {key for key in self.accepted if parameters[key].default is inspect.Parameter.empty}
        if (unknown := sorted(given - self.accepted)) and not self.takes_any:
            problem = f"{self.name} takes no such argument; it takes {', '.join(parameters)}"
            raise ValueError(f"reward.kwargs.{unknown[0]}: {problem}")
        if twice := sorted(given & offered):
            raise ValueError(f"reward.kwargs.{twice[0]}: this argument comes from the data; remove the key")
        if absent := sorted(needed - offered - given):
            problem = f"nothing gives its argument {absent[0]}; add reward.kwargs.{absent[0]}"
            raise ValueError(f"reward.function {self.name}: {problem}")

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer. Raises RewardError for a result that is no reward, and whatever the function raises."""
        results: list[Any] = []
        for offered in CONVENTIONS[self.convention](answers):
            taken = self.accepted | (offered.keys() - {TURNS} if self.takes_any else set())
            arguments = {key: value for key, value in offered.items() if key in taken}
            result = self.function(**arguments, **self.kwargs)
            results.extend(result if self.batch else [result])
        if len(results) != len(answers):
            raise RewardError(f"{self.name} returned {len(results)} rewards for {len(answers)} answers")
        return [self._read(result) for result in results]

    def _read(self, result: Any) -> Score:
        parts = dict(result) if isinstance(result, dict) else {"score": result}
        key = "overall" if "overall" in parts else "score"
        numbers = {name: number for name, value in parts.items() if (number := finite(value)) is not None}
        if key not in numbers:
            needed = "a finite number, or a dict with one as score or overall"
            raise RewardError(f"{self.name} returned {repr(result)[:200]}; {needed} is needed")
        return Score(numbers.pop(key), numbers)


def finite(value: Any) -> float | None:
    """`value` as a float, if it is a finite number of any library."""
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        return None
    number = float(value)
    return number if math.isfinite(number) else None
