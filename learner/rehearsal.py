"""Two microbatches of made-up samples, which each rank computes while the servers sample the first batch.

The pass compiles the model's blocks, so the first batch need not wait for that, and it allocates what a full microbatch
takes: a run that would run out of memory ends at its start. Nothing is trained: the gradients are thrown away, and no
random generator of the process is used. `Algorithm.rehearse` makes the pass, `SoundSteps.warm_up` calls it.

Only on GPUs: on a CPU nothing is compiled. Not for models that read images or replay routes, whose samples have more
than tokens; they compile with their first batch.
"""

import numpy as np

from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats
from buffer.wire.split import Groups, parts
from configs.checks import max_sample_tokens
from configs.schema import Config
from learner.model.policy import Policy
from learner.train.batch import LEAST_SAVED

MICROBATCHES = 2
"""The second one finds the first one's gradients in memory, as in most batches."""
PLAIN = 256
"""Token ids below it are drawn: special tokens have higher ones in most vocabularies."""


def own_part(config: Config, policy: Policy, budget: int, vocabulary: int, part: int, number: int) -> Part | None:
    """Part `part` of the `number` of `made_up`; None where nothing is to be tried."""
    if policy.device.type == "cpu" or policy.sight is not None or policy.replayed is not None:
        return None
    return made_up(config, budget, vocabulary, number, policy.share_prompts)[part]


def made_up(config: Config, budget: int, vocabulary: int, number: int, share_prompts: bool) -> list[Part]:
    """The parts, `number` of them, of a batch that fills MICROBATCHES microbatches of `budget` tokens in each.

    The documents are as long as the run's longest samples; half of one is its prompt, or `data.max_prompt_tokens` if
    that is less. `vocabulary`: the model's; `share_prompts` as in `Policy`.
    """
    draw = np.random.default_rng(0)
    groups: Groups = [
        (item, 0, [(data, sample_stats(data)) for data in group])
        for item, group in enumerate(
            _group(draw, config, budget, vocabulary, share_prompts) for _ in range(MICROBATCHES * number)
        )
    ]
    return parts(0, number, groups, share_prompts=share_prompts)


def _group(draw: np.random.Generator, config: Config, budget: int, vocabulary: int, shared: bool) -> list[bytes]:
    """Packed samples of one problem that fill a microbatch."""
    longest = max_sample_tokens(config)
    prompt = max(min(longest // 2, config.data.max_prompt_tokens), 1)
    answer = longest - prompt
    number = max((budget - prompt) // answer if shared else budget // longest, 1)
    saved = (number - 1) * prompt / (number * longest)
    if shared and saved < LEAST_SAVED:  # then each sample has its prompt in the row
        number = max(budget // longest, 1)
    tokens = draw.integers(0, min(vocabulary, PLAIN), (number, longest)).astype(np.int32)
    tokens[:, :prompt] = tokens[0, :prompt]
    return [_sample(row, prompt, vocabulary).pack() for row in tokens]


def _sample(tokens: np.ndarray, prompt: int, vocabulary: int) -> Sample:
    """A sample whose log-probabilities are those of a uniform policy."""
    sampled = np.arange(len(tokens)) >= prompt
    return Sample(
        tokens=Array.of(tokens),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -np.log(vocabulary), 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
        reward=float(tokens[-1] % 2),
        finish="stop",
    )
