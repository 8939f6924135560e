"""Messages between rollout servers and the teacher servers of the run: a request and its answer over HTTP, in
MessagePack. A teacher server that the run does not start is asked as vLLM's own API wants it (`teacher_client.py`)."""

from collections.abc import Iterator, Sequence
from typing import Annotated

from pydantic import Field

from buffer.wire.message import Array, LongName, Many, Message, pack, unpack

PATH = "/headrace/scores"
CONTENT_TYPE = "application/msgpack"
MOST_TOP = 2**20
MOST_BYTES = 32 * 2**20
"""Of one request; a server takes 64 MiB (`reward_limits.py`)."""
TOKEN_BYTES, TEXT_BYTES = 5, 128
"""In a request: int32 and uint8 for each token, and what each text adds."""


class ScoreTexts(Message):
    """Ask for the log-probabilities of each token of `texts`, given the tokens before it.

    >>> tokens, sampled = np.array([5, 6, 7], np.int32), np.array([0, 1, 1], np.uint8)
    >>> arrays = {"texts": [Array.of(tokens)], "sampled": [Array.of(sampled)]}
    >>> ScoreTexts(model="Qwen/Qwen2.5-7B-Instruct", **arrays, top_k=0, vocabulary=151936)
    """

    model: LongName
    """As the run file names the teacher; a server of another model refuses."""
    texts: Many[Array]
    """[tokens] int32 each"""
    sampled: Many[Array]
    """[tokens] uint8 each: 1 where `top_k` tokens are wanted"""
    top_k: Annotated[int, Field(ge=0, le=MOST_TOP)]
    vocabulary: Annotated[int, Field(ge=1)]
    """Tokens of the policy: the most probable ones are among these. The teacher may have more rows in its embedding."""


class Scores(Message):
    """The answer, in the order of the texts."""

    logprobs: Many[Array]
    """[tokens] float32 each; 0 for the first token"""
    ids: Many[Array]
    """[sampled tokens, top_k] int32 each: the most probable tokens"""
    top: Many[Array]
    """[sampled tokens, top_k] float32 each: their log-probabilities"""


def parts_of(texts: Sequence[Sequence[int]], most_bytes: int = MOST_BYTES) -> Iterator[slice]:
    """Yield consecutive texts that fit into one request together."""
    start = size = 0
    for at, text in enumerate(texts):
        added = TOKEN_BYTES * len(text) + TEXT_BYTES
        if at > start and size + added > most_bytes:
            yield slice(start, at)
            start, size = at, 0
        size += added
    yield slice(start, len(texts))


def packed(message: Message) -> bytes:
    return bytes(pack(0, message))


def read_request(body: bytes) -> ScoreTexts:
    """Raises ValueError, in one line."""
    _, asked = unpack(body, {"ScoreTexts": ScoreTexts})
    assert isinstance(asked, ScoreTexts)
    if len(asked.texts) != len(asked.sampled):
        raise ValueError(f"ScoreTexts: {len(asked.texts)} texts, {len(asked.sampled)} of sampled")
    for at, (text, sampled) in enumerate(zip(asked.texts, asked.sampled, strict=True)):
        if (text.dtype, len(text.shape)) != ("int32", 1) or not text.shape[0]:
            raise ValueError(f"ScoreTexts.texts.{at}: {text.dtype}{text.shape}; a text is int32 [tokens], not empty")
        if (sampled.dtype, sampled.shape) != ("uint8", text.shape):
            raise ValueError(f"ScoreTexts.sampled.{at}: {sampled.dtype}{sampled.shape} for a text of {text.shape[0]}")
    return asked


def read_answer(body: bytes, asked: ScoreTexts) -> Scores:
    """Raises ValueError, in one line, also if anything is missing or not of the shape that was asked for."""
    _, found = unpack(body, {"Scores": Scores})
    assert isinstance(found, Scores)
    number = len(asked.texts)
    if not len(found.logprobs) == len(found.ids) == len(found.top) == number:
        raise ValueError(f"Scores: {len(found.logprobs)} texts, of {number} asked for")
    for at, (text, sampled) in enumerate(zip(asked.texts, asked.sampled, strict=True)):
        tops = [int(sampled.numpy().astype(bool).sum()), asked.top_k]
        for name, array, wanted in (
            ("logprobs", found.logprobs[at], ("float32", text.shape)),
            ("ids", found.ids[at], ("int32", tops)),
            ("top", found.top[at], ("float32", tops)),
        ):
            if (array.dtype, array.shape) != wanted:
                raise ValueError(f"Scores.{name}.{at}: {array.dtype}{array.shape}, not {wanted[0]}{wanted[1]}")
    return found
