"""The reward for mathematics: is the answer equivalent to the ground truth, as math-verify judges?

math-verify and sympy compute what an answer says, however long that takes, so each answer is judged under limits
(`answer_judge.py`), and texts that are certain to exceed them are not computed at all.
"""

import math
import re
from functools import lru_cache
from typing import Any

from rollout.errors import TruthError
from rollout.rewards.answer_judge import GAVE_UP, AnswerJudge, GaveUpError

MARKED = re.compile(r"\$|\\[(\[]|\\f?boxed")
"""Begins LaTeX in a text. Without it `3\\sqrt{2}` is a text with a 3 in it to math-verify."""
COMMAND = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^{}]*\}|\\[A-Za-z]+")
MATH_WORDS = {*("and", "cos", "cot", "csc", "exp", "lim", "log", "max", "min", "mod", "sec", "sin", "sqrt", "tan")}
BOXED = re.compile(r"\\f?boxed\s*\{")
TOWER = re.compile(r"(?<![\d.])\d+(?:\s*(?:\^|\*\*)[\s{(]*\d+)+")
"""Powers of powers of whole numbers, such as `5^{5^{5}}`."""
MOST_DIGITS = 10**8
"""Of a power that is computed at all."""
BRACKET = re.compile(r"[{}()\[\]]")
DEEPEST = 100
"""Most brackets within each other that are read."""


def compute_score(
    solution_str: str, ground_truth: Any, format_score: float = 0.0, score: float = 1.0
) -> dict[str, float]:
    """`score` for an answer equivalent to `ground_truth` (LaTeX or plain), `format_score` for one that parses, else 0.
    The lowest of these, and the metric `gave_up`, for an answer that takes too long to judge.

    Raises TruthError for a ground truth that does not parse, which is an error of the data.
    """
    truth = read_truth(ground_truth)
    try:
        if why := hopeless(solution_str):
            raise GaveUpError(why)
        solved, formed = _judge()(truth, solution_str)
    except GaveUpError as error:
        print(f"gave up on an answer: {error}", flush=True)
        return {"score": min(0.0, score, format_score), "solved": 0.0, "formed": 0.0, GAVE_UP: 1.0}
    reward = score if solved else format_score if formed else 0.0
    return {"score": reward, "solved": float(solved), "formed": float(formed), GAVE_UP: 0.0}


def read_truth(ground_truth: Any) -> str:
    """The ground truth as text that math-verify can read. Raises TruthError."""
    number = isinstance(ground_truth, int | float) and not isinstance(ground_truth, bool)
    text = str(ground_truth).strip()
    if not text or not (isinstance(ground_truth, str) or (number and math.isfinite(ground_truth))):
        kind = f"of type {type(ground_truth).__name__}: {ground_truth!r:.80}" if text else "an empty text"
        raise TruthError(f"ground truth is {kind}; math_verify needs one text, in LaTeX or plain, or one number")
    _parse_truth(text)
    return text


@lru_cache(maxsize=1024)
def _parse_truth(text: str) -> None:
    """Whether it can be read is the same in each call: a group has one, and an epoch each again. Raises TruthError."""
    try:
        if why := hopeless(text if MARKED.search(text) else rf"\boxed{{{text}}}"):
            raise GaveUpError(why)
        readable = _judge()(text)
    except GaveUpError as error:
        raise TruthError(f"ground truth {text!r:.200} cannot be read by math-verify: {error}") from None
    if not readable:
        raise TruthError(f"ground truth {text!r:.200} is not mathematics that math-verify can read")


def is_prose(text: str) -> bool:
    """Whether a text has words that are no mathematics: `5 dollars`, but not `2\\pi`, `1 and 2`, `12\\text{ units}`."""
    return any(word not in MATH_WORDS for word in re.findall("[A-Za-z]{3,}", COMMAND.sub(" ", text)))


def hopeless(text: str) -> str:
    """Why what the last `\\boxed{` of a text holds is not read; empty: it is."""
    *_, start = [-1, *(found.end() for found in BOXED.finditer(text))]
    if start < 0:
        return ""
    depth, end = 1, len(text)
    for found in BRACKET.finditer(text, start):
        depth += 1 if found[0] in "{([" else -1
        if depth > DEEPEST:
            return f"it has more than {DEEPEST} brackets within each other"
        if depth == 0:
            end = found.start()
            break
    for tower in TOWER.finditer(text, start, end):
        numbers = [int(number) if len(number) < 20 else 10**20 for number in re.findall(r"\d+", tower[0])]
        if digits_of_power(numbers) > MOST_DIGITS:
            return f"it has a power of more than {MOST_DIGITS:,} digits"
    return ""


def digits_of_power(numbers: list[int]) -> float:
    """About how many digits a power of powers has; infinite where even an exponent has too many.

    Example: `digits_of_power([2, 3, 4])` is of 2 to the power of 3 to the power of 4.
    """
    digits, value = 0.0, numbers[-1]
    for base in reversed(numbers[:-1]):
        digits = min(value, 4 * MOST_DIGITS) * math.log10(max(base, 1))
        if digits > MOST_DIGITS:
            return math.inf
        value = base**value if digits < 1000 else 4 * MOST_DIGITS
    return digits


def start() -> None:
    """Load math-verify, which takes a second, while a worker has time for it: not in the first call."""
    _judge()


@lru_cache(maxsize=1)
def _judge() -> AnswerJudge:
    """The one of this process, with math-verify loaded: a second, paid only where this reward is used."""
    from math_verify import parse, verify

    @lru_cache(maxsize=64)
    def truth_of(text: str) -> Any:
        ways = [text, f"${text}$"] if MARKED.search(text) or is_prose(text) else [f"${text}$", text]
        return parse(ways[0], parsing_timeout=None) or parse(ways[1], parsing_timeout=None)

    def judge(truth: str, solution: str | None = None) -> Any:
        """Whether the truth can be read; or with a solution, whether that is right, and whether it can be read."""
        if solution is None:
            return bool(truth_of(truth))
        answer = parse(solution, parsing_timeout=None)
        return [bool(answer) and verify(truth_of(truth), answer, timeout_seconds=None), bool(answer)]

    judge("2", "$2$")  # what it loads and says at first, before the process is forked
    return AnswerJudge(judge)
