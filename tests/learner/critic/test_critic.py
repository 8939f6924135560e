"""The critic beside the policy: its values and gradients against transformers in float64, on one rank and on two;
warm-up, checkpoints and memory."""

import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from buffer.wire.values import Bounds
from configs.load import ConfigError
from configs.schema import AlgorithmConfig, CriticConfig
from learner.checkpoint import Checkpoints
from learner.model.memory import estimate
from learner.sound import SoundSteps
from learner.train.batch import pack
from learner.train.optimizer import Optimizer
from tests.harness import rank, valued, world
from tests.harness.episodic import logprobs_by_segment, make_episodes
from tests.harness.lanes import long_but
from tests.harness.valued import NaiveCritic, actor_critic, critic_of, gradients_of_both, naive_advantages
from tests.harness.world import LEARNER, cut, make_samples, plain, policy_of, tiny_model

TOLERANCE = 2e-5
OPTIONS = [
    {},
    {"gamma": 0.9, "gae_lambda": 0.5, "whiten": False},
    pytest.param({"gamma": 0.5, "gae_lambda": 0.0}, marks=pytest.mark.long),
]


def gae(**options) -> AlgorithmConfig:
    return AlgorithmConfig(loss="reinforce", advantage="gae", critic=CriticConfig(**options))


def difference(ours: dict, theirs: dict) -> float:
    """The largest of a gradient, relative to the largest of its tensor."""
    assert ours.keys() == theirs.keys()
    return max(
        float((ours[name] - gradient).abs().max() / gradient.abs().max())
        for name, gradient in theirs.items()
        if "k_proj.bias" not in name  # attention does not depend on it
    )


def of_critic(gradients: dict) -> dict:
    """Names as the naive critic has them."""
    named = {"lm_head.value_head": "head"}
    return {named.get(name, name): gradient for name, gradient in gradients.items()}


def naive(model, entries, config: AlgorithmConfig) -> dict:
    """The same of transformers in float64: advantages, gradients of policy and critic."""
    samples = [Sample.unpack(entry.sample) for entry in entries]
    critic, policy = NaiveCritic(model), plain(model).double()
    advantages, values = naive_advantages(critic, samples, config.critic)
    tokens = torch.cat(advantages)
    targets = tokens + torch.cat(values).detach()
    (0.5 * (torch.cat(values) - targets) ** 2).mean().backward()
    if config.critic.whiten:
        advantages = [(each - tokens.mean()) / (tokens.var() + 1e-8).sqrt() for each in advantages]
    for sample, own in zip(samples, advantages, strict=True):
        logp = logprobs_by_segment(policy, sample)[torch.tensor(sample.sampled.numpy()) == 1]
        (-(own * logp).sum() / len(tokens)).backward()
    explained = 1 - float(tokens.var() / targets.var())
    return {
        "advantages": torch.cat(advantages),
        "critic": {name: parameter.grad for name, parameter in critic.named_parameters()},
        "policy": {name: parameter.grad for name, parameter in policy.named_parameters()},
        "figures": {"loss": float(0.5 * (tokens**2).mean()), "return": float(targets.mean()), "explained": explained},
    }


@pytest.mark.parametrize("options", long_but(OPTIONS, 1), ids=str)
def test_values_advantages_and_gradients_are_the_formula_s(tmp_path: Path, mesh, options: dict) -> None:
    """Segments, turns, truncated samples; packed into one row and many, with prompts shared and not."""
    model, config, entries = tiny_model(tmp_path), gae(**options), make_episodes()
    wanted = naive(model, entries, config)
    for budget, share in ((10**6, True), (60, True), (25, False)):
        learner = valued.LEARNER.model_copy(update={"share_prompts": share})
        policy, critic = policy_of(model, mesh, learner), critic_of(model, mesh, config.critic, learner)
        algorithm = actor_critic(policy, critic, budget, config)
        part = cut(entries, 3, [len(entries)], 0)
        batch = algorithm.pack(policy, part)
        given = torch.cat([each.advantages[each.scored] for each in batch.microbatches])
        torch.testing.assert_close(given.double().sort()[0], wanted["advantages"].sort()[0], rtol=1e-4, atol=2e-5)
        assert all(not each.advantages[~each.sampled].any() for each in batch.microbatches)
        found = gradients_of_both(algorithm, policy, part)
        assert difference(of_critic(found["critic"]), wanted["critic"]) < TOLERANCE, (budget, share)
        assert difference(found["policy"], wanted["policy"]) < TOLERANCE, (budget, share)
        figures = found["figures"]
        assert figures["critic/loss"] == pytest.approx(wanted["figures"]["loss"], rel=1e-4)
        assert figures["critic/return"] == pytest.approx(wanted["figures"]["return"], rel=1e-4)
        assert figures["critic/explained_variance"] == pytest.approx(wanted["figures"]["explained"], abs=1e-3)


