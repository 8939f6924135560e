"""A sample of several segments is one sample, each segment of which is computed alone: against transformers in float64,
segment by segment, for losses and aggregations; and the credit of turns against its definition."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import turn_returns
from learner.algorithms.losses import is_tokenwise
from learner.train.batch import Batch, alone, documents_of, pack
from tests.harness import world
from tests.harness.episodic import make_episodes, naive_loss, turn_advantages
from tests.harness.lanes import long_but
from tests.harness.world import algorithm_of, cut, make_samples, plain, policy_of, tiny_model

TOLERANCE = 2e-5
CASES = [
    {"loss": "cispo"},
    {"loss": "cispo", "aggregation": "sequence"},
    {"loss": "cispo", "aggregation": "prompt", "advantage": "leave_one_out"},
    {"loss": "reinforce", "aggregation": "constant"},
    {"loss": "gspo", "clip_low": 0.2},
    {"loss": "topr", "aggregation": "sequence"},
    {"loss": "cispo", "opsm_delta": 0.1, "aggregation": "sequence"},
    {"loss": "cispo", "turn_discount": 0.5},
    {"loss": "gspo", "turn_discount": 0.9, "advantage": "leave_one_out"},
    {"loss": "reinforce", "turn_discount": 0.0, "aggregation": "sequence"},
]


def batch_of(policy, budget: int, share: bool) -> Batch:
    entries = make_episodes()
    return Batch.from_part(cut(entries, 3, [len(entries)], 0), budget, policy.costs.quadratic, share)


def step(policy, budget: int, config: AlgorithmConfig, share: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Gradients and sums."""
    made = algorithm_of(policy, budget, config)
    sums = made.backward(policy, batch_of(policy, budget, share))
    gradients = world.gradients(policy)
    made.optimizer.adamw.zero_grad()
    return gradients, sums


def naive(model, config: AlgorithmConfig, together: bool = False) -> tuple[dict[str, Tensor], float]:
    """The same of transformers in float64: gradients and loss."""
    whole = plain(model).double()
    loss = naive_loss(whole, make_episodes(), config, together)
    loss.backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}, float(loss.detach())


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest of a gradient, relative to the largest of its tensor."""
    return max(
        float((ours[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in theirs.items()
        if "k_proj.bias" not in name  # attention does not depend on it
    )


LONG = (1, 3, 5, 7)
"""Cases for the long tests only: other cases have the same loss, aggregation and advantage."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(case, id=str(case), marks=pytest.mark.long if number in LONG else ())
        for number, case in enumerate(CASES)
    ],
)
def test_each_segment_alone_and_the_sample_the_unit(tmp_path: Path, mesh, options: dict) -> None:
    config = AlgorithmConfig(is_cap=1.5, **options)
    model = tiny_model(tmp_path)
    expected, loss = naive(model, config)
    policy = policy_of(model, mesh)
    for budget, share in ((10**6, False), (10**6, True), (60, True), (25, False)):
        gradients, sums = step(policy, budget, config, share)
        assert difference(gradients, expected) < TOLERANCE, (budget, share)
        assert float(sums["loss/policy"]) == pytest.approx(loss, rel=1e-4, abs=1e-6)


def test_segments_that_see_each_other_are_noticed(tmp_path: Path, mesh) -> None:
    """The control: the same samples, each as one text, give another gradient; so do segments that count as samples."""
    config, model = AlgorithmConfig(loss="reinforce", aggregation="sequence"), tiny_model(tmp_path)
    gradients, _ = step(policy_of(model, mesh), 60, config, share=True)
    together, _ = naive(model, config, together=True)
    assert difference(gradients, together) > 100 * TOLERANCE
    as_samples = plain(model).double()
    naive_loss(as_samples, [one for entry in make_episodes() for one in parted(entry)], config).backward()
    wrong = {name: parameter.grad for name, parameter in as_samples.named_parameters()}
    assert difference(gradients, wrong) > 100 * TOLERANCE


