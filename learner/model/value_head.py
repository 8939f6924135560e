"""The value head: a linear layer from the last hidden states to one number, in place of the output embedding.

A state's value is what the critic expects of the rewards that are still to come. The head begins as zeros, so that
every state's value is 0 until the critic has learned. Put into the model while it is on the meta device; used by
`policy.py` and, for arithmetic without weights, by `memory.py`.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.model.loading import VALUE_HEAD


class ValueHead(nn.Module):
    """Example: for hidden states [tokens, 896] one vector [896] gives values [tokens]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.register_parameter(VALUE_HEAD, nn.Parameter(torch.empty(hidden_size)))

    @property
    def weight(self) -> nn.Parameter:
        """[hidden_size]"""
        return self.get_parameter(VALUE_HEAD)


def replace_head(model: PreTrainedModel) -> None:
    """Make `model`, on the meta device, a critic: it gives up its output embedding for a value head."""
    width = model.get_output_embeddings().weight.shape[1]  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        model.set_output_embeddings(ValueHead(width))  # type: ignore[arg-type]


def values(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Value of the state after each token, given its hidden states [tokens, hidden_size]: [tokens] float32 (float64 for
    float64 input)."""
    head: ValueHead = model.get_output_embeddings()  # type: ignore[assignment]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ head.weight.to(wide)
