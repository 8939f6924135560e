"""Rewards of an answer's text or length, under limits: a pattern may take years (`answer_judge.py`)."""

import re
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from configs.plain_text import print_visible
from configs.schema import Positive, Section
from rollout.errors import TruthError
from rollout.rewards.answer_judge import GAVE_UP, AnswerJudge, GaveUpError


def last_match(pattern: re.Pattern[str], text: str) -> str | None:
    """Return the last match, or its first group if that took part."""
    found = None
    for found in pattern.finditer(text):  # noqa: B007  # the last one is kept
        pass
    if found is None:
        return None
    return found[1] if pattern.groups and found[1] is not None else found[0]


def fits(pattern: re.Pattern[str], text: str, whole: bool) -> bool:
    return bool(pattern.fullmatch(text) if whole else pattern.search(text))


LAST_MATCH = AnswerJudge(lambda pattern, flags, text: last_match(re.compile(pattern, flags), text))
FITS = AnswerJudge(lambda pattern, flags, *rest: fits(re.compile(pattern, flags), *rest))


class ExactMatch(Section):
    """`exact_match`: is the answer the ground truth, letter by letter?"""

    pattern: re.Pattern[str] | None = None
    """Finds the answer: the last match, or its first group; null: the whole text."""
    strip: bool = True
    case: bool = False
    """Whether upper and lower case differ."""
    score: float = 1.0
    format_score: float = 0.0
    """A wrong answer in which `pattern` was found gets this."""

    def __call__(self, solution_str: str, ground_truth: Any) -> dict[str, float]:
        """`ground_truth`: one answer or a list. Raises TruthError."""
        truths = ground_truth if isinstance(ground_truth, list) else [ground_truth]
        if not truths or not all(isinstance(truth, str | int | float) and str(truth).strip() for truth in truths):
            needed = "exact_match needs a text, a number, or a list of such"
            raise TruthError(f"ground truth is {ground_truth!r:.80}; {needed}")
        try:
            answer = solution_str
            if self.pattern is not None:
                answer = LAST_MATCH(self.pattern.pattern, self.pattern.flags, solution_str)
        except GaveUpError as error:
            print_visible(f"gave up on an answer: {error}")
            return {"score": min(0.0, self.score, self.format_score), "solved": 0.0, "formed": 0.0, GAVE_UP: 1.0}
        formed = answer is not None
        solved = answer is not None and self._plain(answer) in [self._plain(str(truth)) for truth in truths]
        reward = self.score if solved else self.format_score if formed and self.pattern is not None else 0.0
        return {"score": reward, "solved": float(solved), "formed": float(formed), GAVE_UP: 0.0}

    def _plain(self, text: str) -> str:
        text = text.strip() if self.strip else text
        return text if self.case else text.casefold()


class RegexFormat(Section):
    """`regex`: has the text the form of a pattern?"""

    pattern: re.Pattern[str]
    """Begin it with `(?s)` where `.` may be a line break."""
    match: Literal["search", "full"] = "search"
    score: float = 1.0
    otherwise: float = 0.0

    def __call__(self, solution_str: str) -> dict[str, float]:
        try:
            found = FITS(self.pattern.pattern, self.pattern.flags, solution_str, self.match == "full")
        except GaveUpError as error:
            print_visible(f"gave up on an answer: {error}")
            return {"score": min(self.score, self.otherwise), GAVE_UP: 1.0}
        return {"score": self.score if found else self.otherwise, GAVE_UP: 0.0}


class LengthPenalty(Section):
    """`length`: 0 for a short answer, less for a long one."""

    free: Annotated[int, Field(ge=0)]
    cap: Positive
    """Tokens from which the whole penalty is due; it grows evenly from `free`."""
    penalty: float = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "LengthPenalty":
        if self.free >= self.cap:
            raise ValueError(f"cap {self.cap} is not above free {self.free}; raise it")
        return self

    def __call__(self, reward_input: dict[str, Any]) -> float:
        over = (reward_input["response_length"] - self.free) / (self.cap - self.free)
        return -self.penalty * float(min(1.0, max(0.0, over)))
