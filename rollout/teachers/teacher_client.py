"""Asks a vLLM server for the log-probabilities that a teacher gives tokens: `POST /v1/completions` with
`prompt_logprobs`.

Runs on the event loop of a rollout server. One request holds the texts of a whole group, which vLLM computes side by
side. vLLM samples one token after each text, because it must sample some; nobody reads it.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import PrivateAttr

from rollout.errors import TeacherError
from rollout.rewards.models.http_model import HttpModel

PATH = "/v1/completions"
SAMPLING = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": 0, "add_special_tokens": False}
"""`prompt_logprobs: 0`: of the text's own tokens only, at temperature 1."""
LARGEST = float(np.finfo(np.float32).max)
SHOWN_CHARS = 200
"""Most characters of an answer that an error repeats."""


class TeacherClient(HttpModel):
    """A teacher's servers. Raises ValueError for an address or key that cannot be used."""

    _name: str = PrivateAttr("teacher")

    def called(self, name: str) -> "TeacherClient":
        """Itself, with the name that errors give the teacher."""
        self._name = name
        return self

    async def logprobs(self, texts: Sequence[Sequence[int]]) -> list[np.ndarray]:
        """For each text the log-probability of each of its tokens given those before it: [tokens] float32, 0 for the
        first token. Raises TeacherError for an answer that has not all of them, RewardError as `post` does."""
        reply = await self.post(PATH, {"prompt": [list(text) for text in texts], **SAMPLING})
        try:
            choices = sorted(reply["choices"], key=lambda one: one["index"])
            numbers, found = [each["index"] for each in choices], [each["prompt_logprobs"] for each in choices]
        except (KeyError, TypeError):
            raise TeacherError(f"{self._name}: no completions but {str(reply)[:SHOWN_CHARS]}") from None
        if numbers != list(range(len(texts))):
            given = f"{len(found)} completions, of texts {numbers!r:.80}"
            raise TeacherError(f"{self._name}: {given}, for {len(texts)} texts")
        return [self._of_tokens(text, entries) for text, entries in zip(texts, found, strict=True)]

    def _of_tokens(self, text: Sequence[int], entries: Any) -> np.ndarray:
        """`entries`: None for the first token, then a map from token ids to `{logprob, ...}` for each token."""
        number = len(entries) if isinstance(entries, list) else 0
        if number != len(text):
            why = "does its server know prompt_logprobs?" if not number else "it cuts texts"
            raise TeacherError(f"{self._name}: prompt_logprobs of {number} tokens for {len(text)}; {why}")
        found = np.zeros(len(text), np.float32)
        for place, (token, entry) in enumerate(zip(text[1:], entries[1:], strict=True), 1):
            try:
                logprob = entry[str(token)]["logprob"]
            except (KeyError, TypeError):
                raise TeacherError(f"{self._name}: no log-probability of token {token} at {place}") from None
            if type(logprob) not in (int, float) or not abs(logprob) <= LARGEST:  # NaN is not
                shown = repr(logprob)[:SHOWN_CHARS]
                raise TeacherError(f"{self._name}: the log-probability of token {token} at {place} is {shown}")
            found[place] = logprob
        return found
