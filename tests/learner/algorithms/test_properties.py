"""Losses against an independent float64 computation in numpy, and what must not change them: garbage, splits, order."""

from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from configs.schema import AlgorithmConfig
from learner.algorithms.corrections import behaviour_weight, m2_limit, m2_squares
from learner.algorithms.diagnostics import combine
from learner.algorithms.inputs import LossInputs
from learner.algorithms.losses import LOSSES, decoupled, needs_entropy_gradient, needs_first_pass, needs_reference

CONFIGS: dict[str, dict[str, Any]] = {
    "dppo": {"loss": "dppo", "is_cap": 1.5},
    "dppo prompt": {"loss": "dppo", "aggregation": "prompt", "tv_low": 0.05, "tv_high": None},
    "cispo": {"loss": "cispo", "is_cap": 1.2, "aggregation": "constant", "constant_length": 7},
    "ppo": {"loss": "ppo", "aggregation": "sequence"},
    "ppo dual": {"loss": "ppo", "dual_clip": 1.5},
    "decoupled clamp": {"loss": "decoupled", "behaviour_mode": "clamp", "behaviour_cap": 1.3},
    "decoupled mask": {"loss": "decoupled", "behaviour_mode": "mask", "behaviour_cap": 1.3},
    "decoupled loglinear": {"loss": "decoupled", "proximal": "loglinear", "behaviour_cap": None},
    "gspo": {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.1},
    "m2po": {"loss": "m2po"},
    "topr": {"loss": "topr"},
    "reinforce": {"loss": "reinforce", "opsm_delta": 0.1},
    "all penalties": {
        "loss": "dppo",
        "behaviour_kl": 0.1,
        "reference_kl": 0.2,
        "entropy_bonus": 0.3,
        "opsm_delta": 0.05,
    },
}
EVERY = pytest.mark.parametrize("config", [AlgorithmConfig(**c) for c in CONFIGS.values()], ids=list(CONFIGS))
SEEDS = st.integers(0, 2**32 - 1)
few = settings(max_examples=15)


def batch(seed: int, dtype: torch.dtype = torch.float64, drift: float = 0.5) -> LossInputs:
    """A random batch: 1 to 6 samples of 1 to 8 tokens with context before, between and after; 2 samples a group."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sequence = np.repeat(np.arange(count), rng.integers(1, 9, count))
    size = len(sequence)
    sampled = rng.random(size) < 0.7
    behaviour = -rng.exponential(1.0, size)
    noise = rng.normal(0, drift, (4, size))
    group = sequence // 2
    counts = np.bincount(group, sampled, count)
    versions = np.where(sampled, rng.integers(0, 9, size), -1)
    real = {
        "policy_logprobs": np.minimum(behaviour + noise[0], -1e-3),
        "behaviour": behaviour,
        "advantages": rng.normal(0, 1, count)[sequence],
        "proximal": np.minimum(behaviour + noise[1], -1e-3),
        "reference": np.minimum(behaviour + noise[2], -1e-3),
        "entropy": np.abs(noise[3]),
    }
    tensors = {name: torch.tensor(value, dtype=dtype) for name, value in real.items()}
    return LossInputs(
        **tensors,
        sampled=torch.tensor(sampled),
        sequence=torch.tensor(sequence),
        num_sequences=count,
        num_tokens=int(sampled.sum()),
        versions=torch.tensor(versions),
        version=8,
        num_prompts=(count + 1) // 2,
        prompt_tokens=torch.tensor(counts[group]).long(),
    )


def evaluate(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Value, gradient with respect to log-probabilities (and to entropy, appended), and sums."""
    leaves = [inputs.policy_logprobs.clone().requires_grad_(), inputs.entropy.clone().requires_grad_()]  # type: ignore[union-attr]
    loss, sums = LOSSES[config.loss](replace(inputs, policy_logprobs=leaves[0], entropy=leaves[1]), config)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
    return loss.detach(), torch.cat(gradients), sums


