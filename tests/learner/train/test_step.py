"""One optimizer step is the same whatever the ranks, packing and microbatches; one that is not finite is skipped."""

from itertools import combinations
from pathlib import Path

import pytest
import torch

from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import ADVANTAGES
from learner.algorithms.losses import is_tokenwise
from learner.model.memory import MATMULS
from learner.model.microbatch import one_document
from learner.train.batch import Batch, pack
from learner.train.optimizer import Optimizer
from tests.harness import world
from tests.harness.covered import covered
from tests.harness.world import (
    ALGORITHM,
    LEARNER,
    algorithm_of,
    cut,
    gradients,
    make_samples,
    plain,
    policy_of,
    tiny_model,
)

KEEP = LEARNER.model_copy(update={"activation_checkpointing": "none"})


def close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in ours.items():
        assert (gradient - theirs[name]).norm() <= tolerance * theirs[name].norm(), name


def gradient(policy, budget: int, algorithm: AlgorithmConfig = ALGORITHM, entries=None, **options):
    entries = make_samples() if entries is None else entries
    step = algorithm_of(policy, budget, algorithm, **options)
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), budget, policy.costs.quadratic)
    sums = step.backward(policy, batch)
    found = gradients(policy)
    step.optimizer.adamw.zero_grad()
    return found, sums


def by_hand(model, entries, cap: float) -> dict[str, torch.Tensor]:
    """The gradient of `dppo` without trust region by transformers alone, sample by sample."""
    from buffer.wire.sample import Sample

    samples = [Sample.unpack(entry.sample) for entry in entries]
    rewards = torch.tensor([sample.reward for sample in samples])
    advantages = ADVANTAGES["group_mean"](rewards, torch.tensor([entry.item for entry in entries]))
    total = sum(int(sample.sampled.numpy().sum()) for sample in samples)
    loss = torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        ids = torch.tensor(sample.tokens.numpy()).long()
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        chosen = torch.tensor(sample.sampled.numpy()[1:] == 1)
        ratio = (logp - torch.tensor(sample.behaviour_logprobs.numpy())[1:]).exp().detach().clamp(max=cap)
        loss = loss - (ratio * advantage * logp)[chosen].sum() / total
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("tied", [False, True])
def test_gradient_is_the_formula_s(tmp_path: Path, mesh, tied: bool) -> None:
    model = tiny_model(tmp_path, tied)
    algorithm = ALGORITHM.model_copy(update={"tv_low": None, "tv_high": None})
    ours, _ = gradient(policy_of(model, mesh), 64, algorithm)
    close(ours, by_hand(plain(model), make_samples(), algorithm.is_cap))


LOSSES = [
    {"loss": "dppo", "behaviour_kl": 0.1, "entropy_bonus": 0.1},
    {"loss": "gspo", "clip_low": 0.2},
    {"loss": "decoupled", "aggregation": "sequence", "advantage": "batch_std"},
    {"loss": "decoupled", "proximal": "loglinear"},
    {
        "loss": "m2po",
        "aggregation": "prompt",
        "advantage": "reinforce_baseline",
        "overlong": "soft",
        "overlong_buffer": 10,
    },
    {"loss": "topr", "aggregation": "constant", "overlong": "mask"},
]


@pytest.mark.parametrize("options", LOSSES, ids=lambda options: f"{options['loss']}-{len(options)}")
def test_packing_changes_nothing(tmp_path: Path, mesh, options: dict) -> None:
    algorithm = AlgorithmConfig(**options)
    policy = policy_of(tiny_model(tmp_path), mesh, entropy_gradient=algorithm.entropy_bonus > 0)
    one, sums = gradient(policy, 10**6, algorithm)
    assert all(g.norm() > 0 for name, g in one.items() if "k_proj.bias" not in name)
    many, parts = gradient(policy, 30, algorithm)
    close(one, many)
    shuffled, _ = gradient(policy, 64, algorithm, make_samples()[::-1])
    close(one, shuffled)
    for name, value in sums.items():
        torch.testing.assert_close(parts[name], value, rtol=1e-4, atol=1e-5)


BONUS = {"entropy_bonus": 0.1, "behaviour_kl": 0.1}
BY_CHUNK = [BONUS, {"aggregation": "prompt"}, {"loss": "ppo", "aggregation": "sequence"}, {"loss": "m2po"}]


