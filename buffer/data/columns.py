"""Which columns a row must have, their other names, and values in types of MessagePack."""

from collections.abc import Iterable, Mapping, Sequence
from datetime import date, datetime, time
from decimal import Decimal
from math import isnan
from typing import Any

from buffer.data.servable import is_deep, unservable
from configs.load import ConfigError

ACCEPTED = {
    "TinyZero/verl": ("prompt", "reward_model"),
    "EasyR1": ("problem", "answer"),
    "a mixture": ("prompt", "answer"),
    "the other": ("problem", "reward_model"),
}
PROMPT_ONLY = {"a prompt": ("prompt",), "a problem": ("problem",)}
"""Accepted where the reward needs no ground truth."""
DEMONSTRATIONS = {
    "a chat": ("messages",),
    "a prompt and its answer": ("prompt", "answer"),
    "a problem and its answer": ("problem", "answer"),
}
"""Accepted in supervised fine-tuning."""


class ProblemsError(ConfigError):
    """A source that cannot be trained on; the text names key, file and remedy."""

    def __init__(self, reason: str) -> None:
        super().__init__([reason])


class ColumnRules:
    """`renamed`: as `data.columns`. `demonstrations`: rows are answers to learn from."""

    def __init__(self, renamed: Mapping[str, str], truth: bool = True, demonstrations: bool = False) -> None:
        self.renamed, self.truth, self.demonstrations = dict(renamed), truth, demonstrations
        self._given = {given: ours for ours, given in self.renamed.items()}

    def ours(self, name: str) -> str | None:
        """None for a column whose name another one takes, and for `reward_model` beside a named `answer`."""
        if name == "reward_model" and "answer" in self.renamed and name not in self.renamed:
            return self._given.get(name)
        return self._given.get(name, None if name in self.renamed else name)

    def row(self, given: Mapping[str, Any], where: str) -> dict[str, Any]:
        if not self.renamed:
            return dict(given)
        self.names(given, where)
        return {ours: value for name, value in given.items() if (ours := self.ours(name)) is not None}

    def names(self, given: Iterable[str], where: str) -> list[str]:
        """Raises ProblemsError."""
        there = list(given)
        for wanted, name in self.renamed.items():
            if name not in there:
                has = f"it has {', '.join(there) or 'none'}"
                raise ProblemsError(f"{where}: has no column {name}, which data.columns takes for {wanted}; {has}")
        if twice := sorted({name for name in there if there.count(name) > 1}):
            raise ProblemsError(f"{where}: has the column {twice[0]} more than once; rename one of them")
        return [ours for name in there if (ours := self.ours(name)) is not None]

    def required(self, names: Sequence[str], where: str) -> tuple[str, ...]:
        """Raises ProblemsError."""
        if self.demonstrations:
            return _demonstrated(names, where)
        accepted = ACCEPTED if self.truth else ACCEPTED | PROMPT_ONLY
        for needed in accepted.values():
            if set(needed) <= set(names):
                return needed if self.truth else needed[:1]
        if not self.truth:
            problem = f"needs the column prompt or problem; it has {', '.join(names) or 'none'}"
            raise ProblemsError(f"{where}: {problem}; name it in data.columns, as {{problem: question}}")
        known = " or ".join(f"{', '.join(ACCEPTED[who])} ({who})" for who in ("TinyZero/verl", "EasyR1"))
        problem = f"needs the columns {known}; it has {', '.join(names) or 'none'}"
        raise ProblemsError(f"{where}: {problem}; say in data.columns what they are called")

    def checked(self, row: dict[str, Any], where: str) -> None:
        """Raise ProblemsError."""
        needed = self.required(list(row), where)
        for name in needed:
            if is_missing(row[name]):
                raise ProblemsError(f"{where}: {name} is empty; fill it, or leave the row out")
        model = row.get("reward_model")
        if "reward_model" in needed and not (isinstance(model, dict) and not is_missing(model.get("ground_truth"))):
            raise ProblemsError(f"{where}: reward_model has no ground_truth; fill it, or leave the row out")
        require_servable(row, where)


def is_missing(value: Any) -> bool:
    """pandas marks an empty cell by NaN."""
    return value is None or (isinstance(value, float) and isnan(value))


def _demonstrated(names: Sequence[str], where: str) -> tuple[str, ...]:
    for needed in DEMONSTRATIONS.values():
        if set(needed) <= set(names):
            return needed
    known = "messages, or prompt and answer, or problem and answer"
    problem = f"supervised fine-tuning needs the columns {known}; it has {', '.join(names) or 'none'}"
    raise ProblemsError(f"{where}: {problem}; say in data.columns what they are called")


def require_servable(row: dict[str, Any], where: str) -> None:
    """Raises ProblemsError. The row need not be `plain` yet."""
    reason = unservable(row)
    if reason and not is_deep(row):
        reason = unservable(plain(row))  # whole numbers beyond 64 bits become text
    if reason:
        raise ProblemsError(f"{where}: {reason}; correct it, or leave the row out")


def plain(value: Any) -> Any:
    if isinstance(value, str):  # most are
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    large = isinstance(value, int) and not -(2**63) <= value < 2**64
    return str(value) if large or isinstance(value, Decimal) else value
