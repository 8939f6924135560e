"""Countdown's reward: does the last `<answer>` use each given number once and equal the target? Pure Python, no `eval`.

Called in a reward worker with the names verl and TinyZero use; `ground_truth` is `{"target": 24, "numbers": [4,
6]}`.
"""

import re
from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
TOKEN = re.compile(r"\s*(?:(\d+)|([-+*/()×÷]))")
SPELLED = {"×": "*", "÷": "/"}
LONGEST = 200
"""Characters of an expression: more is not arithmetic any more."""
LARGEST = 10**30
"""Bound of each intermediate numerator and denominator, so that no answer costs time."""


@dataclass
class Arithmetic:
    """A parsed expression. Example: `evaluate("(6-4)*3")` -> `Arithmetic(Fraction(6), [6, 4, 3])`."""

    value: Fraction
    numbers: list[int] = field(default_factory=list)


def compute_score(
    solution_str: str, ground_truth: dict[str, Any], format_score: float = 0.1, score: float = 1.0
) -> dict[str, float]:
    """`score` for a right answer, `format_score` for arithmetic inside `<answer>` that is not right, else 0."""
    answers = ANSWER.findall(solution_str)
    try:
        arithmetic = evaluate(answers[-1].partition("=")[0]) if answers else None
    except ZeroDivisionError:
        return {"score": format_score, "solved": 0.0, "formed": 1.0}
    except ValueError:
        arithmetic = None
    if arithmetic is None:
        return {"score": 0.0, "solved": 0.0, "formed": 0.0}
    given = Counter(int(number) for number in ground_truth["numbers"])
    solved = Counter(arithmetic.numbers) == given and arithmetic.value == int(ground_truth["target"])
    return {"score": score if solved else format_score, "solved": float(solved), "formed": 1.0}


def evaluate(text: str) -> Arithmetic:
    """Exact value of + - * / and parentheses over whole numbers, and the numbers used, in order.

    Raises ZeroDivisionError for a division by zero, ValueError for all that is not such arithmetic or too large.
    """
    parser = _Parser(_tokens(text))
    value = parser.sum()
    if parser.ahead is not None:
        raise ValueError(f"unexpected {parser.ahead!r}")
    return Arithmetic(value, parser.numbers)


def _tokens(text: str) -> list[str]:
    text = text.strip()
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters; at most {LONGEST} are read")
    tokens, place = [], 0
    while place < len(text):
        match = TOKEN.match(text, place)
        if match is None:
            raise ValueError(f"unexpected {text[place]!r}")
        tokens.append(match[1] or SPELLED.get(match[2], match[2]))
        place = match.end()
    return tokens


class _Parser:
    """Recursive descent; its depth is bounded by LONGEST."""

    def __init__(self, tokens: list[str]) -> None:
        self.tokens = tokens[::-1]
        self.numbers: list[int] = []

    @property
    def ahead(self) -> str | None:
        return self.tokens[-1] if self.tokens else None

    def sum(self) -> Fraction:
        value = self.product()
        while self.ahead in ("+", "-"):
            value = _bounded(value + self.product() if self.tokens.pop() == "+" else value - self.product())
        return value

    def product(self) -> Fraction:
        value = self.factor()
        while self.ahead in ("*", "/"):
            value = _bounded(value * self.factor() if self.tokens.pop() == "*" else value / self.factor())
        return value

    def factor(self) -> Fraction:
        if not self.tokens:
            raise ValueError("it ends too early")
        token = self.tokens.pop()
        if token == "-":
            return -self.factor()
        if token == "(":
            value = self.sum()
            if self.ahead != ")":
                raise ValueError("a parenthesis stays open")
            self.tokens.pop()
            return value
        if not token.isdigit():
            raise ValueError(f"unexpected {token!r}")
        self.numbers.append(int(token))
        return _bounded(Fraction(int(token)))


def _bounded(value: Fraction) -> Fraction:
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("too large a number")
    return value
