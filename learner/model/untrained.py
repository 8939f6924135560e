"""Keeps weights that a model's own code never trains, such as the correction bias of a router, as they are.

Vectors become persistent buffers: whole on each rank and in float32, because the precision of training would move them;
in checkpoints, exports and what servers get; without gradient. Matrices stay parameters, which are sharded, and frozen.
"""

from collections.abc import Iterable

from torch import Tensor
from transformers import PreTrainedModel

from learner.model.idle_parts import idle_names


def keep_vectors(model: PreTrainedModel) -> None:
    """Make buffers of the vectors that the model's code freezes, but for idle parts, which are frozen as a whole."""
    idle = idle_names(model)
    frozen = [(name, each) for name, each in model.named_parameters() if not each.requires_grad and name not in idle]
    make_buffers(model, [name for name, parameter in frozen if _is_vector(parameter)])


def make_buffers(model: PreTrainedModel, names: Iterable[str]) -> None:
    """Make persistent buffers of these parameters."""
    for name in names:
        owner, _, leaf = name.rpartition(".")
        module, parameter = model.get_submodule(owner), model.get_parameter(name)
        delattr(module, leaf)
        module.register_buffer(leaf, parameter.data)


def set_trained(model: PreTrainedModel, trained: bool) -> None:
    """Train all parameters, or none; those that the model's code freezes stay frozen."""
    for parameter in model.parameters():
        parameter.requires_grad_(trained and parameter.requires_grad)


def _is_vector(weight: Tensor) -> bool:
    return weight.numel() == max(weight.shape, default=1)