def parted(entry: world.Entry) -> list[world.Entry]:
    """Each segment of a sample as a sample of its own."""
    sample = Sample.unpack(entry.sample)
    arrays = {name: getattr(sample, name).numpy() for name in Sample.DTYPES}
    return [
        entry._replace(
            sample=sample.model_copy(
                update={name: world.Array.of(array[start:stop]) for name, array in arrays.items()}
                | {"starts": [0], "turn_rewards": []}
            ).pack()
        )
        for start, stop in sample.bounds
    ]


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("numbers", [(8,), pytest.param((1, 4, 8), marks=pytest.mark.long)], ids=str)
def test_two_ranks_are_one(tmp_path: Path, mesh, numbers: tuple[int, ...]) -> None:
    """Over gloo, also where a rank has nothing, and where samples are spread over microbatches."""
    model = tiny_model(tmp_path / "model")
    configs = [AlgorithmConfig(is_cap=1.5, **CASES[number]) for number in numbers]
    dumped = [config.model_dump(mode="json") for config in configs]
    arguments = {"cuts": [[9, 15], [24, 0]], "budgets": [60], "share": True, "episodes": True}
    world.together("gradients", 2, tmp_path, algorithms=dumped, **arguments)
    found = torch.load(tmp_path / "gradients.pt")
    assert len(found) == 2 * len(numbers)
    expected = [naive(model, config)[0] for config in configs]
    for name, gradients in found.items():
        assert difference(gradients, expected[int(name.split()[-1])]) < TOLERANCE, name


def test_metrics_are_of_samples(tmp_path: Path, mesh) -> None:
    """Whether samples are spread over microbatches or not."""
    entries, model = make_episodes(), tiny_model(tmp_path)
    part, config = cut(entries, 3, [len(entries)], 0), AlgorithmConfig(turn_discount=0.5)

    def figures(budget: int) -> dict[str, float]:
        policy = policy_of(model, mesh)
        return algorithm_of(policy, budget, config).step(policy, part)

    whole, spread = figures(10**6), figures(25)
    samples = [Sample.unpack(entry.sample) for entry in entries]
    segments = [len(sample.starts) for sample in samples]
    assert whole["segments/mean"] == np.mean(segments) and whole["segments/max"] == 3
    assert whole["turns/max"] == max(len(sample.turn_rewards) for sample in samples) > 3
    assert spread.keys() == whole.keys() and spread["microbatches"] > whole["microbatches"] == 1
    for name in ("ess/sequence", "ess/token", "entropy/mean", "turns/mean", "loss", "offpolicy/k3", "gradient/norm"):
        assert spread[name] == pytest.approx(whole[name], rel=1e-4), name


@pytest.mark.parametrize(
    "options", long_but([{}, {"loss": "gspo"}, {"loss": "topr"}, {"opsm_delta": 0.1}], 0, 3), ids=str
)
def test_sums_do_not_depend_on_the_microbatches(tmp_path: Path, mesh, options: dict) -> None:
    config, policy = AlgorithmConfig(**options), policy_of(tiny_model(tmp_path), mesh)
    (one, expected), (many, sums) = (step(policy, budget, config, share=True) for budget in (10**6, 25))
    assert difference(many, one) < TOLERANCE and sums.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-4, atol=1e-5)
    assert float(sums["sequences"]) == len(make_episodes())


def test_a_ratio_of_a_part_is_another(tmp_path: Path, mesh) -> None:
    """The control: spread samples whose ratios count what stands in the microbatch have another gradient."""
    config, policy = AlgorithmConfig(loss="gspo", clip_low=0.2), policy_of(tiny_model(tmp_path), mesh)
    whole, _ = step(policy, 10**6, config, share=True)
    made, batch = algorithm_of(policy, 25, config), batch_of(policy, 25, True)
    made.backward(policy, replace(batch, scattered=False))
    assert difference(world.gradients(policy), whole) > 100 * TOLERANCE


