"""Asks for a teacher's log-probabilities: the run's own servers for numbers in MessagePack, a server that was there
already as vLLM's API wants it, by `POST /v1/completions` with `prompt_logprobs`.

vLLM must sample some token after each text; nobody reads it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from pydantic import PrivateAttr

from buffer.wire.message import Array
from buffer.wire.values import LARGEST as MOST_TOKEN
from buffer.wire.values import LEAST_LOGPROB
from rollout.errors import TeacherError
from rollout.rewards.models.http_model import HttpModel
from rollout.teachers import messages
from rollout.teachers.messages import CONTENT_TYPE, MOST_BYTES, ScoreTexts, parts_of

PATH = "/v1/completions"
SAMPLING = {"max_tokens": 1, "temperature": 0, "add_special_tokens": False}
"""Log-probabilities of prompts are of temperature 1."""
LARGEST = float(np.finfo(np.float32).max)
SHOWN_CHARS = 200


class Opinion(NamedTuple):
    """What a teacher gave for a text."""

    logprobs: np.ndarray
    """[tokens] float32, given the tokens before; 0 for the first one"""
    ids: np.ndarray | None = None
    """int32 [sampled tokens, k]: the most probable tokens"""
    top: np.ndarray | None = None
    """float32 [sampled tokens, k]"""


class OwnTeacher(HttpModel):
    """The servers that the run keeps for a teacher. `name`: of the teacher in errors."""

    name: str = "teacher"
    top_k: int | None = None
    vocabulary: int = MOST_TOKEN
    """Tokens of the policy."""
    _most_bytes: int = PrivateAttr(MOST_BYTES)

    async def opinions(self, texts: Sequence[Sequence[int]], sampled: Sequence[np.ndarray]) -> list[Opinion]:
        """`sampled`: [tokens] bool for each text. Raises TeacherError for an incomplete answer, RewardError as `post`
        does."""
        found: list[Opinion] = []
        for part in parts_of(texts, self._most_bytes):
            found += await self._asked(texts[part], sampled[part])
        return found

    async def _asked(self, texts: Sequence[Sequence[int]], sampled: Sequence[np.ndarray]) -> list[Opinion]:
        tokens = [Array.of(np.array(text, np.int32)) for text in texts]
        places = [Array.of(of.astype(np.uint8)) for of in sampled]
        asked = ScoreTexts(
            model=self.model or "",
            texts=tokens,
            sampled=places,
            top_k=self.top_k or 0,
            vocabulary=self.vocabulary,
        )
        reply = await self.post_bytes(messages.PATH, messages.packed(asked), CONTENT_TYPE)
        try:
            found = messages.read_answer(reply, asked)
        except ValueError as error:
            raise TeacherError(f"{self.name}: {error}") from None
        return [
            self._opinion(at, *(array.numpy() for array in arrays))
            for at, arrays in enumerate(zip(found.logprobs, found.ids, found.top, strict=True))
        ]

    def _opinion(self, at: int, logprobs: np.ndarray, ids: np.ndarray, top: np.ndarray) -> Opinion:
        for values in (logprobs, top):
            if not np.isfinite(values).all():
                wrong = float(values[~np.isfinite(values)][0])
                raise TeacherError(f"{self.name}: a log-probability of text {at} is {wrong}")
        if ids.size and ids.min() < 0:
            raise TeacherError(f"{self.name}: token {ids.min()} among the most probable ones of text {at}")
        return Opinion(logprobs) if self.top_k is None else Opinion(logprobs, ids, np.maximum(top, LEAST_LOGPROB))


class TeacherClient(HttpModel):
    """Servers of a teacher that were there already. `name`: of the teacher in errors."""

    name: str = "teacher"
    top_k: int | None = None

    async def opinions(self, texts: Sequence[Sequence[int]], sampled: Sequence[np.ndarray]) -> list[Opinion]:
        """`sampled`: [tokens] bool for each text. Raises TeacherError for an incomplete answer, RewardError as `post`
        does."""
        asked = {"prompt": [list(text) for text in texts], **SAMPLING, "prompt_logprobs": self.top_k or 0}
        reply = await self.post(PATH, asked)
        try:
            choices = sorted(reply["choices"], key=lambda one: one["index"])
            numbers, found = [each["index"] for each in choices], [each["prompt_logprobs"] for each in choices]
        except (KeyError, TypeError):
            raise TeacherError(f"{self.name}: no completions but {str(reply)[:SHOWN_CHARS]}") from None
        if numbers != list(range(len(texts))):
            given = f"{len(found)} completions, of texts {numbers!r:.80}"
            raise TeacherError(f"{self.name}: {given}, for {len(texts)} texts")
        each = zip(texts, found, sampled, strict=True)
        return [Opinion(self._of_tokens(text, entries), *self._tops(entries, of)) for text, entries, of in each]

    def _tops(self, entries: Any, sampled: np.ndarray) -> tuple[np.ndarray | None, np.ndarray | None]:
        if self.top_k is None:
            return None, None
        places = np.flatnonzero(sampled).tolist()
        tops = [self._top(entries[place], place, self.top_k) for place in places]
        columns = np.array(tops, np.float64).reshape(len(places), self.top_k, 2)
        return columns[..., 0].astype(np.int32), columns[..., 1].astype(np.float32)

    def _top(self, entry: dict[str, Any], place: int, number: int) -> list[tuple[int, float]]:
        try:
            known = {int(token): each["logprob"] for token, each in entry.items()}
        except (KeyError, TypeError, ValueError):
            raise TeacherError(f"{self.name}: no tokens at {place} but {str(entry)[:SHOWN_CHARS]}") from None
        if len(known) < number:
            raise TeacherError(f"{self.name}: {len(known)} tokens at {place}; teacher.top_k is {number}")
        wrong = (each for each in known.items() if not self._sound(*each))
        if (first := next(wrong, None)) is not None:
            token, logprob = first
            raise TeacherError(f"{self.name}: log-probability {logprob!r:.40} of token {token!r:.20} at {place}")
        best = sorted(known.items(), key=lambda each: -each[1])[:number]
        return [(token, max(logprob, LEAST_LOGPROB)) for token, logprob in best]

    @staticmethod
    def _sound(token: int, logprob: Any) -> bool:
        return 0 <= token <= MOST_TOKEN and type(logprob) in (int, float) and abs(logprob) <= LARGEST

    def _of_tokens(self, text: Sequence[int], entries: Any) -> np.ndarray:
        """`entries`: None for the first token, then maps from token ids to `{logprob, ...}`."""
        number = len(entries) if isinstance(entries, list) else 0
        if number != len(text):
            why = "does its server know prompt_logprobs?" if not number else "it cuts texts"
            raise TeacherError(f"{self.name}: prompt_logprobs of {number} tokens for {len(text)}; {why}")
        found = np.zeros(len(text), np.float32)
        for place, (token, entry) in enumerate(zip(text[1:], entries[1:], strict=True), 1):
            try:
                logprob = entry[str(token)]["logprob"]
            except (KeyError, TypeError):
                raise TeacherError(f"{self.name}: no log-probability of token {token} at {place}") from None
            if type(logprob) not in (int, float) or not abs(logprob) <= LARGEST:  # NaN is not
                shown = repr(logprob)[:SHOWN_CHARS]
                raise TeacherError(f"{self.name}: the log-probability of token {token} at {place} is {shown}")
            found[place] = logprob
        return found
