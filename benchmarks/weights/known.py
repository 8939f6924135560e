"""Weights of full size whose distribution over the next token is known exactly, whatever the context.

The residual stream is the last token's embedding and nothing else: what attention and MLP add to it is scaled down so
far that bfloat16 rounds it away, while they do all their work. Embedding and head are +1 and -1, so the last norm gives
exactly +1 or -1, and its weight is 0 but for the first coordinate: a logit is `weight * hidden[0] * head[token, 0]`.
(Exactly 0: where head and embedding are one tensor, a token's own row meets itself in all coordinates at once.)
Used in two ways. `mark` makes the version show in every token's log-probability: the head's first column is +1 for even
and -1 for odd tokens, and each version has another weight. `end_answers` makes the length of an answer geometric: the
column is 1 for all tokens but the one that ends an answer. There the second coordinate counts too: it is +1 for
`TEXT_TOKENS` tokens and -1 for all others, so that after one of the first ones none of the others is sampled.
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

TINY = 2.0**-20
VERSIONS = 32
"""After so many versions the marks repeat."""
TEXT_TOKENS = 4096
"""Different tokens of all answers: 400 overlapping pieces of 512 tokens of this project's documentation have 3,640
(SmolLM2's tokenizer), and making text of them takes half as long as of tokens from a whole vocabulary, which no cache
holds."""
APART = 16.0
"""The last norm's weight for the second coordinate: two tokens that it tells apart differ by a factor of exp(32)."""


def local(parameter: Tensor) -> Tensor:
    """This rank's shard."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter.data


@torch.no_grad()
def silence(parameters: Iterable[tuple[str, Tensor]]) -> tuple[list[Tensor], Tensor]:
    """Make random weights the ones above. Returns the first two columns of embedding and head, which are one tensor in
    a model that ties them, and the weight of the last norm."""
    columns, last = [], torch.empty(0)
    for name, parameter in parameters:
        if ".visual." in name:  # the tower: what it sees changes no text here
            continue
        shard = local(parameter)
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            shard.mul_(TINY)
        elif name.endswith(("embed_tokens.weight", "lm_head.weight")):
            shard.copy_(torch.where(shard < 0, -1.0, 1.0))
            columns.append(shard[:, :2])
        elif name.endswith("model.norm.weight"):
            last = shard
            shard.zero_()
    return columns, last


@torch.no_grad()
def end_answers(parameters: Iterable[tuple[str, Tensor]], token: int, vocabulary: int, mean: float) -> None:
    """`token` has probability 1 / `mean`, none for 0; of the first TEXT_TOKENS (of all in a smaller `vocabulary`) the
    others are equally likely, and a prompt ends with one of them. One rank only."""
    columns, last = silence(parameters)
    sampled = min(TEXT_TOKENS, vocabulary)
    for two in columns:
        two.fill_(1.0)
        two[sampled:, 1] = -1.0
    columns[-1][token, 0] = 1.0 + math.log((sampled - 1) / (mean - 1.0)) if mean else -50.0
    last[0], last[1] = 1.0, APART


@torch.no_grad()
def mark(parameters: Iterable[tuple[str, Tensor]]) -> Tensor:
    """Prepare for `show`; returns the weight of the last norm. Each rank's first row must be even."""
    columns, last = silence(parameters)
    for two in columns:
        two[:, 0] = 1.0
        two[1::2, 0] = -1.0
    return last


def weight_of(version: int) -> float:
    """The last norm's first weight at `version`, which bfloat16 holds exactly."""
    return (1 + version % VERSIONS) / 16


def show(last: Tensor, version: int, rank: int) -> None:
    """Set the last norm to `version`."""
    if rank == 0:
        last[0] = weight_of(version)


def logprobs_of(version: int, vocabulary: int) -> tuple[float, float]:
    """The two log-probabilities that a token can have at `version`: as even or odd as the token before it, or not."""
    weight = weight_of(version)
    normalizer = math.log(vocabulary / 2) + math.log(math.exp(weight) + math.exp(-weight))
    return weight - normalizer, -weight - normalizer