def test_a_pass_more_only_where_samples_are_spread(tmp_path: Path, mesh) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    assert not batch_of(policy, 10**6, False).scattered and batch_of(policy, 25, False).scattered
    entries = make_samples()
    assert not Batch.from_part(cut(entries, 3, [len(entries)], 0), 25).scattered
    assert not is_tokenwise(AlgorithmConfig(loss="gspo")) and is_tokenwise(AlgorithmConfig(loss="cispo"))


def test_documents_are_segments() -> None:
    samples = [Sample.unpack(entry.sample) for entry in make_episodes()]
    documents, turns = documents_of(samples, range(len(samples)))
    row = pack(alone(documents))
    assert row.tokens.tolist() == [token for sample in samples for token in sample.tokens.numpy()]
    starts = [start for sample in samples for start, _ in sample.bounds]
    assert len(row.cu_seqlens) == len(starts) + 1 and [int(row.positions[i]) for i in row.cu_seqlens[:-1]] == [0] * len(
        starts
    )
    assert (
        row.sequence.tolist() == np.repeat(range(len(samples)), [sample.tokens.shape[0] for sample in samples]).tolist()
    )
    sampled = np.concatenate([sample.sampled.numpy() for sample in samples]) == 1
    assert row.sampled.tolist() == sampled.tolist(), "each sampled token once"
    assert (row.turn.numpy()[~sampled] == -1).all() and set(row.turn.tolist()) == set(range(-1, len(turns.rows)))
    for sample, number in zip(samples, range(len(samples)), strict=True):
        assert turns.rewards[turns.rows == number].sum() == pytest.approx(sample.reward)
        if sample.turn_rewards:
            assert turns.rewards[turns.rows == number].tolist() == sample.turn_rewards


@given(st.lists(st.lists(st.floats(-2, 2), min_size=1, max_size=6), min_size=1, max_size=6), st.floats(0, 1))
def test_returns_are_their_definition(samples: list[list[float]], discount: float) -> None:
    rewards = torch.tensor([reward for turns in samples for reward in turns], dtype=torch.float64)
    rows = torch.tensor([row for row, turns in enumerate(samples) for _ in turns])
    expected = [
        sum(discount ** (k - t) * turns[k] for k in range(t, len(turns)))
        for turns in samples
        for t in range(len(turns))
    ]
    np.testing.assert_allclose(turn_returns(rewards, rows, discount), expected, atol=1e-12)


@pytest.mark.parametrize("advantage", ["group_mean", "leave_one_out"])
@pytest.mark.parametrize("discount", [None, 0.0, 0.7, 1.0])
def test_turns_are_credited_as_defined(tmp_path: Path, mesh, advantage: str, discount: float | None) -> None:
    entries = make_episodes()
    samples, items = [Sample.unpack(entry.sample) for entry in entries], [entry.item for entry in entries]
    config = AlgorithmConfig(advantage=advantage, turn_discount=discount)
    policy = policy_of(tiny_model(tmp_path), mesh)
    batch = batch_of(policy, 10**6, False)
    found = algorithm_of(policy, 10**6, config)._advantages(batch)[
        pack(alone(documents_of(samples, range(24))[0])).turn
    ]
    np.testing.assert_allclose(found, np.concatenate(turn_advantages(samples, items, config)), atol=1e-6)


def test_undiscounted_outcomes_are_the_default(tmp_path: Path, mesh) -> None:
    """To the bit, also with a soft penalty, which is the last turn's, and with truncated samples masked."""
    entries = [entry for entry in make_episodes() if entry.item % 2 == 0]  # without rewards of turns
    policy = policy_of(tiny_model(tmp_path), mesh)
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 10**6)
    for overlong in ("keep", "mask", "soft"):
        config = AlgorithmConfig(overlong=overlong, overlong_buffer=10)
        default, credited = (
            algorithm_of(policy, 64, config.model_copy(update={"turn_discount": discount}))._advantages(batch)
            for discount in (None, 1.0)
        )
        assert torch.equal(default, credited) and default.abs().sum() > 0
        less = algorithm_of(policy, 64, config.model_copy(update={"turn_discount": 0.5}))._advantages(batch)
        assert not torch.equal(less, default)
