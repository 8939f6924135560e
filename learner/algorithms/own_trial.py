"""Tries a user's own loss and advantage on a tiny batch, before training (docs/algorithms.md)."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from configs.critic import GAE
from configs.load import ConfigError
from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import ADVANTAGES
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, Loss, needs_reference
from learner.algorithms.own import OwnFailure, advantage_of, loss_of

LENGTHS = (1, 2, 3, 6, 1, 4, 5, 2, 3)
GROUPS = (7, 7, 7, 2, 2, 2, 31, 31, 31)
REWARDS = (1.0, 0.0, 0.5, 0.0, 0.0, 2.0, -1.0, 1.0, 0.25)
EQUAL = (1.0, 0.0, 0.5, 2.0, 2.0, 2.0, -1.0, 1.0, 0.25)
FAR = 20.0
UNSAMPLED = "; mind that a token that was not sampled has 0 in all inputs"
CLOSE: dict[str, Any] = {"rtol": 1e-3, "atol": 1e-5}
SHARED: dict[str, Callable[[], object]] = {
    "the current folder": os.getcwd,
    "torch's default dtype": torch.get_default_dtype,
    "torch's default device": torch.get_default_device,
    "torch's gradient mode": torch.is_grad_enabled,
    "torch's float32 matmul precision": torch.get_float32_matmul_precision,
}
COLLECTIVES = ("c10d", "_c10d_functional", "c10d_functional")
Part = tuple[Tensor, LossInputs]
"""A microbatch, and its tokens' places in the batch: [tokens] int64."""


def check_own(config: AlgorithmConfig, answer: int, has_segments: bool) -> Iterator[str]:
    """Yield a line for each trial. Raises ConfigError for what is refused.

    `has_segments`: a sample may span microbatches.
    """
    config = config.model_copy(update={"constant_length": config.constant_length or answer})
    if config.advantage not in (*ADVANTAGES, GAE):
        _refusing("algorithm.advantage", config.advantage, lambda: check_advantage(config))
        yield f"algorithm.advantage: {config.advantage} was tried on a batch of 9 samples"
    if config.loss not in LOSSES:
        _refusing("algorithm.loss", config.loss, lambda: check_loss(config, has_segments))
        yield f"algorithm.loss: {config.loss} was tried on a batch of 9 samples; its parts add up"


def check_advantage(config: AlgorithmConfig) -> None:
    """Raise ValueError if `algorithm.advantage` cannot be trained with."""
    function, order = advantage_of(config), torch.tensor([8, 2, 5, 0, 7, 1, 4, 6, 3])
    rewards, groups, lengths = rewards_of(REWARDS), torch.tensor(GROUPS), torch.tensor(LENGTHS)
    found = function(rewards, groups, lengths)
    for others in (EQUAL, [0.0] * len(REWARDS)):
        function(rewards_of(others), groups, lengths)
    problem = None
    if not found.is_floating_point():
        problem = f"gives values of type {found.dtype}; return floating point numbers"
    elif not found.any():
        problem = f"gives 0 for each of 9 samples with rewards from {min(REWARDS):g} to {max(REWARDS):g}; correct it"
    elif not torch.allclose(function(rewards[order], groups[order], lengths[order]), found[order], **CLOSE):
        problem = (
            "gives a sample another value in another order of samples; find its group by `groups`, not by its place"
        )
    if problem:
        raise ValueError(f"algorithm.advantage: {config.advantage} {problem}")


def rewards_of(values: Sequence[float]) -> Tensor:
    """Rewards as a batch has them: [samples] float64."""
    return torch.tensor(values, dtype=torch.float64)


def check_loss(config: AlgorithmConfig, has_segments: bool) -> None:
    """Raise ValueError if `algorithm.loss` cannot be trained with."""
    loss, whole, samples = loss_of(config), batch(config), range(len(LENGTHS))
    every = torch.arange(len(whole.sequence))
    value, gradient = backward(config, loss, [(every, whole)])
    cuts = {
        "two microbatches": [part(whole, samples[:4]), part(whole, samples[4:])],
        "microbatches of one sample each": [part(whole, [sample]) for sample in samples],
        "two microbatches, one without a sampled token": [(every, whole), unsampled(whole)],
        "two microbatches with a segment of each sample in both": halves(whole) if has_segments else [],
    }
    for what, parts in cuts.items():
        total, gradients = backward(config, loss, parts) if parts else (value, gradient)
        if not torch.allclose(total, value, **CLOSE) or not torch.allclose(gradients, gradient, **CLOSE):
            raise ValueError(f"algorithm.loss: {config.loss}: {not_added(what, total, value)}")
    backward(config, loss, [(every, batch(config, FAR))])


def not_added(what: str, total: Tensor, value: Tensor) -> str:
    """The fault of a loss that depends on how its batch is cut."""
    problem = f"a batch cut into {what} has the loss {total:.6g}, or another gradient, and the whole batch {value:.6g}"
    if "segment" in what:
        return f"{problem}; use inputs.sample_log_ratio() and inputs.sequence_tokens in place of sums over a sample"
    return f"{problem}; return each token's own loss, and leave means over the batch to algorithm.aggregation"


