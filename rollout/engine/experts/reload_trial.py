"""Tries at the start whether vLLM loads policies into a mixture of experts that nobody has compared.

It loads random weights A, A with each kind of weight changed in turn, B, then A again. Each change must change
log-probabilities, and A must give the same ones again. Decoded tokens must have the log-probabilities that a prompt of
them has: decoding may read other copies of weights. A place that is wrong in every load stays unseen; the first
policy's probe compares it with the learner.
"""

import logging
import random
import time
from collections.abc import Sequence
from math import isfinite
from typing import Any, Protocol

from configs.expert_models import OTHER_MIXTURE
from configs.load import ConfigError
from rollout.engine.experts.trial_weights import EVERY_KIND
from rollout.errors import EngineDead, EngineError

log = logging.getLogger(__name__)
LENGTHS = (512, 64, 23)
"""Tokens of the texts: enough that each of some hundred experts reads some."""
DECODED = 16
STALE = 0.25
"""Share of the distance from A to B that decoded tokens may be off; rounding takes a tenth."""
LOAD_S = 600.0


class TriedEngine(Protocol):
    """vLLM's engine (`rollout/engine/vllm_engine.py`)."""

    @property
    def vocabulary(self) -> int: ...
    @property
    def longest(self) -> int: ...

    async def load_trial(self, changed: str, timeout_s: float) -> None: ...
    async def probe(self, tokens: list[int]) -> list[float]: ...
    async def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Any: ...


async def try_reloads(engine: TriedEngine, kinds: Sequence[str]) -> None:
    """Raise ConfigError, naming the kind of weight, if a load is wrong or kills vLLM."""
    try:
        await _try_all(engine, kinds)
    except (EngineDead, EngineError) as error:
        raise _refused(f"it fails on random weights ({' '.join(str(error).split())[:300]})") from error


async def _try_all(engine: TriedEngine, kinds: Sequence[str]) -> None:
    began, texts = time.monotonic(), drawn_texts(engine.vocabulary, engine.longest)
    first = await _loaded(engine, "", texts)
    noise = _largest(first, await _scores(engine, texts))
    for kind in kinds:
        if _largest(await _loaded(engine, kind, texts), first) <= noise:
            raise _refused(f"a push that changes {kind} changes no log-probability")
    other = await _loaded(engine, EVERY_KIND, texts)
    distance = _mean(other, first)
    if not await _decoding_is_off(engine, texts[-1]) <= STALE * distance:
        raise _refused("after a push, decoded tokens have other log-probabilities than the same tokens in a prompt")
    again = _largest(await _loaded(engine, "", texts), first)
    if not again <= noise:
        raise _refused(f"the same weights, pushed again after others, give log-probabilities {again:.2g} nat off")
    log.info("experts: vLLM loads all %d kinds of weights again; tried in %.1f s", len(kinds), time.monotonic() - began)


def drawn_texts(vocabulary: int, longest: int) -> list[list[int]]:
    """Random texts. `longest` has room for tokens decoded after the last text, and one that vLLM samples after each
    scored text."""
    draw, room = random.Random(0), longest - DECODED - 1
    return [[draw.randrange(vocabulary) for _ in range(max(2, min(length, room)))] for length in LENGTHS]


async def _loaded(engine: TriedEngine, changed: str, texts: Sequence[list[int]]) -> list[float]:
    await engine.load_trial(changed, LOAD_S)
    return await _scores(engine, texts)


async def _scores(engine: TriedEngine, texts: Sequence[list[int]]) -> list[float]:
    found = [x for text in texts for x in await engine.probe(text)]
    if not all(map(isfinite, found)):
        raise _refused("random weights give log-probabilities that are not finite")
    return found


async def _decoding_is_off(engine: TriedEngine, prompt: list[int]) -> float:
    """Mean difference of decoded tokens' log-probabilities from those of the same tokens in a prompt."""
    answer = await engine.generate(prompt, DECODED, 1.0)
    read = (await engine.probe(prompt + list(answer.tokens)))[len(prompt) - 1 :]
    return _mean(list(answer.logprobs), read)


def _largest(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))


def _mean(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def _refused(what: str) -> ConfigError:
    return ConfigError([f"model.path: this vLLM does not load policies into its experts: {what}; {OTHER_MIXTURE}"])
