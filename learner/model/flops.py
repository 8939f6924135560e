"""The FLOPs of a batch, and model FLOPs utilisation (MFU).

    FLOPs = 6 (B t + V s) + 6 L a q      MFU = FLOPs / (seconds x GPUs x peak)

docs/design/learner.md explains the letters. 6 is 2 in the forward and 4 in the backward pass, 4 in all for a frozen
matrix. A layer's multiplications with a state add to B. A tower adds c p + d p² for each image of p patches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from configs.flow.cards import card_of
from learner.model import state
from learner.model.experts.mixture import experts_of, share_taken
from learner.model.loading import blocks
from learner.model.towers import tower_parts


@dataclass(frozen=True)
class TowerCosts:
    """FLOPs of a tower's forward pass and, where it is trained, backward pass."""

    per_patch: float
    per_pair: float
    """Attention, per squared patch of an image."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "TowerCosts | None":
        """A matrix costs 2 forward, 2 for its own gradient and 2 for its input's, if wanted."""
        parts = tower_parts(model)
        if parts is None:
            return None
        config: Any = model.config.vision_config
        layers = parts.blocks
        trained = any(p.requires_grad for p in layers[0].parameters())
        projected = any(p.requires_grad for p in parts.projectors[0].parameters())
        passes = 3 if trained else 1
        full = getattr(config, "fullatt_block_indexes", range(len(layers)))
        window = (getattr(config, "window_size", 0) // config.patch_size) ** 2
        pairs = 4.0 * passes * config.hidden_size
        per_patch = 2.0 * passes * sum(map(_matrices, layers)) + pairs * window * (len(layers) - len(full))
        per_patch += 2.0 * (1 + trained) * _matrices(parts.embedding)
        back = projected + (trained or projected)  # the projector begins with a norm
        per_patch += 2.0 * (1 + back) * sum(map(_matrices, parts.projectors)) / parts.merge**2
        return cls(per_patch, pairs * len(full))

    def total(self, patches: Iterable[int]) -> float:
        return sum(p * (self.per_patch + self.per_pair * p) for p in patches)


@dataclass(frozen=True)
class Costs:
    """FLOPs of both passes. Example: `Costs(per_token=6, per_trainable=2, per_pair=1)`."""

    per_token: float
    per_trainable: float
    per_pair: float
    """Attention, per squared token."""
    tower: TowerCosts | None = None

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        config, layers = model.config.get_text_config(), blocks(model)
        width = sum(_width(config, number) for number, layer in enumerate(layers) if state.attends(layer))
        products = sum(map(_products, layers)) - _idle(model, _products)
        products += 3 * sum(state.products(each) for layer in layers for each in state.layers_of(layer))
        head: nn.Parameter = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return cls(2.0 * products, 2.0 * _passes(head) * head.numel(), 6.0 * width)

    def total(self, tokens: float, trainable: float, squares: float) -> float:
        """`squares`: q, the sum of squared lengths."""
        return self.per_token * tokens + self.per_trainable * trainable + self.per_pair * squares

    @property
    def quadratic(self) -> float:
        """The q of n + q n² for n tokens."""
        return self.per_pair / (self.per_token + self.per_trainable)

    @property
    def patch_cost(self) -> float:
        """FLOPs of a tower's patch over those of a text model's token."""
        return self.tower.per_patch / (self.per_token + self.per_trainable) if self.tower else 0.0


def _width(config: Any, number: int) -> int:
    """Blocks may have sizes of their own (Gemma 4) or latent keys and values (DeepSeek)."""
    own = config.per_layer_config[number] if getattr(config, "is_heterogeneous", False) else config
    heads: int = own.num_attention_heads
    if getattr(own, "kv_lora_rank", None):
        both: int = own.qk_nope_head_dim + own.qk_rope_head_dim + own.v_head_dim
        return heads * both // 2
    size: int = getattr(own, "head_dim", None) or own.hidden_size // heads
    return heads * size


def active_parameters(model: PreTrainedModel) -> int:
    """Parameters that a token meets: of experts only those it takes."""
    return int(model.num_parameters()) - _idle(model, _matrices)


def _passes(parameter: nn.Parameter) -> int:
    return 3 if parameter.requires_grad else 2


def _products(module: nn.Module) -> int:
    return sum(_passes(p) * p.numel() for p in module.parameters() if p.dim() > 1)


def _matrices(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters() if p.dim() > 1)


def _idle(model: PreTrainedModel, size: Callable[[nn.Module], int]) -> int:
    config = model.config.get_text_config()
    found = [experts for layer in blocks(model) if (experts := experts_of(layer)) is not None]
    return sum(round(size(experts) * (1 - share_taken(experts, config))) for experts in found)


def peak(name: str) -> float | None:
    """Peak FLOP/s of the GPU called `name`."""
    card = card_of(name)
    return card.peak if card else None
