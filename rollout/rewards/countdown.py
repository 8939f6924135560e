"""Countdown's reward: does the last `<answer>` use each given number once and equal the target? Nothing is `eval`ed."""

import ast
import operator
import re
from collections import Counter
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from rollout.errors import TruthError

ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
ARITHMETIC = re.compile(r"[-+*/()\s\d]*")
LEADING_ZEROS = re.compile(r"\b0+(?=\d)")
OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
LONGEST = 200
LARGEST = 10**30
"""With this bound no answer takes long."""


@dataclass
class Expression:
    """Example: `evaluate("(6-4)*3")` -> `Expression(Fraction(6), [6, 4, 3])`."""

    value: Fraction
    numbers: list[int]


def compute_score(
    solution_str: str, ground_truth: dict[str, Any], format_score: float = 0.1, score: float = 1.0
) -> dict[str, float]:
    """A wrong result gets `format_score`. `ground_truth`: `{"target": 24, "numbers": [4, 6]}`. Raises TruthError."""
    try:
        given, target = Counter(int(number) for number in ground_truth["numbers"]), int(ground_truth["target"])
    except (KeyError, TypeError, ValueError, OverflowError):
        needed = "countdown needs numbers and a target, as {'numbers': [4, 6], 'target': 24}"
        raise TruthError(f"ground truth is {ground_truth!r:.80}; {needed}") from None
    answers = ANSWER.findall(solution_str)
    try:
        expression = evaluate(answers[-1].partition("=")[0] if answers else "")
        solved = Counter(expression.numbers) == given and expression.value == target
    except ZeroDivisionError:
        solved = False
    except ValueError:
        return {"score": 0.0, "solved": 0.0, "formed": 0.0}
    return {"score": score if solved else format_score, "solved": float(solved), "formed": 1.0}


def evaluate(text: str) -> Expression:
    """Exact value of + - * / and parentheses over whole numbers. Raises ZeroDivisionError and ValueError."""
    text = " ".join(text.split()).replace("×", "*").replace("÷", "/")
    if len(text) > LONGEST:
        raise ValueError(f"{len(text)} characters; at most {LONGEST} are read")
    if not ARITHMETIC.fullmatch(text):
        raise ValueError("only whole numbers, + - * / and parentheses are read")
    try:
        tree = ast.parse(LEADING_ZEROS.sub("", text), mode="eval").body
    except (SyntaxError, MemoryError) as error:  # too many parentheses
        raise ValueError(f"not arithmetic: {error}") from None
    return Expression(value_of(tree), [int(number) for number in re.findall(r"\d+", text)])


def value_of(node: ast.expr) -> Fraction:
    """LONGEST bounds the depth."""
    match node:
        case ast.Constant(value=int(number)):
            value = Fraction(number)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            value = -value_of(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in OPERATIONS:
            value = OPERATIONS[type(operation)](value_of(left), value_of(right))
        case _:
            raise ValueError(f"not arithmetic: {ast.unparse(node)}")
    if max(abs(value.numerator), value.denominator) > LARGEST:
        raise ValueError("too large a number")
    return value
