"""Routing replay and the load of experts in a step: against transformers with the same routes, whatever the packing,
the ranks and what is recomputed; samples whose routes cannot be replayed."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig
from learner.model.experts.mixture import Experts
from learner.train.batch import Batch
from learner.train.routes import RouteMismatch
from tests.harness import rank, world
from tests.harness.episodic import make_episodes
from tests.harness.expert_batches import SIZES, expert_model, own_routes, random_routes, routed
from tests.harness.world import ALGORITHM, LEARNER, algorithm_of, cut, make_groups, make_samples, plain, policy_of
from tests.learner.train.test_step import by_hand, close, gradients

PLAIN = ALGORITHM.model_copy(update={"tv_low": None, "tv_high": None})


def found(policy, entries, budget: int = 64, share: bool = False, algorithm: AlgorithmConfig = ALGORITHM, **options):
    """Gradients and sums of the batch; its routes are replayed if it has some."""
    step = algorithm_of(policy, budget, algorithm, **options)
    replayed = policy.mixture.sizes if Sample.unpack(entries[0].sample).routes else None
    part = cut(entries, 3, [len(entries)], 0)
    batch = Batch.from_part(part, budget, policy.costs.quadratic, share, replayed=replayed)
    sums = step.backward(policy, batch)
    gradient = gradients(policy)
    step.optimizer.adamw.zero_grad()
    return gradient, sums


@contextmanager
def replaying(model: Any) -> Iterator[None]:
    """transformers' routers take `random_routes` of the text, by the formula of the paper."""
    handed: list[torch.Tensor] = []

    def hand(_: Any, args: Any, kwargs: Any) -> None:
        ids = args[0] if args else kwargs["input_ids"]
        handed[:] = torch.from_numpy(random_routes(ids[0].tolist()).astype(np.int64)).unbind(1)

    def take(number: int, gate: Any, _: Any, output: Any) -> Any:
        weights = output[0].softmax(-1).gather(1, handed[number])
        return output[0], weights / weights.sum(-1, keepdim=True), handed[number]

    hooks = [model.register_forward_pre_hook(hand, with_kwargs=True)]
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.mlp.gate.register_forward_hook(partial(take, number)))
    yield
    for hook in hooks:
        hook.remove()


def test_the_gradient_with_other_routes_is_transformers(tmp_path: Path, mesh) -> None:
    """And far from that without."""
    model = expert_model(tmp_path)
    entries, theirs = make_samples(), plain(model)
    with replaying(theirs):
        want = by_hand(theirs, entries, PLAIN.is_cap)
    ours, _ = found(policy_of(model, mesh), routed(entries), algorithm=PLAIN)
    close(ours, want)
    free, _ = found(policy_of(model, mesh), entries, algorithm=PLAIN)
    assert (free["lm_head.weight"] - ours["lm_head.weight"]).norm() > 0.05 * ours["lm_head.weight"].norm()
    assert all(ours[f"model.layers.{layer}.mlp.gate.weight"].norm() > 0 for layer in (0, 1))


@pytest.mark.parametrize("saving", ["none", "selective", "block"])
def test_own_routes_change_nothing(tmp_path: Path, mesh, saving: str) -> None:
    """Not a bit. All of them agree, and the zeros of a document's last token neither count nor move a gradient."""
    model, entries = expert_model(tmp_path), make_samples()
    own, zeros = (routed(entries, partial(own_routes, plain(model)), last) for last in (True, False))
    learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
    policy = policy_of(model, mesh, learner, replay=True)
    replayed, sums = found(policy, own)
    free, others = found(policy, entries)
    assert all(torch.equal(replayed[name], gradient) for name, gradient in free.items())
    assert torch.equal(sums["moe"], others["moe"])
    as_sent, tallied = found(policy, zeros)
    close(as_sent, free, 1e-5)
    torch.testing.assert_close(tallied["moe"], sums["moe"])
    tokens = sum(Sample.unpack(entry.sample).tokens.shape[0] - 1 for entry in entries)
    assert sums["moe"][:, -1].tolist() == [tokens] * 2 and sums["moe"][:, -2].tolist() == [2 * tokens] * 2


