"""The reward for mathematics: math-verify compares answers with the truth, under limits (`answer_judge.py`)."""

import math
import re
from functools import lru_cache
from typing import Any

from configs.plain_text import print_visible
from rollout.errors import TruthError
from rollout.rewards.answer_judge import GAVE_UP, AnswerJudge, GaveUpError

MARKED = re.compile(r"\$|\\[(\[]|\\f?boxed")
"""Without such a mark math-verify reads only the 3 in `3\\sqrt{2}`."""
COMMAND = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
MATH_WORDS = {*("and", "cos", "cot", "csc", "exp", "lim", "log", "max", "min", "mod", "sec", "sin", "sqrt", "tan")}
BOXED = re.compile(r"\\f?boxed\s*\{")
TOWER = re.compile(r"(?<![\d.])\d+(?:\s*(?:\^|\*\*)[\s{(]*\d+)+")
"""Finds `5^{5^{5}}`."""
MOST_DIGITS = 10**8
BRACKET = re.compile(r"[{}()\[\]]")
DEEPEST = 100


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, float]:
    """An answer that only parses gets `format_score`; one that takes too long the lowest score and the metric
    `gave_up`. Raises TruthError."""
    truth = read_truth(ground_truth)
    try:
        if why := hopeless(solution_str):
            raise GaveUpError(why)
        solved, formed = _judge()(truth, solution_str)
    except GaveUpError as error:
        print_visible(f"gave up on an answer: {error}")
        return {"score": min(0.0, score, format_score), "solved": 0.0, "formed": 0.0, GAVE_UP: 1.0}
    reward = score if solved else format_score if formed else 0.0
    return {"score": reward, "solved": float(solved), "formed": float(formed), GAVE_UP: 0.0}


def read_truth(ground_truth: Any) -> str:
    """The truth as readable text. Raises TruthError."""
    number = isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool)
    text = str(ground_truth).strip()
    if not text or not (isinstance(ground_truth, str) or (number and math.isfinite(ground_truth))):
        kind = f"of type {type(ground_truth).__name__}: {ground_truth!r:.80}" if text else "an empty text"
        raise TruthError(f"ground truth is {kind}; math_verify needs one text, in LaTeX or plain, or one number")
    _parse_truth(text)
    return text


@lru_cache(maxsize=1024)
def _parse_truth(text: str) -> None:
    """A group shares one truth."""
    try:
        if why := hopeless(text if MARKED.search(text) else rf"\boxed{{{text}}}"):
            raise GaveUpError(why)
        readable = _judge()(text)
    except GaveUpError as error:
        raise TruthError(f"ground truth {text!r:.200} cannot be read by math-verify: {error}") from None
    if not readable:
        raise TruthError(f"ground truth {text!r:.200} is not mathematics that math-verify can read")


def is_prose(text: str) -> bool:
    """Whether a text has words that are not mathematics: `5 dollars`, but not `1 and 2`."""
    return any(word not in MATH_WORDS for word in re.findall("[A-Za-z]{3,}", COMMAND.sub(" ", text)))


def hopeless(text: str) -> str:
    """Return why the last `\\boxed{` is not evaluated, or ""."""
    *_, start = [-1, *(found.end() for found in BOXED.finditer(text))]
    if start < 0:
        return ""
    depth, end = 1, len(text)
    for found in BRACKET.finditer(text, start):
        depth += 1 if found[0] in "{([" else -1
        if depth > DEEPEST:
            return f"its brackets are nested more than {DEEPEST} levels deep"
        if depth == 0:
            end = found.start()
            break
    for tower in TOWER.finditer(text, start, end):
        numbers = [int(number) if len(number) < 20 else 10**20 for number in re.findall(r"\d+", tower[0])]
        if digits_of_power(numbers) > MOST_DIGITS:
            return f"it has a power of more than {MOST_DIGITS:,} digits"
    return ""


def digits_of_power(numbers: list[int]) -> float:
    """`[2, 3, 4]` is 2 ** 3 ** 4. Infinite if even an exponent has too many."""
    digits, value = 0.0, numbers[-1]
    for base in reversed(numbers[:-1]):
        digits = min(value, 4 * MOST_DIGITS) * math.log10(max(base, 1))
        if digits > MOST_DIGITS:
            return math.inf
        value = base**value if digits < 1000 else 4 * MOST_DIGITS
    return digits


def start() -> None:
    """Load math-verify, which takes a second."""
    _judge()


@lru_cache(maxsize=1)
def _judge() -> AnswerJudge:
    from math_verify import parse, verify
    from sympy import Basic, Limit, S, preorder_traversal
    from sympy.concrete.expr_with_limits import ExprWithLimits

    def is_infinite(expression: Any) -> bool:
        nodes = preorder_traversal(expression) if isinstance(expression, Basic) else iter(())
        for node in nodes:
            if isinstance(node, ExprWithLimits | Limit):
                nodes.skip()
            elif node in (S.Infinity, S.NegativeInfinity, S.ComplexInfinity, S.NaN):
                return True
        return False

    @lru_cache(maxsize=64)
    def truth_of(text: str) -> Any:
        ways = [text, f"${text}$"] if MARKED.search(text) or is_prose(text) else [f"${text}$", text]
        return parse(ways[0], parsing_timeout=None) or parse(ways[1], parsing_timeout=None)

    def judge(truth: str, solution: str | None = None) -> Any:
        """sympy compares an infinite power with random numbers and may find it equal to a finite one, so infinite
        answers to finite truths are wrong."""
        if solution is None:
            return bool(truth_of(truth))
        right, answer = truth_of(truth), parse(solution, parsing_timeout=None)
        finite = answer if any(map(is_infinite, right)) else [each for each in answer if not is_infinite(each)]
        return [bool(finite) and verify(right, finite, timeout_seconds=None), bool(answer)]

    judge("2", "$2$")  # load everything before the fork
    return AnswerJudge(judge)