def test_an_answer_that_is_too_long_is_masked_or_punished(tmp_path: Path, mesh) -> None:
    model, entries = tiny_model(tmp_path), make_episodes()
    samples = [Sample.unpack(entry.sample) for entry in entries]
    assert {sample.finish for sample in samples} == {"stop", "length"}
    critic, policy, given = critic_of(model, mesh), policy_of(model, mesh), {}
    for overlong in ("keep", "mask", "soft"):
        config = gae(whiten=False).model_copy(update={"overlong": overlong, "overlong_buffer": 20})
        critic.config = config.critic
        algorithm = actor_critic(policy, critic, 10**6, config)
        batch = algorithm.pack(policy, cut(entries, 3, [len(entries)], 0))
        (row,) = batch.microbatches
        given[overlong] = torch.stack([row.advantages[row.sequence.eq(n) & row.sampled].sum() for n in range(24)])
    cut_off = torch.tensor([sample.finish == "length" for sample in samples])
    assert not given["mask"][cut_off].any() and torch.equal(given["mask"][~cut_off], given["keep"][~cut_off])
    long = torch.tensor([int(sample.sampled.numpy().sum()) > 10 for sample in samples])
    assert (given["soft"] < given["keep"] - 0.01)[long].all() and torch.equal(
        given["soft"][~long], given["keep"][~long]
    )


def test_a_dummy_reaches_every_parameter_with_zeros(tmp_path: Path, mesh) -> None:
    """Or FSDP's collectives of the other ranks would wait for it."""
    model = tiny_model(tmp_path)
    policy, critic = policy_of(model, mesh), critic_of(model, mesh)
    algorithm = actor_critic(policy, critic, 10**6, gae())
    algorithm.pack(policy, cut(make_samples(), 3, [24], 0))
    (judged,) = critic._judged
    dummy = critic.body.place(pack([]))
    critic._judged = [judged._replace(microbatch=dummy, before=torch.zeros(0), targets=torch.zeros(0))]
    critic._backward()
    found = world.gradients(critic.body)
    assert len(found) == len(list(critic.body.parameters())) and not any(g.any() for g in found.values())


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("cuts", [[15, 9], pytest.param([24, 0], marks=pytest.mark.long)], ids=str)
def test_two_ranks_are_one(tmp_path: Path, mesh, cuts: list[int]) -> None:
    """Sharded and copied, gathered in each pass, in part, and once a batch; and a rank without any sample."""
    model = tiny_model(tmp_path / "model")
    config = AlgorithmConfig(advantage="gae", critic=CriticConfig(gamma=0.9, gae_lambda=0.5))
    policy, critic = policy_of(model, mesh), critic_of(model, mesh, config.critic)
    part = cut(make_episodes(), 3, [24], 0)
    want = gradients_of_both(actor_critic(policy, critic, 10**6, config), policy, part)
    world.together("valued", 2, tmp_path, copies=[2, 1], cuts=cuts, budget=60)
    found = torch.load(tmp_path / "valued.pt")
    assert len(found) == 2 * len(world.GATHERS)
    for case, got in found.items():
        assert difference(got["critic"], want["critic"]) < TOLERANCE, case
        assert difference(got["policy"], want["policy"]) < TOLERANCE, case
        assert got["figures"] == pytest.approx(want["figures"], rel=1e-4), case


