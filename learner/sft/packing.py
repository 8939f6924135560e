"""This rank's microbatches of texts, as many as on every rank."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch.distributed as dist

from buffer.data.images import SeenImage
from learner.model.microbatch import Microbatch, lay_out
from learner.model.policy import Policy
from learner.sft.answers import TrainedText
from learner.sft.row_images import DemonstratedImages
from learner.train.batch import balance, first_fit, pack
from learner.train.pictures import Piece, num_patches, room, show


def microbatches(
    policy: Policy, texts: Sequence[TrainedText], images: DemonstratedImages | None, budget: int
) -> Iterator[Microbatch]:
    """This rank's rows of `texts`, on the CPU. With images a collective, which raises ImageChanged."""
    return rows_of(own_cut(policy, texts, budget), images)


def own_cut(policy: Policy, texts: Sequence[TrainedText], budget: int) -> list[list[TrainedText]]:
    """The texts of each of this rank's microbatches."""
    costs = policy.costs.quadratic, policy.costs.patch_cost
    return cut(texts, dist.get_rank(), dist.get_world_size(), budget, *costs)


def rows_of(cuts: Sequence[Sequence[TrainedText]], images: DemonstratedImages | None) -> Iterator[Microbatch]:
    """A row for each of `cuts`. Images are decoded when their row is asked for, as a collective."""
    for chosen in cuts:
        yield laid_out(chosen, images.open([text.images for text in chosen]) if images else ())


def cut(
    texts: Sequence[TrainedText], rank: int, world: int, budget: int, quadratic: float = 0.0, patch_cost: float = 0.0
) -> list[list[TrainedText]]:
    """At most `budget` tokens a microbatch, a longer text alone. A text of n tokens and p patches costs n + quadratic *
    n² + patch_cost * p."""
    sizes = [room(len(text.tokens), text.images) for text in texts]
    costs = [n + quadratic * n * n for n in (len(text.tokens) for text in texts)]
    costs = [cost + patch_cost * num_patches(text.images) for cost, text in zip(costs, texts, strict=True)]
    shares = balance(sizes, costs, sum(sizes), world)
    number = max(max(len(first_fit([sizes[i] for i in share], budget)) for share in shares), 1)
    own = shares[rank]
    bins = balance([sizes[i] for i in own], [costs[i] for i in own], budget, number)
    return [[texts[own[i]] for i in chosen] for chosen in bins]


def laid_out(texts: Sequence[TrainedText], seen: Sequence[Sequence[SeenImage]] = ()) -> Microbatch:
    """A row of whole texts; of none, a dummy. `seen`: the images of each, empty if none has some."""
    if not texts:
        return pack([])
    tokens, trained = [text.tokens for text in texts], [text.trained for text in texts]
    zeros = [np.zeros(len(each)) for each in tokens]
    row = lay_out(tokens, trained, zeros, [each - 1 for each in zeros], [0] * len(texts))
    return show(row, [Piece(images, len(text), slice(None)) for images, text in zip(seen, tokens, strict=False)])


def num_trained(texts: Sequence[TrainedText]) -> int:
    """Trained tokens of all texts."""
    return sum(int(text.trained.sum()) for text in texts)
