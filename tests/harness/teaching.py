"""A stand-in teacher: a function of the texts it is asked about, in this process. It answers as vLLM does, and as the
run's own teacher servers do.

`python -m tests.harness.teaching PORT` runs it in a process of its own.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from buffer.wire.message import Array
from configs.inner_command import inner_words
from rollout.teachers.messages import Scores, packed, read_request
from tests.harness.model_server import ModelServer

OTHERS = 1000
"""The first of the tokens that are given besides a text's own."""
Opinion = Callable[[Sequence[int], int], float]
"""From a text and a place in it to the log-probability of the token there."""


def by_context(text: Sequence[int], place: int) -> float:
    """Depends on the token and on all before it, so that a wrong context shows; multiples of 1/64, exact in float32."""
    return -(1 + (sum((1 + at) * token for at, token in enumerate(text[: place + 1])) % 200)) / 64


def entry(token: int, logprob: float, others: int) -> dict[str, Any]:
    """What vLLM answers of one token: its own log-probability, and so many others, here less probable ones."""
    known = {token: logprob} | {OTHERS + number: -8.0 - number for number in range(others)}
    return {str(one): {"logprob": each, "rank": 1, "decoded_token": "x"} for one, each in known.items()}


def completions(body: dict[str, Any], opinion: Opinion = by_context) -> dict[str, Any]:
    """What vLLM answers to a request of TeacherClient, the last choice first."""
    assert body["max_tokens"] == 1
    choices = [
        {
            "index": index,
            "text": "x",
            "prompt_logprobs": [
                entry(token, opinion(text, place), body["prompt_logprobs"]) if place else None
                for place, token in enumerate(text)
            ],
        }
        for index, text in enumerate(body["prompt"])
    ]
    return {"object": "text_completion", "choices": choices[::-1]}


def scores(body: bytes, opinion: Opinion = by_context) -> Scores:
    """What the run's own teacher server answers to a request of OwnTeacher."""
    asked, made = read_request(body), Scores(logprobs=[], ids=[], top=[])
    for text, sampled in zip(asked.texts, asked.sampled, strict=True):
        tokens, places = text.numpy().tolist(), int(sampled.numpy().sum())
        own = [opinion(tokens, place) if place else 0.0 for place in range(len(tokens))]
        others = np.arange(asked.top_k)
        made.logprobs.append(Array.of(np.array(own, np.float32)))
        made.ids.append(Array.of(np.tile(OTHERS + others, (places, 1)).astype(np.int32)))
        made.top.append(Array.of(np.tile(-8.0 - others, (places, 1)).astype(np.float32)))
    return made


def answered(body: Any, opinion: Opinion = by_context) -> Any:
    """The answer to a request of either kind."""
    return packed(scores(body, opinion)) if isinstance(body, bytes) else completions(body, opinion)


def teacher_server(opinion: Opinion = by_context, **options: Any) -> ModelServer:
    """A server that answers every request."""
    return ModelServer(lambda body, number: (200, answered(body, opinion)), **options)


async def serve(port: int) -> None:
    """Serve until killed; each request takes a moment, so that a kill meets some."""
    async with teacher_server(port=port, delay_s=0.02):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(inner_words("PORT")[0])))