@pytest.mark.parametrize(("tied", "options"), covered([False, True], BY_CHUNK, strength=1))
def test_by_chunk_is_as_at_once(tmp_path: Path, mesh, tied: bool, options: dict) -> None:
    """Gradients to rounding, metrics to the bit; chunks of 7 tokens, blocks recomputed, a temperature."""
    algorithm = AlgorithmConfig(**options)
    bonus = algorithm.entropy_bonus > 0
    policy = policy_of(tiny_model(tmp_path, tied), mesh, temperature=0.7, entropy_gradient=bonus)
    step = algorithm_of(policy, 64, algorithm)
    assert is_tokenwise(algorithm) and step.forward == step.by_chunk
    found = []
    for forward in (step.by_chunk, step.at_once):
        step.forward = forward
        batch = Batch.from_part(cut(make_samples(), 3, [24], 0), 64, policy.costs.quadratic)
        sums = step.backward(policy, batch)
        found.append((gradients(policy), sums))
        step.optimizer.adamw.zero_grad()
    (ours, sums), (theirs, others) = found
    assert all(gradient.norm() > 0 for name, gradient in theirs.items() if "k_proj.bias" not in name)
    close(ours, theirs)
    assert sums.keys() == others.keys()
    for name, value in sums.items():
        assert torch.equal(value, others[name]), name


