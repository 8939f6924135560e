"""The arithmetic a batch needs, and the share of the GPUs' peak that is (model FLOPs utilisation, MFU).

    FLOPs = 6 (B t + V s) + 6 L a q      MFU = FLOPs / (seconds x GPUs x peak)

B: parameters of all blocks' matrices; t: real tokens, prompt and answer; V: parameters of the output embedding; s:
scored tokens; L: blocks; a: heads x their width; q: sum of the squared lengths (causal attention: half of all pairs).
6 = 2 in the forward and 4 in the backward pass. What is computed twice (checkpointing, some losses' logits) and padding
do not count, nor does the look-up of embeddings. Pure; used by `learner.step` and `learner.metrics`.
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
"""Dense bf16 FLOP/s of the vendor's datasheets, by what the GPU's name contains."""


@dataclass(frozen=True)
class Costs:
    """FLOPs of forward and backward pass. Example: `Costs(by_token=6, by_scored=2, by_pair=1)`."""

    by_token: float
    by_scored: float
    by_pair: float
    """For each token and token of its document before it, counted as length squared."""

    @classmethod
    def of(cls, model: PreTrainedModel) -> "Costs":
        config, layers = model.config.get_text_config(), blocks(model)
        heads = config.num_attention_heads
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
        matrices = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
        head: nn.Parameter = model.get_output_embeddings().weight  # type: ignore[no-untyped-call]
        return cls(6.0 * matrices, 6.0 * head.numel(), 6.0 * len(layers) * width)

    def total(self, documents: Iterable[tuple[int, int]]) -> float:
        """FLOPs of documents of (tokens, scored tokens) each."""
        return sum(n * (self.by_token + self.by_pair * n) + self.by_scored * scored for n, scored in documents)


def peak(name: str) -> float | None:
    """Peak of the GPU `name`, e.g. "NVIDIA H200"; None where it is not known."""
    words = name.replace("-", " ").split()
    return next((speed for known, speed in PEAKS.items() if known in words), None)
