"""What `is_tokenwise` says is so: chunk by chunk every loss has the gradient of the whole, or it is not declared."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms.corrections import m2_limit, m2_squares
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, is_tokenwise
from learner.model.head import HeadOptions, chunked_loss, logprobs_and_entropy
from tests.harness.covered import cover
from tests.learner.algorithms.test_properties import CONFIGS, batch

AGGREGATIONS = ("token", "sequence", "prompt", "constant")
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "penalties": {"behaviour_kl": 0.1, "reference_kl": 0.2, "entropy_bonus": 0.3},
    "opsm": {"opsm_delta": 0.05},
    "tight": {"is_cap": 1.1, "tv_low": 0.02, "tv_high": 0.02, "dual_clip": 1.2, "m2_budget": 0.3},
    "no bounds": {"tv_low": None, "tv_high": None, "behaviour_cap": None},
    "clamped": {"behaviour_mode": "clamp", "behaviour_cap": 1.1},
    "loglinear": {"proximal": "loglinear"},
}
OWN = [AlgorithmConfig(**options) for options in CONFIGS.values()]
PAIRS = {*cover((len(LOSSES), len(AGGREGATIONS), len(OPTIONS)), 2)}
"""Indices of losses, aggregations and options that cover every pair."""


def configs_of(loss: str, every: bool) -> list[AlgorithmConfig]:
    """Return configs with `loss`: all aggregations and options, or only those in PAIRS."""
    axes = enumerate(LOSSES), enumerate(AGGREGATIONS), enumerate(OPTIONS.values())
    of_product = [
        AlgorithmConfig(loss=loss, aggregation=aggregation, constant_length=7, **options)
        for (a, name), (b, aggregation), (c, options) in product(*axes)
        if name == loss and (every or (a, b, c) in PAIRS)
    ]
    return of_product + [config for config in OWN if config.loss == loss]


SEEDS = range(6)
CHUNK, WIDTH, VOCABULARY, TEMPERATURE = 3, 5, 11, 0.7


Head = tuple[Tensor, Tensor, Tensor]


def head(tokens: int, seed: int) -> Head:
    """States, output embedding and targets in float64."""
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, WIDTH, dtype=torch.float64, generator=draw).requires_grad_()
    weight = (torch.randn(VOCABULARY, WIDTH, dtype=torch.float64, generator=draw) * 0.3).requires_grad_()
    return hidden, weight, torch.randint(VOCABULARY, (tokens,), generator=draw)


def step_inputs(seed: int, config: AlgorithmConfig) -> tuple[LossInputs, Tensor, Head]:
    """A random batch as the step knows it, the head it goes through, and which tokens do.

    Each sample's tokens are counted, and the limit of m2po is there; behaviour is as far from the learner as in
    `batch`.
    """
    inputs = batch(seed)
    scored = inputs.sampled.nonzero().squeeze(1)
    parts = head(len(scored), seed)
    logprobs = logprobs_and_entropy(*parts, HeadOptions(TEMPERATURE))[0].detach()
    drift = (inputs.policy_logprobs - inputs.behaviour)[scored]
    inputs = replace(
        inputs,
        policy_logprobs=inputs.policy_logprobs.index_copy(0, scored, logprobs),
        behaviour=inputs.behaviour.index_copy(0, scored, (logprobs - drift).clamp(max=-1e-3)),
        proximal=None if seed % 2 else inputs.proximal,
        sequence_tokens=inputs.lengths()[inputs.sequence].long(),
    )
    return replace(inputs, m2_limit=m2_limit(m2_squares(inputs.clean()), config.m2_budget)), scored, parts


def taken(inputs: LossInputs, place: Tensor | slice, **changes: Tensor) -> LossInputs:
    """`inputs` of the tokens at `place`, with `changes`."""
    kept = {
        field.name: value[place]
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and value.dim()
    }
    return replace(inputs, **(kept | changes))


def differences(config: AlgorithmConfig, seed: int) -> tuple[float, float]:
    """Relative differences of loss, and of gradients of states and weight: whole against chunks of 3 tokens."""
    inputs, scored, parts = step_inputs(seed, config)
    options = HeadOptions(TEMPERATURE, CHUNK, config.entropy_bonus > 0)
    some, blank = taken(inputs, scored), torch.zeros_like(inputs.policy_logprobs)

    def loss(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
        inputs = taken(some, chunk, policy_logprobs=logprobs, entropy=entropy)
        return LOSSES[config.loss].of_tokens(inputs, config)

    logprobs, entropy = (blank.index_copy(0, scored, score) for score in logprobs_and_entropy(*parts, options))
    want, _ = LOSSES[config.loss](replace(inputs, policy_logprobs=logprobs, entropy=entropy), config)
    got = chunked_loss(*parts, loss, options)[2]
    ours, theirs = (torch.autograd.grad(total, parts[:2]) for total in (got, want))
    apart = sum(float((a - b).norm() / b.norm().clamp(min=1e-6)) for a, b in zip(ours, theirs, strict=True))
    return float((got - want).detach().abs() / want.detach().abs().clamp(min=1e-6)), apart


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.long)], ids=["pairs", "product"])
@pytest.mark.parametrize("loss", LOSSES)
def test_declared_if_and_only_if_chunks_have_the_gradient_of_the_whole(loss: str, every: bool) -> None:
    configs = configs_of(loss, every)
    assert len(configs) >= (len(AGGREGATIONS) * len(OPTIONS) if every else len(OPTIONS))
    for config in configs:
        found = [differences(config, seed) for seed in SEEDS]
        if is_tokenwise(config):
            assert max(max(pair) for pair in found) < 1e-10, config
        else:
            assert max(apart for _, apart in found) > 1e-6, config


def test_what_is_tokenwise() -> None:
    """All that does without a mean or a product over a whole sample."""
    assert is_tokenwise(AlgorithmConfig()) and not is_tokenwise(AlgorithmConfig(opsm_delta=0.1))
    assert {name for name in LOSSES if not is_tokenwise(AlgorithmConfig(loss=name))} == {"gspo", "topr"}
    assert all(is_tokenwise(AlgorithmConfig(aggregation=name, constant_length=7)) for name in AGGREGATIONS)


class Reads(torch.utils._python_dispatch.TorchDispatchMode):
    """Collects what would have the CPU wait for a GPU: reading a value, selecting by a mask, copying a number over."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "lift_fresh", "is_nonzero", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        masks = name.startswith("index") and isinstance(args[1], list | tuple)
        if name in self.NAMES or (masks and any(x is not None and x.dtype == torch.bool for x in args[1])):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("config", [AlgorithmConfig(**c) for c in CONFIGS.values()], ids=list(CONFIGS))
def test_no_loss_waits_for_the_device(config: AlgorithmConfig) -> None:
    inputs = batch(3)
    inputs = replace(inputs, policy_logprobs=inputs.policy_logprobs.requires_grad_())
    hidden, weight, targets = head(5, 3)
    with Reads() as reads:
        loss, _ = LOSSES[config.loss](
            replace(inputs, m2_limit=m2_limit(m2_squares(inputs.clean()), config.m2_budget)), config
        )
        loss.backward()
        chunked_loss(hidden, weight, targets, lambda lp, en, chunk: lp.sum() + en.sum(), HeadOptions(1.0, 2, True))[
            2
        ].backward()
    assert not reads.found
    with Reads() as reads:
        inputs.policy_logprobs[inputs.sampled].sum().item()
        torch.tensor([1.0])
    assert {"_local_scalar_dense", "index", "lift_fresh"} <= set(reads.found)
