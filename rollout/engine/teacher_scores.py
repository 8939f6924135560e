"""`POST /headrace/scores` on a teacher server of the run, beside the paths of vLLM's API server.

vLLM's `/v1/completions` turns each token into text and JSON: 20 us of one Python process for each, 240 with
`teacher.top_k: 16` (`benchmarks/teacher_speed.py`).
"""

import asyncio
import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from buffer.wire.message import Array
from rollout.engine.door.vllm_client import (
    AsyncLLM,
    RequestOutputKind,
    SamplingParams,
    VLLMValidationError,
    tokens_input,
)
from rollout.engine.reward_limits import App, Receive, Send
from rollout.teachers.messages import CONTENT_TYPE, PATH, Scores, ScoreTexts, packed, read_request

LEAST = -9999.0
"""What vLLM's API gives for a log-probability of -inf."""
Found = tuple[np.ndarray, np.ndarray, np.ndarray]


class TeacherScores:
    """An ASGI app: answers PATH, and hands all other requests to `app`. `model`: the teacher's name in the run file."""

    def __init__(self, model: str, app: App) -> None:
        self.model, self.app = model, app
        self._numbers = itertools.count()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if (scope["type"], scope.get("method"), scope.get("path")) != ("http", "POST", PATH):
            return await self.app(scope, receive, send)
        try:
            asked = read_request(await body_of(receive))
            found = await unless_gone(receive, self._scores(scope["app"].state.engine_client, asked))
        except (ValueError, VLLMValidationError) as error:  # vLLM refuses a text
            return await respond(send, 400, "text/plain; charset=utf-8", str(error).encode())
        if found is not None:
            await respond(send, 200, CONTENT_TYPE, packed(found))

    async def _scores(self, engine: AsyncLLM, asked: ScoreTexts) -> Scores:
        if asked.model != self.model:
            raise ValueError(f"ScoreTexts.model: {asked.model}, but this server has {self.model}")
        vocabulary = engine.model_config.get_vocab_size()
        for at, text in enumerate(asked.texts):
            wrong = next((token for token in text.numpy().tolist() if not 0 <= token < vocabulary), None)
            if wrong is not None:  # it would end vLLM's process
                raise ValueError(f"ScoreTexts.texts.{at}: token {wrong} is out of vocabulary; {vocabulary} are known")
        pairs = zip(asked.texts, asked.sampled, strict=True)
        asking = [
            asyncio.ensure_future(self._of(engine, text.numpy(), sampled.numpy().astype(bool), asked))
            for text, sampled in pairs
        ]
        try:
            found = await asyncio.gather(*asking)
        finally:
            for each in asking:
                each.cancel()  # vLLM goes on with the others if it refuses one
        logprobs, ids, top = ([Array.of(each[at]) for each in found] for at in range(3))
        return Scores(logprobs=logprobs, ids=ids, top=top)

    async def _of(self, engine: AsyncLLM, text: np.ndarray, sampled: np.ndarray, asked: ScoreTexts) -> Found:
        """Ask for more tokens while too few are ones of the policy."""
        theirs, wanted, top_k = engine.model_config.get_vocab_size(), asked.top_k, asked.top_k
        most = top_k + max(0, theirs - asked.vocabulary)
        while True:
            own, ids, top = await self._best(engine, text, sampled, wanted)
            known = ids < asked.vocabulary
            if (known.sum(axis=1) >= top_k).all():
                first = np.argsort(~known, axis=1, kind="stable")[:, :top_k]
                return own, np.take_along_axis(ids, first, 1), np.take_along_axis(top, first, 1)
            wanted = min(2 * wanted, most)

    async def _best(self, engine: AsyncLLM, text: np.ndarray, sampled: np.ndarray, top_k: int) -> Found:
        parameters = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=top_k,
            detokenize=False,
            flat_logprobs=True,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        flat: Any = None
        async for output in engine.generate(tokens_input(text.tolist()), parameters, f"score-{next(self._numbers)}"):
            flat = output.prompt_logprobs or flat
        return arrays(text, sampled, top_k, flat.token_ids, flat.logprobs)


def arrays(
    text: np.ndarray, sampled: np.ndarray, top_k: int, token_ids: Sequence[int], logprobs: Sequence[float]
) -> Found:
    """`token_ids` and `logprobs`: for each token but the first, its own and then those of the `top_k` most probable."""
    shape = len(text) - 1, 1 + top_k
    if len(token_ids) != math.prod(shape):  # vLLM aborts requests when it ends
        raise RuntimeError(f"vLLM ended a text of {len(text)} tokens with {len(token_ids)} log-probabilities")
    ids, values = np.array(token_ids, np.int32).reshape(shape), np.array(logprobs, np.float32).reshape(shape)
    if not np.array_equal(ids[:, 0], text[1:]):
        raise RuntimeError("vLLM's log-probabilities are of other tokens than the text's")
    values = np.maximum(values, np.float32(LEAST))  # keeps NaN
    own, places = np.concatenate([np.zeros(1, np.float32), values[:, 0]]), np.flatnonzero(sampled[1:])
    return own, ids[places, 1:], values[places, 1:]


async def body_of(receive: Receive) -> bytes:
    parts, more = [], True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message["type"] == "http.request" and message.get("more_body", False)
    return b"".join(parts)


async def unless_gone(receive: Receive, work: Any) -> Any:
    """The result of `work`. If the client leaves first, cancels it and returns None."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(receive())
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return await working if working.done() else None
    finally:
        for each in (working, leaving):
            each.cancel()


async def respond(send: Send, status: int, kind: str, body: bytes) -> None:
    headers = [(b"content-type", kind.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