def test_loads_are_counted_once(tmp_path: Path, mesh) -> None:
    """The loads of all tokens but each sample's last, against transformers' routers; with blocks that are recomputed,
    selectively or not at all; and as metrics of a step."""
    model, entries = expert_model(tmp_path), make_samples()
    own, want = plain(model), torch.zeros(2, 8, dtype=torch.float64)
    for entry in entries:
        for chosen in own_routes(own, Sample.unpack(entry.sample).tokens.numpy())[:-1]:
            for layer, ids in enumerate(chosen):
                want[layer, ids.astype(np.int64)] += 1
    for saving in ("none", "selective", "block"):
        learner = LEARNER.model_copy(update={"activation_checkpointing": saving})
        _, sums = found(policy_of(model, mesh, learner), entries)
        assert torch.equal(sums["moe"][:, :8], want)
    policy = policy_of(model, mesh)
    metrics = algorithm_of(policy, 64).step(policy, cut(entries, 3, [len(entries)], 0))
    assert metrics["moe/load_max_over_mean"] == pytest.approx(float((want.amax(1) / want.mean(1)).mean()))
    assert metrics["moe/experts_unused"] == pytest.approx(float((want == 0).double().mean()))
    assert 0 < metrics["moe/router_entropy"] < np.log(8) and "moe/routes_agree" not in metrics


def test_a_step_that_replays_tells_how_many_routes_agree(tmp_path: Path, mesh) -> None:
    model, entries = expert_model(tmp_path), make_samples()
    own = plain(model)

    def half(tokens: np.ndarray) -> np.ndarray:
        """The second layer has other experts: the first layer's choices agree, and change nothing before them."""
        routes = own_routes(own, tokens)
        others = [next(e for e in range(8) if e not in chosen) for chosen in routes[:, 1]]
        routes[:, 1, 0] = others
        return routes

    policy = policy_of(model, mesh, replay=True)
    metrics = algorithm_of(policy, 64).step(policy, cut(routed(entries, half), 3, [len(entries)], 0))
    assert metrics["moe/routes_agree"] == pytest.approx(0.75)


@pytest.mark.parametrize("batch", [make_samples, make_groups, make_episodes], ids=lambda make: make.__name__)
def test_packing_changes_nothing(tmp_path: Path, mesh, batch) -> None:
    """Budgets, samples of several segments, prompts computed once with their routes; tallies too."""
    policy, entries = policy_of(expert_model(tmp_path), mesh, replay=True), routed(batch())
    one, sums = found(policy, entries, 10**6)
    many, others = found(policy, entries, 90)
    close(one, many)
    torch.testing.assert_close(sums["moe"], others["moe"], rtol=1e-6, atol=1e-6)  # sums of float32
    shared, fewer = found(policy, entries, 150, share=True)
    close(one, shared, 3e-5)
    if batch is make_groups:  # each prompt's tokens are routed, and counted, once
        assert (fewer["moe"][:, -1] < sums["moe"][:, -1]).all()


@pytest.mark.xdist_group("ranks")
def test_ranks_change_nothing(tmp_path: Path, mesh) -> None:
    """Seven experts on two ranks: even parts, and a rank with nothing but dummies, which are not counted."""
    model = expert_model(tmp_path / "model", num_experts=7)
    sizes = Experts(2, 7, 2)
    entries = routed(make_samples(), partial(random_routes, sizes=sizes))
    want, sums = found(policy_of(model, mesh, replay=True), entries)
    algorithms = [ALGORITHM.model_dump(mode="json")]
    cuts = [[13, 11], [0, 24]]
    world.together("gradients", 2, tmp_path, cuts=cuts, budgets=[64], algorithms=algorithms, routes=sizes)
    for got in torch.load(tmp_path / "gradients.pt").values():
        torch.testing.assert_close(got.pop("tally"), sums["moe"], rtol=1e-5, atol=1e-6)
        close(got, want)