def test_losses_of_whole_samples_wait_for_all_chunks(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    for options in ({"loss": "gspo"}, {"loss": "topr"}, {"opsm_delta": 0.1}):
        algorithm = algorithm_of(policy, 64, AlgorithmConfig(**options))
        assert algorithm.forward == algorithm.at_once


@pytest.mark.parametrize("options", [{}, BONUS, {"loss": "gspo"}], ids=str)
def test_a_dummy_reaches_every_parameter_with_zeros(tmp_path: Path, mesh, options: dict) -> None:
    """Or FSDP's collectives of the other ranks would wait for it."""
    algorithm = AlgorithmConfig(**options)
    policy = policy_of(tiny_model(tmp_path), mesh, entropy_gradient=algorithm.entropy_bonus > 0)
    step = algorithm_of(policy, 64, algorithm)
    batch = Batch.from_part(cut(make_samples(), 3, [24], 0), 64)
    step.backward_of(policy, pack([]), step.shared_context(batch, policy.device))
    found = gradients(policy)
    assert len(found) == len(list(policy.parameters()))
    assert not any(gradient.any() for gradient in found.values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("cuts", "budgets"),
    [
        pytest.param([[20, 4], [0, 24]], [30], id="few"),
        pytest.param([[12, 12], [20, 4], [24, 0], [0, 24]], [30, 10**6], id="many", marks=pytest.mark.long),
    ],
)
def test_ranks_change_nothing(tmp_path: Path, mesh, cuts: list[list[int]], budgets: list[int]) -> None:
    """Two processes over gloo against this one: even parts, uneven ones, and a rank without any sample."""
    model = tiny_model(tmp_path / "model", tied=True)
    want, _ = gradient(policy_of(model, mesh), 64)
    algorithms = [ALGORITHM.model_dump(mode="json")]
    world.together("gradients", 2, tmp_path, cuts=cuts, budgets=budgets, algorithms=algorithms)
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == len(cuts) * len(budgets)
    for got in found.values():
        close(got, want)


ON_RANKS: list[dict] = [
    {},
    {"overlong": "soft", "overlong_buffer": 10},
    {"advantage": "batch_std", "aggregation": "sequence"},
    {"loss": "m2po", "aggregation": "prompt"},
    {"loss": "gspo", **BONUS},
    BONUS,
]


@pytest.mark.xdist_group("ranks")
def test_ranks_change_nothing_of_what_is_counted_over_the_batch(tmp_path: Path, mesh) -> None:
    """Deviations, penalties, limits and counts are of all ranks' samples; each option moves the gradient."""
    model = tiny_model(tmp_path / "model", tied=True)
    algorithms = [ALGORITHM.model_copy(update=options) for options in ON_RANKS]
    configs = [algorithm.model_dump(mode="json") for algorithm in algorithms]
    world.together("gradients", 2, tmp_path, cuts=[[17, 7]], budgets=[120], algorithms=configs)
    found, wanted = torch.load(tmp_path / "gradients.pt"), []
    for got, algorithm in zip(found.values(), algorithms, strict=True):
        policy = policy_of(model, mesh, entropy_gradient=algorithm.entropy_bonus > 0)
        want, _ = gradient(policy, 10**6, algorithm)
        close(got, want)
        wanted.append(torch.cat([part.flatten() for part in want.values()]))
    assert all((one - other).norm() > 1e-3 * one.norm() for one, other in combinations(wanted, 2))


@pytest.mark.parametrize("saving", ["selective", "block", 1, 2])
def test_activation_checkpointing_changes_nothing(tmp_path: Path, mesh, saving: str | int) -> None:
    model = tiny_model(tmp_path)
    one, _ = gradient(policy_of(model, mesh, KEEP, temperature=0.7), 64)
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    two, _ = gradient(policy_of(model, mesh, learner, temperature=0.7), 64)
    close(one, two)


def test_selective_repeats_no_matmul(tmp_path: Path, mesh) -> None:
    """In the backward pass of blocks, `block` repeats the forward pass's matmuls, `selective` none, a number those of
    its blocks."""
    model, counts = tiny_model(tmp_path), {}

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.number += func in MATMULS
            return func(*args, **(kwargs or {}))

    for saving in ("none", "selective", "block", 1, 2, 3):
        policy = policy_of(model, mesh, LEARNER.model_copy(update={"activation_checkpointing": saving}))
        scores = policy(one_document([1, 2, 3, 4]))[0]
        with Count() as count:
            scores.sum().backward()
        counts[saving] = count.number
    assert counts["selective"] == counts["none"] < counts["block"] == counts[2] == counts[3]
    assert counts[1] - counts["none"] == counts["block"] - counts[1]


def test_temperature(tmp_path: Path, mesh) -> None:
    model = tiny_model(tmp_path)
    one, _ = gradient(policy_of(model, mesh, KEEP, temperature=0.7), 64)
    hot, _ = gradient(policy_of(model, mesh, KEEP, temperature=2.0), 64)
    assert any((one[name] - hot[name]).norm() > 0.1 * one[name].norm() for name in one)


def test_reference_model(tmp_path: Path, mesh) -> None:
    """The penalty is 0 at the initial weights and pulls once they have moved."""
    model = tiny_model(tmp_path)
    algorithm = ALGORITHM.model_copy(update={"reference_kl": 0.5})
    policy, reference = policy_of(model, mesh), policy_of(model, mesh, frozen=True)
    step = algorithm_of(policy, 64, algorithm, reference=reference)
    entries = make_samples()
    first = step.step(policy, cut(entries, 3, [len(entries)], 0))
    second = step.step(policy, cut(entries, 3, [len(entries)], 0))
    assert first["reference/k3"] == pytest.approx(0, abs=1e-6)
    assert second["reference/k3"] > 1e-5


def test_training_raises_what_is_rewarded(tmp_path: Path, mesh) -> None:
    """The loss of `reinforce` is a plain objective: minus the advantage-weighted log-probability."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    step, entries = algorithm_of(policy, 64, AlgorithmConfig(loss="reinforce")), make_samples()
    losses = [step.step(policy, cut(entries, 3, [len(entries)], 0))["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]


def test_metrics(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    entries = make_samples()
    part = cut(entries, 3, [len(entries)], 0).model_copy(update={"failed": 5, "dropped": 2})
    figures = algorithm_of(policy, 30).step(policy, part)
    rewards = torch.tensor([x for entry in entries[::4] for x in entry.rewards], dtype=torch.float64)
    assert figures["reward/mean"] == pytest.approx(float(rewards.mean()))
    assert figures["reward/std"] == pytest.approx(float(rewards.std(correction=0)))
    assert figures["sample/right"] == pytest.approx(float(rewards.mean()))
    assert (figures["age/mean"], figures["age/max"], figures["samples"]) == (2.0, 2.0, 24.0)
    assert (figures["buffer/failed"], figures["buffer/dropped"]) == (5.0, 2.0)
    assert figures["gradient/norm"] > 0 and figures["gradient/skipped"] == 0
    assert figures["lr"] == LEARNER.lr  # version 3 is beyond warm-up
    assert {
        "entropy/mean",
        "mismatch/k3_fresh",
        "offpolicy/k3",
        "ess/token",
        "length/mean",
        "length/truncated",
    } <= figures.keys()


def test_a_gradient_that_is_not_finite_is_skipped(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    step, entries = algorithm_of(policy, 64), make_samples()
    step.step(policy, cut(entries, 3, [len(entries)], 0))
    before, moments = world.weights(policy), step.optimizer.adamw.state_dict()["state"][0]["step"].clone()
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 64)
    step.backward(policy, batch)
    next(policy.parameters()).grad.to_local()[0] = torch.nan
    figures = step.optimizer.update(3)
    assert figures["gradient/skipped"] == 1 and "gradient/norm" not in figures
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())
    assert step.optimizer.adamw.state_dict()["state"][0]["step"] == moments
    assert next(policy.parameters()).grad is None
    assert step.step(policy, cut(entries, 3, [len(entries)], 0))["gradient/skipped"] == 0


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", {0: 0.005, 1: 0.01, 2: 0.01, 9: 0.01}),
        ("linear", {0: 0.005, 2: 0.01, 9: 0.001}),
        ("cosine", {1: 0.01, 2: 0.01, 9: 0.001}),
    ],
)
def test_learning_rate(tmp_path: Path, mesh, schedule: str, rates: dict[int, float]) -> None:
    learner = LEARNER.model_copy(update={"schedule": schedule})
    optimizer = Optimizer(policy_of(tiny_model(tmp_path), mesh), learner, versions=10)
    assert {version: pytest.approx(optimizer.learning_rate(version)) for version in rates} == rates
    falling = [optimizer.learning_rate(version) for version in range(2, 10)]
    assert falling == sorted(falling, reverse=True)
