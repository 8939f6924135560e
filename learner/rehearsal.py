"""Two full microbatches of made-up samples, which each rank computes while the servers sample the first batch
(docs/design/learner.md): a run that would run out of memory ends at its start. Trains nothing, and leaves the process's
random generators alone."""

from collections.abc import Sequence

import numpy as np

from buffer.wire.batches import BatchCut
from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats
from configs.checks import max_sample_tokens
from configs.schema import Config
from learner.model.policy import Policy
from learner.train.batch import LEAST_SAVED

MICROBATCHES = 2
"""The second one finds the first one's gradients in memory."""
PLAIN = 256
"""Most vocabularies have special tokens above it."""


def own_part(config: Config, policy: Policy, budget: int, vocabulary: int, part: int, number: int) -> Part | None:
    """This rank's part of `made_up`; None without a rehearsal."""
    if policy.device.type == "cpu" or policy.sight is not None or policy.replayed is not None:
        return None
    return made_up(config, budget, vocabulary, part, number, policy.sharing.prompts)


def made_up(config: Config, budget: int, vocabulary: int, part: int, number: int, share_prompts: bool) -> Part:
    """Part `part` of `number`, each of MICROBATCHES microbatches of `budget` tokens."""
    longest = max_sample_tokens(config)
    prompt = max(min(longest // 2, config.data.max_prompt_tokens), 1)
    size = _group_size(longest, prompt, budget, share_prompts)

    def fetch(item: int, indexes: Sequence[int]) -> list[bytes]:
        draw = np.random.default_rng(item)
        tokens = draw.integers(0, min(vocabulary, PLAIN), (size, longest)).astype(np.int32)
        tokens[:, :prompt] = tokens[0, :prompt]
        return [_sample(tokens[index], prompt, vocabulary).pack() for index in indexes]

    figures = sample_stats(fetch(0, [0])[0])
    groups = [(item, 0, [figures] * size) for item in range(MICROBATCHES * number)]
    return BatchCut(0, number, groups, {}, share_prompts).part(part, fetch, lambda item: None)


def _group_size(longest: int, prompt: int, budget: int, shared: bool) -> int:
    apart = max(budget // longest, 1)
    together = max((budget - prompt) // (longest - prompt), 1)
    saved = (together - 1) * prompt / (together * longest)
    return together if shared and saved >= LEAST_SAVED else apart


def _sample(tokens: np.ndarray, prompt: int, vocabulary: int) -> Sample:
    sampled = np.arange(len(tokens)) >= prompt
    return Sample(
        tokens=Array.of(tokens),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -np.log(vocabulary), 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
        reward=float(tokens[-1] % 2),
        finish="stop",
    )