def test_the_reference_model_chooses_by_itself(tmp_path: Path, mesh) -> None:
    """The penalty of the very weights that are its reference is 0 only if both are routed alike."""
    model = expert_model(tmp_path)
    algorithm = ALGORITHM.model_copy(update={"reference_kl": 0.5})
    policy, reference = policy_of(model, mesh, replay=True), policy_of(model, mesh, frozen=True)
    entries = make_samples()
    for batch, alike in ((routed(entries), False), (routed(entries, partial(own_routes, plain(model))), True)):
        _, sums = found(policy, batch, algorithm=algorithm, reference=reference)
        assert (abs(float(sums["reference/k3"])) < 1e-6) is alike


def test_the_probe_chooses_by_itself(tmp_path: Path, mesh) -> None:
    model, text = expert_model(tmp_path), [3, 1, 4, 1, 5, 9]
    policy = policy_of(model, mesh, replay=True)
    before = policy.logprobs_of(text)
    found(policy, routed(make_samples()))
    assert policy.logprobs_of(text) == before == policy_of(model, mesh).logprobs_of(text)


def damaged(entries, row: int, routes: np.ndarray | None):
    """The batch, sample `row` with other routes."""
    sample = Sample.unpack(entries[row].sample)
    other = sample.model_copy(update={"routes": None if routes is None else Array.of(routes)})
    return [*entries[:row], entries[row]._replace(sample=other.pack()), *entries[row + 1 :]]


DAMAGE = [
    (lambda routes: None, "has no routes; the servers must run this model, with rollout.routing_replay: true"),
    (lambda routes: routes + 1, r"has a route to expert 8, and there are 8, counted from 0; the servers"),
    (lambda routes: routes[:, :1], r"has routes \[\d+, 1, 2\], and its tokens, layers with experts and experts a tok"),
    (lambda routes: routes[:, :, :1], r"has routes \[\d+, 2, 1\], and its tokens"),
]


@pytest.mark.parametrize(("damage", "problem"), DAMAGE, ids=lambda value: value[:12] if isinstance(value, str) else "")
def test_routes_that_cannot_be_replayed_are_never_trained(mesh, damage, problem: str) -> None:
    entries = routed(make_samples())
    routes = Sample.unpack(entries[9].sample).routes.numpy()
    assert routes.max() == 7
    part = cut(damaged(entries, 9, damage(routes)), 3, [24], 0)
    with pytest.raises(RouteMismatch, match=f"^item 2: sample 9 of batch 3 {problem}"):
        Batch.from_part(part, 64, replayed=SIZES)


@pytest.mark.xdist_group("ranks")
def test_all_ranks_end_where_one_has_no_routes(tmp_path: Path) -> None:
    world.together("unrouted", 2, tmp_path)
    said = [(tmp_path / f"unrouted-{number}.txt").read_text() for number in (0, 1)]
    assert said[0] == "another rank has a sample without routes that can be replayed"
    assert said[1].startswith("item 5: sample 20 of batch 3 has no routes")


def test_routes_of_many_experts_fit(mesh) -> None:
    entries = routed(make_samples(), lambda tokens: 300 + random_routes(tokens).astype(np.uint16))
    batch = Batch.from_part(cut(entries, 3, [24], 0), 10**6, replayed=Experts(2, 512, 2))
    (row,) = batch.microbatches
    assert row.routes.dtype == torch.int32 and row.routes.shape == (2, len(row.tokens), 2)
    assert set(row.routes.unique().tolist()) == {0, *range(300, 308)}


@pytest.mark.xdist_group("ranks")
def test_resumed_is_uninterrupted(tmp_path: Path, mesh) -> None:
    """One rank writes, two go on, with seven experts: as one rank alone would have."""
    for name in ("a", "b"):
        expert_model(tmp_path / name / "model", num_experts=7)
    whole = rank.run(tmp_path / "a", mesh, 0, 0, 4, [24])
    rank.run(tmp_path / "b", mesh, 0, 0, 2, [24])
    world.together("train", 2, tmp_path / "b", start=2, stop=4, cuts=[10, 14], name="rest")
    rest = torch.load(tmp_path / "b" / "rest.pt")
    for name, weight in whole["weights"].items():
        torch.testing.assert_close(rest["weights"][name], weight, rtol=1e-3, atol=1e-4)
    loads = [record["moe/load_max_over_mean"] for record in whole["records"]]
    assert [record["moe/load_max_over_mean"] for record in rest["records"]] == pytest.approx(loads[2:], rel=0.05)
