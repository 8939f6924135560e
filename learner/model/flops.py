"""The FLOPs that a batch needs, and what share of the GPUs' peak that is (model FLOPs utilisation, MFU).

    FLOPs = 6 (B t + V s) + 6 L a q      MFU = FLOPs / (seconds x GPUs x peak)

B: parameters of all blocks' matrices; t: real tokens, prompt and answer; V: parameters of the output embedding; s:
trainable tokens; L: blocks; a: heads x head dimension; q: sum of the squared document lengths (causal attention: half
of all pairs). 6 = 2 in the forward and 4 in the backward pass. Recomputation (checkpointing, some losses' logits),
padding and embedding look-ups do not count. Pure; used by `learner/train/step.py` and `learner/metrics.py`.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn
from transformers import PreTrainedModel

from learner.model.loading import blocks

PEAKS = {
    "H200": 989e12,
    "H100": 989e12,
    "H800": 989e12,
    "H20": 148e12,
    "B200": 2250e12,
    "A100": 312e12,
    "A800": 312e12,
    "L40S": 362e12,
}
"""Dense bf16 FLOP/s according to the vendor's datasheets, by a word of the GPU's name."""


@dataclass(frozen=True)
class Costs:
    """FLOPs of forward and backward pass. Example: `Costs(per_token=6, per_trainable=2, per_pair=1)`."""

    per_token: float
    per_trainable: float
    per_pair: float
    """Attention, per squared token of a document's length."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        """The costs of `model`, counted from its parameters."""
        config, layers = model.config.get_text_config(), blocks(model)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
        head: nn.Parameter = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return cls(6.0 * matrices, 6.0 * head.numel(), 6.0 * len(layers) * width)

    def total(self, documents: Iterable[tuple[int, int]]) -> float:
        """FLOPs of documents of (tokens, trainable tokens) each."""
        return sum(n * (self.per_token + self.per_pair * n) + self.per_trainable * m for n, m in documents)


def peak(name: str) -> float | None:
    """Peak FLOP/s of the GPU called `name`, e.g. "NVIDIA H200"; None if unknown."""
    words = name.replace("-", " ").split()
    return next((speed for known, speed in PEAKS.items() if known in words), None)
