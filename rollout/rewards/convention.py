"""How reward functions are called, and what they may return (docs/rewards.md).

Parameters show the convention: verl's and TinyZero's (`solution_str`) or EasyR1's (`reward_input`), once per answer or,
in the plural, once per group. A built-in reward with settings is a `Section`, made once from `reward.kwargs`.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, TypedDict

from pydantic import ValidationError

from configs.schema import Section
from configs.user_file import is_async, is_of_kind
from rollout.errors import RewardError, TruthError


class Turn(TypedDict):
    """A stretch of an answer. Example: `{"text": "7 apples", "sampled": False}`, from a tool."""

    text: str
    sampled: bool


@dataclass(frozen=True)
class Answer:
    """What a reward function is given."""

    text: str
    num_tokens: int
    row: dict[str, Any]
    turns: list[Turn] | None = None
    """None: all of it was sampled."""
    raw: str | None = None
    """The text with special tokens."""
    prompt: str | None = None

    def verl(self) -> dict[str, Any]:
        return {
            "data_source": self.row.get("data_source", ""),
            "solution_str": self.text,
            "ground_truth": self.truth(),
            "extra_info": self.row.get("extra_info") or {},
            TURNS: self.all_turns(),
            "row": self.row,
            "raw_str": self.text if self.raw is None else self.raw,
            "prompt_str": self.prompt or "",
        }

    def easyr1(self) -> dict[str, Any]:
        known = {"response": self.text, "response_length": self.num_tokens, "ground_truth": self.truth()}
        return known | {TURNS: self.all_turns()}

    def all_turns(self) -> list[Turn]:
        return self.turns or [{"text": self.text, "sampled": True}]

    def shown_truth(self) -> str:
        truth = None if self._lacks_truth() else self.truth()
        return "none" if truth is None else repr(truth)

    def _lacks_truth(self) -> bool:
        model = self.row.get("reward_model")
        known = isinstance(model, Mapping) and "ground_truth" in model
        return "reward_model" in self.row and not known and "answer" not in self.row

    def truth(self) -> Any:
        """`reward_model.ground_truth` of verl's rows, `answer` of EasyR1's, whose `reward_model` may be anything.

        Raises TruthError.
        """
        model = self.row.get("reward_model")
        if self._lacks_truth():
            raise TruthError(f"the row's reward_model is {model!r:.80}, without a ground_truth")
        return (
            model["ground_truth"] if isinstance(model, Mapping) and "ground_truth" in model else self.row.get("answer")
        )


@dataclass(frozen=True)
class Score:
    """A reward and metrics. Example: `Score(1.0, {"format": 1.0})`."""

    reward: float
    metrics: dict[str, float] = field(default_factory=dict)


TURNS = "turns"
ASKED = {"raw": {"raw_str", "raw_strs"}, "prompt": {"prompt_str", "prompt_strs"}}
"""Parameters of a function for which each of these fields is sent."""
ROWS = {"row", "rows", *(name for names in ASKED.values() for name in names)}
MOST_METRICS, LONGEST_NAME = 256, 200
"""Each metric is a column of its batch and of `metrics.jsonl`."""
OURS = {TURNS, *ROWS}
"""Additions that a function gets if it names them, not if it takes `**kwargs`."""

CONVENTIONS: dict[str, Callable[[Sequence[Answer]], list[dict[str, Any]]]] = {
    "solution_str": lambda answers: [answer.verl() for answer in answers],
    "solution_strs": lambda answers: [
        {key if key == TURNS else f"{key}s": [answer.verl()[key] for answer in answers] for key in answers[0].verl()}
    ],
    "reward_input": lambda answers: [{"reward_input": answer.easyr1()} for answer in answers],
    "reward_inputs": lambda answers: [{"reward_inputs": [answer.easyr1() for answer in answers]}],
}


class Reward:
    """A reward function and its calling convention. Raises ValueError."""

    def __init__(self, name: str, function: Callable[..., Any], kwargs: dict[str, Any], key: str = "reward") -> None:
        self.name, self.function, self.kwargs, self.key = name, function, kwargs, key
        if isinstance(function, type) and issubclass(function, Section):
            self.function, self.kwargs = self._made(function), {}
        try:
            parameters = inspect.signature(self.function).parameters
        except (TypeError, ValueError) as error:
            raise ValueError(f"{self._place}: its parameters are unknown: {error}; call it in a `def`") from None
        self.takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
        self.accepted = {
            key for key, value in parameters.items() if value.kind in (value.POSITIONAL_OR_KEYWORD, value.KEYWORD_ONLY)
        }
        default = "solution_str" if self.takes_any else ""
        self.convention = next((key for key in CONVENTIONS if key in self.accepted), default)
        if not self.convention:
            known = ", ".join(CONVENTIONS)
            raise ValueError(f"{self._place}: takes none of {known}; name its parameters as verl or EasyR1 do")
        self.batch = self.convention in ("solution_strs", "reward_inputs")
        self.is_async = is_async(self.function)
        if is_of_kind(self.function, inspect.isasyncgenfunction) or (
            not self.batch and is_of_kind(self.function, inspect.isgeneratorfunction)
        ):
            raise ValueError(f"{self._place}: it yields; let it return a number, or a dict with score")
        self.asks = [field for field, names in ASKED.items() if names & self.accepted]
        self._check_arguments(parameters)

    def _check_arguments(self, parameters: Mapping[str, inspect.Parameter]) -> None:
        given, offered = set(self.kwargs), set(CONVENTIONS[self.convention]([Answer("", 0, {})])[0])
        needed = {key for key in self.accepted if parameters[key].default is inspect.Parameter.empty}
        if (unknown := sorted(given - self.accepted)) and not self.takes_any:
            problem = f"{self.name} takes no such argument; it takes {', '.join(parameters)}"
            raise ValueError(f"{self.key}.kwargs.{unknown[0]}: {problem}")
        if twice := sorted(given & offered - ROWS):  # older functions may have these as their own
            raise ValueError(f"{self.key}.kwargs.{twice[0]}: this argument comes from the data; remove the key")
        if absent := sorted(needed - offered - given):
            problem = f"nothing gives its argument {absent[0]}; add {self.key}.kwargs.{absent[0]}"
            raise ValueError(f"{self._place}: {problem}")

    @property
    def _place(self) -> str:
        return f"{self.key}{'.function' if self.key == 'reward' else ''} {self.name}"

    def _made(self, section: type[Section]) -> Callable[..., Any]:
        try:
            return section(**self.kwargs)  # type: ignore[return-value]  # all of them are called
        except ValidationError as error:
            found = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in found["loc"][:1])
        if found["type"] == "missing":
            raise ValueError(f"{self._place}: it needs {name}; add {self.key}.kwargs.{name}")
        if found["type"] == "extra_forbidden":
            takes = ", ".join(section.model_fields)
            raise ValueError(f"{self.key}.kwargs.{name}: {self.name} takes no such argument; it takes {takes}")
        place, problem = f"{self.key}.kwargs{'.' * bool(name)}{name}", found["msg"].removeprefix("Value error, ")
        given = "" if found["type"] == "value_error" else f"{found['input']!r:.80}: "
        raise ValueError(f"{place}: {given}{problem}")

    def calls(self, answers: Sequence[Answer]) -> list[dict[str, Any]]:
        calls = []
        for offered in CONVENTIONS[self.convention](answers):
            taken = self.accepted | (offered.keys() - OURS if self.takes_any else set())
            calls.append({key: value for key, value in offered.items() if key in taken} | deepcopy(self.kwargs))
        return calls

    def score(self, answers: Sequence[Answer]) -> list[Score]:
        """One score per answer. Raises RewardError, and whatever the function raises."""
        return self._read_all([self.function(**arguments) for arguments in self.calls(answers)], len(answers))

    async def score_async(self, answers: Sequence[Answer]) -> list[Score]:
        return self._read_all([await self.function(**arguments) for arguments in self.calls(answers)], len(answers))

    def _read_all(self, returned: Sequence[Any], num_answers: int) -> list[Score]:
        groups = [self._listed(each, num_answers) if self.batch else [each] for each in returned]
        results = [result for group in groups for result in group]
        if len(results) != num_answers:
            raise RewardError(f"{self.name} returned {len(results)} rewards for {num_answers} answers")
        return [self._read(result) for result in results]

    def _listed(self, returned: Any, num_answers: int) -> list[Any]:
        ordered = not isinstance(returned, str | bytes | Mapping | Set) and hasattr(returned, "__iter__")
        if ordered and getattr(returned, "shape", None) != ():  # an array of one number has no entries
            return list(returned)
        needed = f"a list with a number or dict for each of the {num_answers} answers is needed"
        raise RewardError(f"{self.name} returned {shown(returned)}; {needed}")

    def _read(self, result: Any) -> Score:
        parts = dict(result) if isinstance(result, dict) else {"score": result}
        key = "overall" if "overall" in parts else "score"
        numbers = {str(name): number for name, value in parts.items() if (number := finite(value)) is not None}
        if key not in numbers:
            needed = "a finite number, or a dict with one as score or overall is needed"
            if inspect.isawaitable(result):
                needed = "nothing awaits it; make the function that is named an `async def`"
                getattr(result, "close", bool)()
            raise RewardError(f"{self.name} returned {shown(result)}; {needed}")
        score = numbers.pop(key)
        if wrong := misnamed(numbers):
            raise RewardError(f"{self.name} returned {wrong}")
        return Score(score, numbers)


def misnamed(metrics: Mapping[Any, object]) -> str:
    if len(metrics) > MOST_METRICS:
        return f"{len(metrics):,} metrics, and an answer may have {MOST_METRICS}; leave some out"
    for name in metrics:
        if isinstance(name, str) and not 0 < len(name) <= LONGEST_NAME:
            return f"a metric named {name!r:.60}; a name has 1 to {LONGEST_NAME} characters"
    return ""


def shown(value: Any) -> str:
    """A user's class may raise in its repr."""
    try:
        return repr(value)[:200]
    except Exception as error:
        return f"a {type(value).__name__}, whose repr raises {type(error).__name__}"


def finite(value: Any) -> float | None:
    """Return `value` as a float, if it is a finite real number of any library."""
    is_complex = "complex" in str(getattr(value, "dtype", ""))
    if isinstance(value, str | bytes) or is_complex or not hasattr(value, "__float__"):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, ArithmeticError, RuntimeError):
        return None
    return number if math.isfinite(number) else None
