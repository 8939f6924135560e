"""The value head: a linear layer to one number in place of the output embedding.

It begins as zeros: values are 0 until the critic has learned.
"""

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from learner.model.loading import VALUE_HEAD


class ValueHead(nn.Module):
    """Hidden states [tokens, hidden_size] -> values [tokens]."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.register_parameter(VALUE_HEAD, nn.Parameter(torch.empty(hidden_size)))

    @property
    def weight(self) -> nn.Parameter:
        """[hidden_size]"""
        return self.get_parameter(VALUE_HEAD)


def replace_head(model: PreTrainedModel) -> None:
    """Replace the output embedding of `model`, on meta, by a value head."""
    width = model.get_output_embeddings().weight.shape[1]  # type: ignore[no-untyped-call]
    with torch.device("meta"):
        model.set_output_embeddings(ValueHead(width))  # type: ignore[arg-type]


def values(model: PreTrainedModel, hidden: Tensor) -> Tensor:
    """Value of the state after each token: [tokens] float32 or wider."""
    head: ValueHead = model.get_output_embeddings()  # type: ignore[assignment]
    wide = torch.promote_types(hidden.dtype, torch.float32)
    return hidden.to(wide) @ head.weight.to(wide)