@pytest.mark.long
def test_resumed_is_uninterrupted(tmp_path: Path, mesh) -> None:
    """Bit for bit, through the warm-up: metrics, weights of both, and thereby the states of both optimizers."""
    tiny_model(tmp_path / "a" / "model")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    options = {"warmup_versions": 3, "updates": 2, "clip": 0.05}
    whole = valued.run(tmp_path / "a", mesh, 0, 0, 6, [24], **options)
    first = valued.run(tmp_path / "b", mesh, 0, 0, 3, [24], **options)  # its version 3 is lost: 2 was the checkpoint
    again = valued.run(tmp_path / "b", mesh, 0, 2, 6, [24], **options)
    assert whole["records"] == first["records"][:2] + again["records"]
    for part in ("weights", "critic"):
        assert all(torch.equal(whole[part][name], tensor) for name, tensor in again[part].items()), part
    assert any(record["critic/clipped"] > 0 for record in whole["records"])
    assert [record["lr"] for record in whole["records"]] == [0.0, 0.0, 0.0, *[valued.LEARNER.lr] * 3]


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_across_numbers_of_ranks(tmp_path: Path, mesh) -> None:
    """Two ranks write, one goes on and writes, two go on: as one rank alone would have."""
    tiny_model(tmp_path / "a" / "model")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    whole = valued.run(tmp_path / "a", mesh, 0, 0, 6, [24])
    world.together("valued_runs", 2, tmp_path / "b", start=0, stop=2, cuts=[10, 14], name="first")
    valued.run(tmp_path / "b", mesh, 0, 2, 4, [24])
    world.together("valued_runs", 2, tmp_path / "b", start=4, stop=6, cuts=[24, 0], name="last")
    last = torch.load(tmp_path / "b" / "last.pt")
    for part in ("weights", "critic"):
        for name, tensor in whole[part].items():
            if "k_proj.bias" not in name:
                assert (last[part][name] - tensor).norm() < 1e-3 * tensor.norm(), (part, name)
    for got, want in zip(last["records"], whole["records"][4:], strict=True):
        assert got["critic/loss"] == pytest.approx(want["critic/loss"], rel=1e-3)


def test_in_warm_up_the_critic_learns_and_the_policy_stays(tmp_path: Path, mesh, caplog) -> None:
    model, config = tiny_model(tmp_path), gae(warmup_versions=5)
    slow = valued.LEARNER.model_copy(update={"lr": 1e-3})
    policy, critic = policy_of(model, mesh), critic_of(model, mesh, config.critic, slow)
    algorithm = actor_critic(policy, critic, 200, config, held=5)
    before, of_critic = world.weights(policy), world.weights(critic.body)
    with caplog.at_level(logging.INFO):
        figures = [algorithm.step(policy, cut(make_samples(), version, [24], 0)) for version in (3, 4)]
    lines = [record.getMessage() for record in caplog.records if "warm-up" in record.getMessage()]
    assert lines == ["critic warm-up: from version 3 to 5 the critic learns, the policy stays as it is"]
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())
    assert not any(torch.equal(of_critic[name], tensor) for name, tensor in world.weights(critic.body).items())
    assert all(one["lr"] == 0 and one["gradient/norm"] > 0 and one["critic/gradient_norm"] > 0 for one in figures)
    assert figures[1]["critic/loss"] < figures[0]["critic/loss"]
    algorithm.step(policy, cut(make_samples(), 5, [24], 0))
    assert not any(torch.equal(before[name], tensor) for name, tensor in world.weights(policy).items())


def test_the_schedule_begins_after_the_warm_up(tmp_path: Path, mesh) -> None:
    learner = LEARNER.model_copy(update={"warmup_versions": 4, "schedule": "linear"})
    policy = policy_of(tiny_model(tmp_path), mesh, learner)
    late, soon = Optimizer(policy, learner, 30, held=10), Optimizer(policy, learner, 20)
    assert [late.learning_rate(version + 10) for version in range(20)] == [
        soon.learning_rate(version) for version in range(20)
    ]


def test_a_value_that_is_not_finite_skips_the_critic_s_step(tmp_path: Path, mesh, caplog) -> None:
    model = tiny_model(tmp_path)
    policy, critic = policy_of(model, mesh), critic_of(model, mesh)
    algorithm = actor_critic(policy, critic, 200, gae())
    algorithm.backward(policy, algorithm.pack(policy, cut(make_samples(), 3, [24], 0)))
    critic._judged = [each._replace(targets=each.targets * float("inf")) for each in critic._judged]
    before = world.weights(critic.body)
    with caplog.at_level(logging.WARNING):
        figures = critic.learn(3)
    assert figures["critic/gradient_skipped"] == 1 and "the critic's gradient is not finite" in caplog.text
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(critic.body).items())


class Quarantine:
    """The buffer's client, of which groups at fault are reported alone."""

    def __init__(self) -> None:
        self.items = list[int]()

    def quarantine(self, item: int, reason: str) -> None:
        self.items.append(item)

    def try_alone(self, version: int, item: int | None) -> None: ...


