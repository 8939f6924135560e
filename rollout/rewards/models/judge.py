"""The reward `judge`: a language model scores an answer, over OpenAI's chat completions."""

import re
from typing import Any

from pydantic import Field, PrivateAttr, model_validator

from configs.schema import Positive
from rollout.errors import RewardError
from rollout.rewards.models.http_model import AnswerTemplate, HttpModel
from rollout.rewards.text_match import last_match

SAID_CHARS = 200


class Judge(HttpModel):
    """An LLM judge. `url` ends in `/v1`."""

    model: str
    template: str
    """Jinja template of the question, or a `.jinja` file, of `{{ answer }}`, `{{ ground_truth }}` and the row's
    columns."""
    pattern: re.Pattern[str]
    """Finds the verdict: the last match, or its first group."""
    scores: dict[str, float] | None = None
    """Reward of each verdict, whatever its case; null: the verdict is a number."""
    scale: float = Field(1.0, gt=0)
    """Divides the number: 10 for marks from 0 to 10."""
    system: str | None = None
    max_tokens: Positive = 1024
    """Longest verdict in tokens, reasoning included."""
    extra: dict[str, Any] = Field({})
    """Further fields of the request, such as `{chat_template_kwargs: {enable_thinking: false}}`."""
    _text: AnswerTemplate = PrivateAttr()

    @model_validator(mode="after")
    def _compile(self) -> "Judge":
        self._text = AnswerTemplate(self.template)
        for name in (names := list(self.scores or ())):
            if len(same := [each for each in names if each.casefold() == name.casefold()]) > 1:
                raise ValueError(f"scores has {' and '.join(same)}, and case does not matter; keep one of them")
        return self

    async def __call__(self, solution_str: str, ground_truth: Any, row: dict[str, Any]) -> float:
        """Raises RewardError."""
        said = await self._ask(self.question(solution_str, ground_truth, row))
        verdict = last_match(self.pattern, said)
        if verdict is None:
            raise RewardError(f"judge: nothing matches pattern in its verdict {said[-SAID_CHARS:]!r}")
        if self.scores is not None:
            scores = {name.casefold(): score for name, score in self.scores.items()}
            if (score := scores.get(verdict.strip().casefold())) is None:
                raise RewardError(f"judge: scores has no {verdict!r:.80}; it has {', '.join(self.scores)}")
            return score
        try:
            return float(verdict) / self.scale
        except ValueError:
            raise RewardError(f"judge: its verdict {verdict!r:.80} is no number; set scores") from None

    def question(self, solution_str: str, ground_truth: Any, row: dict[str, Any]) -> str:
        return self._text.render(solution_str, ground_truth, row)

    async def _ask(self, question: str) -> str:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": self.max_tokens}
        reply = await self.post("/chat/completions", body | self.extra)
        try:
            choice = reply["choices"][0]
            said = choice["message"]["content"]
        except (KeyError, IndexError, TypeError):
            raise RewardError(f"judge: its server answered no chat completion but {str(reply)[:SAID_CHARS]}") from None
        if not isinstance(said, str) or choice.get("finish_reason") == "length":
            raise RewardError(f"judge: its verdict was cut at max_tokens ({self.max_tokens}); raise it")
        return said