def numpy_loss(inputs: LossInputs, c: AlgorithmConfig) -> tuple[float, np.ndarray]:
    """The same by loops over tokens with derivatives by hand: value and d loss / d logprobs."""
    lp, mu, adv = (getattr(inputs, name).double().numpy() for name in ("policy_logprobs", "behaviour", "advantages"))
    prox, ref, entropy = (getattr(inputs, name).double().numpy() for name in ("proximal", "reference", "entropy"))
    assert inputs.versions is not None and inputs.prompt_tokens is not None and inputs.num_prompts is not None
    sampled, sequence, versions = inputs.sampled.numpy(), inputs.sequence.numpy(), inputs.versions.numpy()
    tokens = [t for t in range(len(lp)) if sampled[t]]
    members = {s: [t for t in tokens if sequence[t] == s] for s in set(sequence)}
    dropped = m2_dropped([(t, (lp[t] - mu[t]) ** 2) for t in tokens if adv[t] * (lp[t] - mu[t]) > 0], c.m2_budget)
    value, gradient = 0.0, np.zeros(len(lp))
    for t in tokens:
        mates = members[sequence[t]]
        diff = lp[t] - mu[t]
        rho = np.exp(diff)
        mean = sum(lp[u] - mu[u] for u in mates) / len(mates)
        weight = {
            "token": 1 / inputs.num_tokens,
            "sequence": 1 / (len(mates) * inputs.num_sequences),
            "prompt": 1 / (int(inputs.prompt_tokens[t]) * inputs.num_prompts),
            "constant": 1 / ((c.constant_length or 1) * inputs.num_sequences),
        }["sequence" if c.loss == "gspo" else c.aggregation]
        if c.loss in ("dppo", "cispo"):
            w = min(rho, c.is_cap)
            moved = np.exp(lp[t]) - np.exp(mu[t])
            if c.loss == "dppo" and (
                (adv[t] > 0 and c.tv_high is not None and moved > c.tv_high)
                or (adv[t] < 0 and c.tv_low is not None and -moved > c.tv_low)
            ):
                w = 0.0
            loss, slope = -w * adv[t] * lp[t], -w * adv[t]
        elif c.loss == "ppo":
            loss, slope = numpy_clip(rho, adv[t], c)
        elif c.loss == "gspo":
            loss, slope = numpy_clip(np.exp(mean), adv[t], c)
        elif c.loss == "decoupled":
            centre = prox[t]
            if c.proximal == "loglinear":
                age = inputs.version - versions[t]
                centre = mu[t] + (max(age - 1, 0) / age if age > 0 else 0.0) * diff
            w = np.exp(centre - mu[t])
            loss, slope = numpy_clip(np.exp(lp[t] - centre), adv[t], c)
            if c.behaviour_cap is not None and w > c.behaviour_cap:
                w = c.behaviour_cap if c.behaviour_mode == "clamp" else 0.0
            loss, slope = w * loss, w * slope
        elif c.loss == "m2po":
            loss = slope = 0.0 if t in dropped else -adv[t] * rho
        elif c.loss == "topr":
            w = 1.0 if adv[t] > 0 else min(1.0, np.exp(mean * len(mates)))
            loss, slope = -w * adv[t] * lp[t], -w * adv[t]
        else:
            loss, slope = -adv[t] * lp[t], -adv[t]
        if c.opsm_delta is not None and adv[t] < 0 and -mean > c.opsm_delta:
            loss = slope = 0.0
        x = lp[t] - ref[t]
        loss += c.behaviour_kl * diff**2 + c.reference_kl * min(rho, c.is_cap) * x**2 / 2 - c.entropy_bonus * entropy[t]
        slope += c.behaviour_kl * 2 * diff + c.reference_kl * min(rho, c.is_cap) * x
        value += weight * loss
        gradient[t] = weight * slope
    return value, gradient


def numpy_clip(r: float, a: float, c: AlgorithmConfig) -> tuple[float, float]:
    if a < 0 and c.dual_clip is not None and r > c.dual_clip:
        return -a * c.dual_clip, 0.0
    if (a > 0 and r > 1 + c.clip_high) or (a < 0 and r < 1 - c.clip_low):
        return -a * np.clip(r, 1 - c.clip_low, 1 + c.clip_high), 0.0
    return -a * r, -a * r


def m2_dropped(squares: list[tuple[int, float]], budget: float) -> set[int]:
    """Algorithm 1 of M2PO, word for word."""
    kept = dict(squares)
    while kept and np.mean(list(kept.values())) > budget:
        del kept[max(kept, key=lambda t: kept[t])]
    return {t for t, _ in squares} - set(kept)


@EVERY
@few
@given(seed=SEEDS)
def test_equals_numpy(config: AlgorithmConfig, seed: int) -> None:
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-4)):
        inputs = batch(seed, dtype)
        value, gradient, _ = evaluate(inputs, config)
        expected, slopes = numpy_loss(inputs, config)
        assert float(value) == pytest.approx(expected, abs=tolerance, rel=tolerance)
        np.testing.assert_allclose(gradient[: len(slopes)].double().numpy(), slopes, atol=tolerance, rtol=tolerance)
        np.testing.assert_allclose(
            gradient[len(slopes) :].double().numpy(),
            np.where(inputs.sampled.numpy(), -config.entropy_bonus / max(inputs.num_tokens, 1), 0),
            atol=tolerance,
        )