@pytest.mark.parametrize("warmup", [0, 5])
def test_a_batch_that_is_taken_again_teaches_the_critic_once(tmp_path: Path, mesh, warmup: int) -> None:
    """One group's loss is not finite; the critic's is."""
    model, source = tiny_model(tmp_path), "-inputs.advantages * inputs.policy_logprobs / (inputs.behaviour > -50)"
    (tmp_path / "own.py").write_text(f"def loss(inputs, config): return {source}")
    config = gae(warmup_versions=warmup).model_copy(update={"loss": f"{tmp_path}/own.py:loss"})
    policy, critic = policy_of(model, mesh), critic_of(model, mesh, config.critic)
    algorithm, buffer, entries = actor_critic(policy, critic, 200, config, held=warmup), Quarantine(), make_samples()
    one = Sample.unpack(entries[9].sample)
    unlikely = Array.of(np.minimum(one.behaviour_logprobs.numpy() * 1e6, 0).clip(-100))
    entries[9] = entries[9]._replace(sample=one.model_copy(update={"behaviour_logprobs": unlikely}).pack())
    steps = SoundSteps(algorithm, buffer, Bounds(vocabulary=world.VOCABULARY))  # type: ignore[arg-type]
    before = world.weights(critic.body)
    assert steps.step(policy, cut(entries, 3, [24], 0)) is None and buffer.items == [entries[9].item]
    assert all(torch.equal(before[name], tensor) for name, tensor in world.weights(critic.body).items())
    rest = [each for each in entries if each.item != entries[9].item]
    stats = steps.step(policy, cut(rest, 3, [len(rest)], 0))
    assert stats and not stats["gradient/skipped"] and stats["critic/gradient_norm"] > 0
    assert not any(torch.equal(before[name], tensor) for name, tensor in world.weights(critic.body).items())


def test_a_checkpoint_has_the_critic_and_its_export_has_not(tmp_path: Path, mesh) -> None:
    """One that was written without a critic is refused where there is one; a critic that is there is left unread."""
    tiny_model(tmp_path / "a" / "model")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    rank.run(tmp_path / "a", mesh, 0, 0, 2, [24])
    with pytest.raises(ConfigError, match=r"gae, but .*v000002 was written by a run without a critic; begin a run"):
        valued.run(tmp_path / "a", mesh, 0, 2, 3, [24])
    valued.run(tmp_path / "b", mesh, 0, 0, 2, [24])
    rank.run(tmp_path / "b", mesh, 0, 2, 3, [24])
    model = tiny_model(tmp_path / "c" / "model")
    policy, critic = policy_of(model, mesh), critic_of(model, mesh)
    optimizer = Optimizer(policy, LEARNER, 10)
    for folder, given in (("with", critic), ("without", None)):
        checkpoints = Checkpoints(tmp_path / folder, model, LEARNER, optimizer, 10, critic=given)
        checkpoints.finish(policy, 3)
        checkpoints.close()
    exports = [tmp_path / name / "v000003" / "huggingface" for name in ("with", "without")]
    files = [{file.name: file.read_bytes() for file in folder.iterdir()} for folder in exports]
    assert files[0] == files[1] and "model.safetensors" in files[0]


@pytest.mark.parametrize("tied", [True, False])
def test_the_estimate_has_what_a_critic_holds(tmp_path: Path, mesh, tied: bool) -> None:
    """Weights and optimizer are counted in bytes; the rest of the peak is as without a critic."""
    model = tiny_model(tmp_path, tied)
    critic, policy = critic_of(model, mesh), policy_of(model, mesh)
    actor_critic(policy, critic, 200, gae()).step(policy, cut(make_samples(), 3, [24], 0))
    held = [parameter.to_local() for parameter in critic.body.parameters()]
    moments = [
        state[name].to_local() for state in critic.optimizer.adamw.state.values() for name in ("exp_avg", "exp_avg_sq")
    ]
    assert not any(parameter.grad is not None for parameter in (*critic.body.parameters(), *policy.parameters()))
    ours, without = (estimate(model, LEARNER, 1, critic=given) for given in (True, False))
    for one, other in zip(ours.candidates, without.candidates, strict=True):
        assert one.fixed["critic"] == sum(tensor.nbytes for tensor in (*held, *moments))
        assert one.total(1024) - one.fixed["critic"] == other.total(1024)
    assert (
        estimate(model, LEARNER, 2, critic=True).candidates[0].fixed["critic"]
        == ours.candidates[0].fixed["critic"] // 2
    )
