"""The router of a mixture of experts, in float32: which experts a token takes, how much of each, and what is counted.

Consumes hidden states in the model's dtype and, where routes are replayed, the expert ids that the server chose; these
come as arguments of the block's forward pass, so a recomputation in the backward pass gets the same ones. Put in place
of transformers' router by `mixture.py`; waits for nothing.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

FIGURES = 3
"""Entries of a tally after the loads: entropies of the tokens, choices that agree with the routes, tokens."""


class Routing:
    """What routers are given of a row: all of them, or with `layer` one of them, without the first dimension.

    `counted`: bool [tokens], those that the tally counts. `routes`: integers [layers, tokens, k], expert ids to take;
    None: the router chooses. `tally`: float32 [layers, experts + FIGURES], written, not added to, so that a
    recomputation changes nothing; None: nothing is counted. No dataclass: of one FSDP would hand over a copy, with its
    tensors in the model's dtype.
    """

    def __init__(self, counted: Tensor, routes: Tensor | None, tally: Tensor | None) -> None:
        self.counted, self.routes, self.tally = counted, routes, tally

    def layer(self, number: int) -> "Routing":
        """The routing of one router."""
        routes, tally = (None if x is None else x[number] for x in (self.routes, self.tally))
        return Routing(self.counted, routes, tally)


class Router(nn.Module):
    """A linear layer with the weight of transformers' `theirs`, under its name, and a softmax.

    The product is of the hidden states and the weight as both are in the model's dtype, which is what a server has, but
    its terms are added up, and stay, in float32.
    """

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = theirs.weight
        self.top_k: int = theirs.top_k
        self.normalised: bool = theirs.norm_topk_prob
        self.routing: Routing | None = None
        """The routing of the present forward pass."""

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, experts] float32, weights and ids of the experts taken: [tokens, k] float32 and int64.

        A weight is the softmax's at an id, over those of all k if `normalised`. Its gradient reaches the logits whether
        the ids are chosen or replayed. It is computed from differences of logits, so that no id has a weight of 0 / 0.
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        logits = linear(hidden.to(wide), self.weight.to(wide))
        own, routing = logits.detach().topk(self.top_k, dim=-1).indices, self.routing
        ids = own if routing is None or routing.routes is None else routing.routes.long()
        chosen = logits.gather(-1, ids)
        weights = chosen.softmax(-1) if self.normalised else (chosen - logits.logsumexp(-1, keepdim=True)).exp()
        if routing is not None and routing.tally is not None:
            routing.tally.copy_(tallied(logits.detach(), ids, own, routing.counted))
        return logits, weights, ids


def tallied(logits: Tensor, ids: Tensor, own: Tensor, counted: Tensor) -> Tensor:
    """How often each expert is taken, then the FIGURES, of the tokens that are `counted`: [experts + FIGURES] float32.

    `logits` [tokens, experts]; `ids`, `own` [tokens, k]: experts that are taken, and those the router would choose.
    """
    counts, share = counted.float(), logits.float().softmax(-1)
    taken = counts.new_zeros(logits.shape[-1]).index_add(0, ids.flatten(), counts.repeat_interleave(ids.shape[-1]))
    entropies = -(share * share.clamp(min=torch.finfo(share.dtype).tiny).log()).sum(-1)
    agreeing = (ids[:, :, None] == own[:, None, :]).any(-1).sum(-1)
    return torch.cat([taken, torch.stack([(entropies * counts).sum(), (agreeing * counts).sum(), counts.sum()])])


class RoutedLayer(Qwen3MoeDecoderLayer):
    """transformers' block, which passes its routing on to its router."""

    def forward(self, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Tensor:
        """As in `Qwen3MoeDecoderLayer`; `routing` is this block's own."""
        router: Any = self.mlp.gate
        router.routing = routing
        hidden: Tensor = super().forward(*args, **kwargs)
        return hidden