def backward(config: AlgorithmConfig, loss: Loss, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
    """Summed loss of the parts, and its gradient: [], [tokens]. Raises ValueError if either is not finite or the
    gradient is zero.
    """
    total, gradient = torch.zeros(()), torch.zeros(sum(LENGTHS) + len(LENGTHS))
    for tokens, inputs in parts:
        leaf = inputs.policy_logprobs.clone().requires_grad_()
        entropy = None if inputs.entropy is None else inputs.entropy.clone().requires_grad_()
        value = loss(replace(inputs, policy_logprobs=leaf, entropy=entropy), config)[0]
        far = inputs.log_ratio.abs().max() > FAR / 2
        where = " where learner and servers differ much; clamp log-ratios before exp" if far else UNSAMPLED
        if not value.isfinite():
            raise ValueError(f"algorithm.loss: {config.loss} gives {value:g}{where}")
        if value.requires_grad:
            value.backward()
        if leaf.grad is not None:
            gradient[tokens] += leaf.grad
        if not gradient.isfinite().all():
            raise ValueError(f"algorithm.loss: {config.loss} has a gradient that is not finite{where}")
        total = total + value.detach()
    if not gradient.any():
        problem = "has no gradient for inputs.policy_logprobs; compute it from them, without detach() and no_grad()"
        raise ValueError(f"algorithm.loss: {config.loss} {problem}")
    return total, gradient


def batch(config: AlgorithmConfig, far: float = 0.0) -> LossInputs:
    """The batch in one microbatch. `far`: log-ratio of every fifth token."""
    random = torch.Generator().manual_seed(0)
    lengths, groups = torch.tensor(LENGTHS), torch.tensor(GROUPS)
    sequence = torch.arange(len(LENGTHS)).repeat_interleave(lengths + 1)
    size, sampled = len(sequence), sequence == sequence.roll(1)  # without each sample's first token, its prompt
    behaviour = -torch.rand(size, generator=random) * 3 - 0.05
    ratio = 0.3 * torch.randn(size, generator=random)
    ratio[::5] += far * torch.tensor([1.0, -1.0]).repeat(size)[: len(ratio[::5])]
    in_group = torch.stack([lengths[groups == group].sum() for group in groups])
    return LossInputs(
        policy_logprobs=behaviour + ratio,
        behaviour=behaviour,
        advantages=torch.tensor(REWARDS)[sequence] - 0.4,
        sampled=sampled,
        sequence=sequence,
        num_sequences=len(LENGTHS),
        num_tokens=sum(LENGTHS),
        reference=behaviour + 0.1 if needs_reference(config) else None,
        entropy=torch.rand(size, generator=random),
        versions=torch.arange(size) % 5,
        version=4,
        num_prompts=len(set(GROUPS)),
        prompt_tokens=in_group[sequence],
        sequence_tokens=lengths[sequence],
    )


def part(whole: LossInputs, samples: Sequence[int]) -> Part:
    """A microbatch of whole samples, numbered anew."""
    tokens = torch.isin(whole.sequence, torch.tensor(samples)).nonzero().flatten()
    chosen = of_tokens(whole, tokens)
    return tokens, replace(chosen, sequence=chosen.sequence.unique(return_inverse=True)[1])


def unsampled(whole: LossInputs) -> Part:
    """A microbatch without sampled tokens, as on ranks that have fewer microbatches."""
    tokens, first = part(whole, [0])
    return tokens, replace(first, sampled=torch.zeros_like(first.sampled))


def halves(whole: LossInputs) -> list[Part]:
    """Two microbatches of every second token, with log-ratios of whole samples."""
    known = replace(whole, scattered=True, sequence_log_ratio=whole.per_sequence(whole.log_ratio)[whole.sequence])
    places = torch.arange(len(whole.sequence))
    return [(tokens, of_tokens(known, tokens)) for tokens in (places[::2], places[1::2])]


def of_tokens(whole: LossInputs, tokens: Tensor) -> LossInputs:
    """The inputs of these tokens, with counts of the whole batch."""
    values: dict[str, Any] = {field.name: getattr(whole, field.name) for field in fields(whole)}
    of_these: dict[str, Any] = {name: x[tokens] if isinstance(x, Tensor) else x for name, x in values.items()}
    return LossInputs(**of_these)


class NoCollectives(TorchDispatchMode):
    """Raises RuntimeError for collectives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in COLLECTIVES:
            raise RuntimeError(
                f"{func.name()} waits for other ranks, whose microbatches differ in number; leave it out"
            )
        return func(*args, **(kwargs or {}))


def check_alone(config: AlgorithmConfig) -> None:
    """Raise ConfigError if a user's function waits for other ranks. Not for use on a rank."""
    dist.init_process_group("fake", rank=0, world_size=2)
    try:
        with NoCollectives():
            for _ in check_own(config, 1, has_segments=False):
                pass
    finally:
        dist.destroy_process_group()


def _refusing(key: str, name: str, attempt: Callable[[], None]) -> None:
    before = {what: look() for what, look in SHARED.items()}
    try:
        attempt()
    except OwnFailure as error:
        raise ConfigError([str(error)]) from error
    except ValueError as error:
        own = str(error).startswith(key)
        raise ConfigError([str(error) if own else f"{key}: {name} raised {_named(error)}"]) from error
    except Exception as error:  # users' code may raise anything
        raise ConfigError([f"{key}: {name} raised {_named(error)}"]) from error
    for what, look in SHARED.items():
        if (now := look()) != before[what]:
            change = f"changes {what} from {before[what]} to {now}, for all of the learner"
            raise ConfigError([f"{key}: {name.rpartition(':')[0]} {change}; take that out"])


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}, on a tiny batch; correct it"
