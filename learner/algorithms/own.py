"""Losses and advantages by name, or a user's own by `path/to/file.py:function`.

Checks at each call wait for no GPU; `own_trial.py` makes the others before training.
"""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import AlgorithmConfig
from configs.user_file import load_function
from learner.algorithms.advantages import ADVANTAGES, Advantage
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, Loss, TokenLosses

DEVICE_ERRORS = (torch.OutOfMemoryError, torch.AcceleratorError, dist.DistError)


class OwnFailure(ValueError):
    """A user's function fails or returns what cannot be trained on. A restart would repeat it."""


def loss_of(config: AlgorithmConfig) -> Loss:
    """The loss that `algorithm.loss` names. Raises ValueError if its file cannot be imported."""
    if config.loss in LOSSES:
        return LOSSES[config.loss]
    return Loss(OwnLoss(config.loss, load_function("algorithm.loss", config.loss)), tokenwise=False)


def advantage_of(config: AlgorithmConfig) -> Advantage:
    if config.advantage in ADVANTAGES:
        return ADVANTAGES[config.advantage]
    return OwnAdvantage(config.advantage, load_function("algorithm.advantage", config.advantage))


class OwnLoss:
    """A user's loss as one of `LOSSES`. Raises OwnFailure."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, inputs: LossInputs, config: AlgorithmConfig) -> TokenLosses:
        made = result_of("algorithm.loss", self.name, self.function, inputs.copy(), config)
        if not isinstance(made, TokenLosses):
            none = torch.zeros_like(inputs.sampled)
            made = TokenLosses(made, none, none)
        for part in made:
            must_have(
                "algorithm.loss", self.name, part, inputs.policy_logprobs.shape, "the loss of each token, [tokens]"
            )
        return made


class OwnAdvantage:
    """A user's advantage as one of `ADVANTAGES`. Raises OwnFailure."""

    def __init__(self, name: str, function: Callable[..., Any]) -> None:
        self.name, self.function = name, function

    def __call__(self, rewards: Tensor, groups: Tensor, lengths: Tensor | None = None) -> Tensor:
        given = rewards.clone(), groups.clone(), None if lengths is None else lengths.clone()
        made = result_of("algorithm.advantage", self.name, self.function, *given)
        must_have("algorithm.advantage", self.name, made, rewards.shape, "a number for each sample, [samples]")
        advantages: Tensor = made.detach().to(rewards.device)
        for sample in (~advantages.isfinite()).nonzero().flatten().tolist()[:1]:
            where = spread(rewards[groups == groups[sample]])
            raise OwnFailure(f"algorithm.advantage: {self.name} gives {advantages[sample]:g} for a sample {where}")
        return advantages


def spread(rewards: Tensor) -> str:
    """Describe the rewards of a group whose advantages are not finite, with a remedy."""
    least, most = float(rewards.min()), float(rewards.max())
    if least == most:
        return f"of a group whose rewards are all {least:g}; divide by no spread without adding a small number to it"
    return f"of a group with rewards from {least:g} to {most:g}; correct it"


def result_of(key: str, name: str, function: Callable[..., Any], *given: Any) -> Any:
    """Call a user's function. Raises OwnFailure for all but DEVICE_ERRORS."""
    try:
        return function(*given)
    except DEVICE_ERRORS:
        raise
    except Exception as error:  # users' code may raise anything
        file = os.path.abspath(name.rpartition(":")[0])
        lines = [each.lineno for each in traceback.extract_tb(error.__traceback__) if each.filename == file]
        said = " ".join("".join(traceback.format_exception_only(error)).split())[:200]
        line = f" in line {lines[-1]}" if lines else ""
        raise OwnFailure(f"{key}: {name} raised {said}{line}; correct it") from error


def must_have(key: str, name: str, made: object, shape: torch.Size, wanted: str) -> None:
    """Raise OwnFailure for another shape: torch would broadcast it silently."""
    if isinstance(made, Tensor) and made.shape == shape:
        return
    found = (
        f"a tensor of shape {list(made.shape)}" if isinstance(made, Tensor) else f"an object of {type(made).__name__}"
    )
    raise OwnFailure(f"{key}: {name} returns {found} where {list(shape)} is needed; return {wanted}")
