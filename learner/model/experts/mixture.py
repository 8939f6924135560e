"""A mixture of experts: its blocks, and how rows are routed."""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from configs.expert_models import REPLAYED, is_expert_layer
from configs.load import ConfigError
from configs.model_facts import num_experts
from learner.model.experts.router import FIGURES, RoutedLayer, Router, Routing
from learner.model.microbatch import Microbatch

IMPLEMENTATION = "grouped_mm"
"""One product takes all of a block's experts."""


TAKEN = ("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts", "experts_per_token", "num_experts_per_token")
"""Keys that count the experts of a token."""


class Experts(NamedTuple):
    """Example: `Experts(layers=48, number=128, top_k=8)` for Qwen3-30B-A3B."""

    layers: int
    number: int
    top_k: int


def has_experts(config: Any) -> bool:
    """Whether a config counts experts, for what is decided before the model is built."""
    return num_experts(config.get_text_config().to_dict()) > 0


def has_expert_layers(model: nn.Module) -> bool:
    """Whether the model, as it is built, has layers of experts; a dense one's config may count experts."""
    modules = ((name.rpartition(".")[2], type(module).__name__) for name, module in model.named_modules())
    return any(is_expert_layer(*each) for each in modules)


def check_experts(config: Any, path: str, replay: bool) -> None:
    """Raise ConfigError if a model cannot `replay` routes."""
    kind = config.get_text_config().model_type
    if replay and not has_experts(config):
        problem = f"rollout.routing_replay: true, and model.path {path} has no experts"
        raise ConfigError([f"{problem}; set it to false"])
    if replay and kind not in REPLAYED:
        known = f"the learner replays routes of {', '.join(REPLAYED)} only"
        raise ConfigError(
            [f"rollout.routing_replay: true, and model.path {path} is of type {kind}; {known}; set it to false"]
        )


def experts_of(block: nn.Module) -> nn.Module | None:
    """The module whose weights are [experts, ...]."""
    return next((layer for layer in block.modules() if type(layer).__name__.endswith("Experts")), None)


def share_taken(experts: nn.Module, config: Any) -> float:
    """Share of a block's experts that a token takes."""
    number = next(len(parameter) for parameter in experts.parameters() if parameter.dim() > 2)
    taken = next((k for key in TAKEN if isinstance(k := getattr(config, key, None), int)), number)
    return taken / number


class Mixture:
    """The routers of a model."""

    def __init__(self, sizes: Experts) -> None:
        self.sizes = sizes
        self.tally = torch.zeros(0)
        """Written by the last forward pass with gradient: [layers, experts + FIGURES] float32."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Mixture | None":
        """Have blocks on meta route by `Router`. None for types where that is not proven."""
        if model.config.get_text_config().model_type not in REPLAYED:
            return None
        layers = [layer for layer in model.get_decoder().layers if experts_of(layer) is not None]  # type: ignore[no-untyped-call]
        if not layers:
            return None
        for number, layer in enumerate(layers):
            layer.mlp.gate = Router(layer.mlp.gate)
            layer.__class__ = RoutedLayer
            layer.register_forward_pre_hook(partial(_hand_over, number), with_kwargs=True)
        config = model.config.get_text_config()
        return cls(Experts(len(layers), config.num_experts, config.num_experts_per_tok))

    def keywords(self, microbatch: Microbatch) -> dict[str, Any]:
        """The decoder's further arguments. With gradient, routing is tallied."""
        tally = None
        if torch.is_grad_enabled():
            shape = self.sizes.layers, self.sizes.number + FIGURES
            tally = self.tally = torch.zeros(shape, device=microbatch.tokens.device)
        elif microbatch.routes is None:
            return {}
        held = microbatch.held
        routes = None if microbatch.routes is None else microbatch.routes[:, held]
        return {"routing": Routing(_counted(microbatch)[held], routes, tally)}


def _hand_over(number: int, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Not compiled: there would be a graph for each `number`."""
    routing: Routing | None = kwargs.get("routing")
    return args, kwargs | {"routing": routing and routing.layer(number)}


def _counted(microbatch: Microbatch) -> Tensor:
    """Servers do not compute a document's last token: bool [tokens]."""
    counted = torch.full_like(microbatch.tokens, len(microbatch.scored) > 0, dtype=torch.bool)
    if microbatch.own is not None:
        counted[microbatch.own.filled_from :] = False
    return counted.index_fill(0, (microbatch.cu_seqlens[1 + len(microbatch.groups) :] - 1).long(), False)


def load_metrics(tally: Tensor, sizes: Experts, replayed: bool) -> dict[str, float]:
    """Means over layers from a batch's tallies; entropies in nats a token."""
    loads, (entropies, agreeing, tokens) = tally[:, : sizes.number].double(), tally[:, sizes.number :].double().T
    found = {
        "moe/load_max_over_mean": float((loads.amax(-1) / loads.mean(-1)).mean()),
        "moe/experts_unused": float((loads == 0).double().mean()),
        "moe/router_entropy": float((entropies / tokens).mean()),
    }
    return found | ({"moe/routes_agree": float(agreeing.sum() / tokens.sum() / sizes.top_k)} if replayed else {})
