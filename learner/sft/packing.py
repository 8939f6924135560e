"""This rank's microbatches of texts, as many as on every rank."""

from collections.abc import Sequence

import numpy as np

from learner.model.microbatch import Microbatch, lay_out
from learner.sft.answers import TrainedText
from learner.train.batch import balance, first_fit, pack


def microbatches(
    texts: Sequence[TrainedText], rank: int, world: int, budget: int, quadratic: float = 0.0
) -> list[Microbatch]:
    """At most `budget` tokens each, a longer text alone. A text of n tokens costs n + quadratic * n²."""
    lengths = [len(text.tokens) for text in texts]
    costs = [n + quadratic * n * n for n in lengths]
    shares = balance(lengths, costs, sum(lengths), world)
    number = max(max(len(first_fit([lengths[i] for i in share], budget)) for share in shares), 1)
    own = shares[rank]
    cut = balance([lengths[i] for i in own], [costs[i] for i in own], budget, number)
    return [laid_out([texts[own[i]] for i in chosen]) for chosen in cut]


def laid_out(texts: Sequence[TrainedText]) -> Microbatch:
    """A row of whole texts; of none, a dummy."""
    if not texts:
        return pack([])
    tokens, trained = [text.tokens for text in texts], [text.trained for text in texts]
    zeros = [np.zeros(len(each)) for each in tokens]
    return lay_out(tokens, trained, zeros, [each - 1 for each in zeros], [0] * len(texts))


def num_trained(texts: Sequence[TrainedText]) -> int:
    """Trained tokens of all texts."""
    return sum(int(text.trained.sum()) for text in texts)
