"""The router of a mixture of experts, in float32.

Routes are arguments of the block's forward pass, so a recomputation gets the same ones.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeDecoderLayer

FIGURES = 3
"""Entries behind a tally's loads: entropies, choices that agree with the routes, tokens."""


class Routing:
    """What routers are given of a row.

    `counted`: bool [tokens], for the tally. `routes`: integers [layers, tokens, k]; None: the router chooses. `tally`:
    float32 [layers, experts + FIGURES], written, not added to, so recomputation changes nothing. No dataclass: FSDP
    would hand over a copy, in the model's dtype.
    """

    def __init__(self, counted: Tensor, routes: Tensor | None, tally: Tensor | None) -> None:
        self.counted, self.routes, self.tally = counted, routes, tally

    def layer(self, number: int) -> "Routing":
        routes, tally = (None if x is None else x[number] for x in (self.routes, self.tally))
        return Routing(self.counted, routes, tally)


class Router(nn.Module):
    """A linear layer with transformers' weight under its name, and a softmax."""

    def __init__(self, theirs: Any) -> None:
        super().__init__()
        self.weight: nn.Parameter = theirs.weight
        self.top_k: int = theirs.top_k
        self.normalised: bool = theirs.norm_topk_prob
        self.routing: Routing | None = None

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits [tokens, experts] float32; weights and ids of the experts taken: [tokens, k] float32 and int64.

        Weights come from differences of logits, so that none is 0 / 0.
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
    """How often each expert is taken, then the FIGURES: [experts + FIGURES] float32.

    `own` [tokens, k]: the experts that the router would choose.
    """
    counts, share = counted.float(), logits.float().softmax(-1)
    taken = counts.new_zeros(logits.shape[-1]).index_add(0, ids.flatten(), counts.repeat_interleave(ids.shape[-1]))
    entropies = -(share * share.clamp(min=torch.finfo(share.dtype).tiny).log()).sum(-1)
    agreeing = (ids[:, :, None] == own[:, None, :]).any(-1).sum(-1)
    return torch.cat([taken, torch.stack([(entropies * counts).sum(), (agreeing * counts).sum(), counts.sum()])])


class RoutedLayer(Qwen3MoeDecoderLayer):
    """transformers' block, which passes its routing on."""

    def forward(self, *args: Any, routing: Routing | None = None, **kwargs: Any) -> Tensor:
        router: Any = self.mlp.gate
        router.routing = routing
        hidden: Tensor = super().forward(*args, **kwargs)
        return hidden