@EVERY
@few
@given(seed=SEEDS, garbage=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e30, -1e30]))
def test_unsampled_positions_change_nothing(config: AlgorithmConfig, seed: int, garbage: float) -> None:
    inputs = batch(seed)
    foul: dict[str, Any] = {
        f.name: torch.where(inputs.sampled, value, garbage if value.is_floating_point() else -(10**9))
        for f in fields(inputs)
        if isinstance(value := getattr(inputs, f.name), Tensor) and f.name != "sampled"
    }
    fouled = replace(inputs, **foul)
    for one, other in zip(evaluate(inputs, config)[:2], evaluate(fouled, config)[:2], strict=True):
        assert torch.equal(one, other)
    assert evaluate(inputs, config)[2] == evaluate(fouled, config)[2]


@EVERY
@few
@given(seed=SEEDS, cuts=st.lists(st.booleans(), min_size=6, max_size=6), local=st.booleans())
def test_parts_add_up(config: AlgorithmConfig, seed: int, cuts: list[bool], local: bool) -> None:
    """Microbatches and ranks: loss, gradient and sums of two parts add to those of the whole, however they are cut."""
    inputs = batch(seed)
    whole, gradient, sums = evaluate(inputs, config)
    side = torch.tensor(cuts)[inputs.sequence]
    squares = [m2_squares(part(inputs, mask, local).clean()) for mask in (side, ~side)]
    inputs = replace(inputs, m2_limit=m2_limit(torch.cat(squares), config.m2_budget))
    total, gradients, parts = torch.zeros(()).double(), torch.zeros_like(gradient), []
    for mask in (side, ~side):
        value, piece, more = evaluate(part(inputs, mask, local), config)
        total += value
        gradients[mask.repeat(2)] += piece
        parts.append(more)
    torch.testing.assert_close(total, whole, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients, gradient, rtol=1e-12, atol=1e-12)
    together = combine(parts)
    assert together.keys() == sums.keys() == parts[0].keys()
    for key, value in sums.items():
        assert not value.requires_grad
        assert float(together[key]) == pytest.approx(float(value), rel=1e-9, abs=1e-9), key


def part(inputs: LossInputs, mask: Tensor, local: bool) -> LossInputs:
    """Tokens of `inputs` where `mask`, samples numbered from 0 again if `local`; counts stay those of the whole."""
    kept: dict[str, Any] = {
        f.name: value[mask]
        for f in fields(inputs)
        if isinstance(value := getattr(inputs, f.name), Tensor) and value.dim() == 1
    }
    if local:
        kept["sequence"] = kept["sequence"].unique(return_inverse=True)[1]
    return replace(inputs, **kept)


@EVERY
@few
@given(seed=SEEDS)
def test_order_does_not_matter(config: AlgorithmConfig, seed: int) -> None:
    inputs = batch(seed)
    order = torch.tensor(np.random.default_rng(seed).permutation(inputs.policy_logprobs.numel()))
    value, gradient, _ = evaluate(inputs, config)
    shuffled, moved, _ = evaluate(part(inputs, order, local=False), config)
    torch.testing.assert_close(shuffled, value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved, gradient.view(2, -1)[:, order].flatten(), rtol=1e-12, atol=1e-12)


@EVERY
@few
@given(seed=SEEDS)
def test_masked_tokens_are_those_without_a_gradient(config: AlgorithmConfig, seed: int) -> None:
    inputs = batch(seed)
    config = config.model_copy(update={"behaviour_kl": 0.0, "reference_kl": 0.0})
    _, gradient, sums = evaluate(inputs, config)
    still = inputs.sampled & (gradient[: inputs.sampled.numel()] == 0)
    assert int(sums["positive/masked"]) == int((still & (inputs.advantages > 0)).sum())
    assert int(sums["negative/masked"]) == int((still & (inputs.advantages < 0)).sum())


@few
@given(seed=SEEDS)
def test_all_losses_are_the_policy_gradient_on_fresh_data(seed: int) -> None:
    """pi = mu: every gradient is -A / N."""
    inputs = batch(seed)
    inputs = replace(inputs, policy_logprobs=inputs.behaviour, proximal=inputs.behaviour)
    expected = torch.where(inputs.sampled, -inputs.advantages, 0) / max(inputs.num_tokens, 1)
    for name in set(LOSSES) - {"gspo"}:
        gradient = evaluate(inputs, AlgorithmConfig(loss=name))[1]
        torch.testing.assert_close(gradient[: expected.numel()], expected)
    gspo = evaluate(inputs, AlgorithmConfig(loss="gspo"))[1]
    mean = evaluate(inputs, AlgorithmConfig(loss="reinforce", aggregation="sequence"))[1]
    torch.testing.assert_close(gspo, mean)


