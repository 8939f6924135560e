"""The loss and the advantages of the run file: a built-in one by name, or a user's own by `path/to/file.py:function`.

A user's loss is `loss(inputs, config)` and returns the loss of each token, [tokens]; a user's advantage is
`advantage(rewards, groups, lengths)` and returns [samples]. The rest is as with built-in ones: aggregation, penalties,
diagnostics. What a function returns is judged at each call as far as that waits for no GPU; `own_trial.py` judges the
rest before anything is trained.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from configs.user_file import load_function
from learner.algorithms.advantages import ADVANTAGES, Advantage
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, Loss, TokenLosses


def loss_of(config: AlgorithmConfig) -> Loss:
    """The loss that `algorithm.loss` names. Raises ValueError, in one line, for a file that cannot be imported."""
    if config.loss in LOSSES:
        return LOSSES[config.loss]
    return Loss(OwnLoss(config.loss, load_function("algorithm.loss", config.loss)), tokenwise=False)


def advantage_of(config: AlgorithmConfig) -> Advantage:
    """The function that `algorithm.advantage` names. Raises ValueError as `loss_of` does."""
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage]
    return OwnAdvantage(config.advantage, load_function("algorithm.advantage", config.advantage))


class OwnLoss:
    """A user's loss as one of `LOSSES`. Raises ValueError for a result that is not the loss of each token."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
        """[tokens] each; masked and capped are the user's if the function returns `TokenLosses`."""
        made = self.function(inputs, config)
        if not isinstance(made, TokenLosses):
            none = torch.zeros_like(inputs.sampled)
            made = TokenLosses(made, none, none)
        for part in made:
            must_have(
                "algorithm.loss", self.name, part, inputs.policy_logprobs.shape, "the loss of each token, [tokens]"
            )
        return made


class OwnAdvantage:
    """A user's advantage as one of `ADVANTAGES`. Raises ValueError for a result that is not one number per sample."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[samples], without gradient."""
        made = self.function(rewards, groups, lengths)
        must_have("algorithm.advantage", self.name, made, rewards.shape, "a number for each sample, [samples]")
        return made.detach()  # type: ignore[no-any-return]


def must_have(key: str, name: str, made: object, shape: torch.Size, wanted: str) -> None:
    """Raise ValueError unless `made` is a tensor of this shape: torch would broadcast another one in silence."""
    if isinstance(made, Tensor) and made.shape == shape:
        return
    found = (
        f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"an object of {type(made).__name__}"
    )
    raise ValueError(f"{key}: {name} returns {found} where {list(shape)} is needed; return {wanted}")