@few
@given(values=st.lists(st.floats(0, 2), max_size=30), budget=st.floats(0.001, 1))
def test_m2_limit_is_the_algorithm(values: list[float], budget: float) -> None:
    """Keeps exactly what Algorithm 1 keeps; of equal values across its edge none."""
    squares = torch.tensor(values, dtype=torch.float64)
    kept = set(squares[squares < m2_limit(squares, budget)].tolist())
    dropped = m2_dropped(list(enumerate(values)), budget)
    assert kept == {v for i, v in enumerate(values) if i not in dropped} - {values[i] for i in dropped}


def test_extreme_ratios_stay_finite() -> None:
    inputs = replace(batch(3, torch.float32), behaviour=torch.full_like(batch(3).behaviour, -200.0).float())
    for name in LOSSES:
        value, gradient, sums = evaluate(inputs, AlgorithmConfig(loss=name))
        assert value.isfinite() and gradient.isfinite().all(), name
        assert all(v.isfinite() for v in sums.values()), name


def test_a_part_without_sampled_tokens_has_a_gradient_of_zero() -> None:
    """A rank with nothing to train still runs backward, or the others wait for its collectives."""
    inputs = batch(5)
    inputs = replace(
        inputs, sampled=torch.zeros_like(inputs.sampled), policy_logprobs=inputs.policy_logprobs * torch.nan
    )
    for config in map(lambda c: AlgorithmConfig(**c), CONFIGS.values()):
        value, gradient, _ = evaluate(inputs, config)
        assert value == 0 and gradient.eq(0).all()


@pytest.mark.parametrize(
    ("changes", "config", "message"),
    [
        ({"reference": None}, {"reference_kl": 0.1}, "reference_kl"),
        ({"entropy": None}, {"entropy_bonus": 0.1}, "entropy_bonus"),
        ({"versions": None}, {"loss": "decoupled", "proximal": "loglinear"}, "loglinear"),
        ({"prompt_tokens": None}, {"aggregation": "prompt"}, "prompt_tokens"),
        ({}, {"aggregation": "constant"}, "constant_length"),
    ],
)
def test_a_missing_input_is_named(changes: dict[str, Any], config: dict[str, Any], message: str) -> None:
    settings = AlgorithmConfig(**config)
    with pytest.raises(ValueError, match=message):
        LOSSES[settings.loss](replace(batch(1), **changes), settings)


def test_what_a_loss_needs() -> None:
    assert not any(need(AlgorithmConfig()) for need in (needs_first_pass, needs_reference, needs_entropy_gradient))
    assert needs_first_pass(AlgorithmConfig(loss="m2po"))
    assert not needs_first_pass(AlgorithmConfig(loss="decoupled", proximal="recompute"))
    assert not needs_first_pass(AlgorithmConfig(loss="decoupled", proximal="loglinear"))
    assert needs_reference(AlgorithmConfig(reference_kl=0.1))
    assert needs_entropy_gradient(AlgorithmConfig(entropy_bonus=0.1))


def test_decoupled_without_a_proximal_pass_takes_the_learner_itself() -> None:
    inputs, config = batch(9), AlgorithmConfig(loss="decoupled", behaviour_cap=None)
    without = evaluate(replace(inputs, proximal=None), config)
    explicit = evaluate(replace(inputs, proximal=inputs.policy_logprobs), config)
    assert torch.equal(without[1], explicit[1])


def test_decoupled_counts_a_clamped_weight_as_capped_unless_the_token_is_masked() -> None:
    inputs, config = batch(9), AlgorithmConfig(loss="decoupled", behaviour_mode="clamp", behaviour_cap=1.1)
    assert inputs.proximal is not None
    _, masked, capped = decoupled(inputs, config)
    beyond = (inputs.proximal - inputs.behaviour).exp() > 1.1
    assert (beyond & masked).any() and (beyond & ~masked).any() and (~beyond & ~masked).any()
    assert torch.equal(capped, beyond & ~masked)


@pytest.mark.parametrize("mode", ["clamp", "mask"])
def test_a_weight_that_equals_the_cap_is_not_beyond_it(mode: str) -> None:
    """With a cap of 1 no fresh token is masked."""
    fresh = torch.tensor([-1.0, -2.0])
    weight, beyond = behaviour_weight(fresh, fresh, mode, 1.0)
    assert weight.tolist() == [1.0, 1.0] and not beyond.any()
