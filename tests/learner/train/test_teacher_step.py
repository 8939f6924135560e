"""A step with teachers: its gradient is the formula's, computed by transformers alone, whatever the packing."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.wire.message import Array
from buffer.wire.sample import Sample, TopTeacher
from learner.algorithms.advantages import ADVANTAGES
from learner.sound import bounds_of, judged
from learner.train.batch import Batch, pack
from tests.harness.episodic import make_forks
from tests.harness.world import (
    ALGORITHM,
    Entry,
    algorithm_of,
    cut,
    gradients,
    make_groups,
    make_samples,
    plain,
    policy_of,
    tiny_model,
)
from tests.learner.train.test_step import close

WEIGHTS = {"": 0.5, "math": 2.0}
OPEN = ALGORITHM.model_copy(update={"tv_low": None, "tv_high": None})


def taught(entries: list[Entry], every: bool = False, reward: float = 1.0) -> list[Entry]:
    """The same samples: a third without a teacher, unless `every`, and a third of `math`; rewards times `reward`."""
    draw, made = np.random.default_rng(5), []
    for entry in entries:
        sample = Sample.unpack(entry.sample)
        sampled = sample.sampled.numpy() != 0
        logprobs = Array.of(np.where(sampled, -draw.exponential(2.0, sampled.size), 0).astype(np.float32))
        changes: dict[str, Any] = {"reward": reward * sample.reward}
        if every or entry.item % 3:
            changes |= {"teacher": "math" if entry.item % 3 == 1 else "", "teacher_logprobs": logprobs}
        rewards = [reward * one for one in entry.rewards]
        made.append(Entry(entry.item, entry.dispatched, rewards, sample.model_copy(update=changes).pack()))
    return made


def by_hand(model: Any, entries: list[Entry], cap: float, mask: bool = False) -> dict[str, torch.Tensor]:
    """The gradient of `dppo` without trust region, sample by sample: A is the reward's plus weight (log q - log mu)."""
    samples = [Sample.unpack(entry.sample) for entry in entries]
    rewards = torch.tensor([sample.reward for sample in samples])
    advantages = ADVANTAGES["group_mean"](rewards, torch.tensor([entry.item for entry in entries]))
    total, loss = sum(int(sample.sampled.numpy().sum()) for sample in samples), torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        ids, behaviour = torch.tensor(sample.tokens.numpy()).long(), torch.tensor(sample.behaviour_logprobs.numpy())[1:]
        logp = model(ids[None]).logits[0, :-1].log_softmax(-1).gather(-1, ids[1:, None]).squeeze(-1)
        gains = torch.zeros(len(ids) - 1)
        if sample.teacher_logprobs is not None:
            gains = WEIGHTS[sample.teacher] * (torch.tensor(sample.teacher_logprobs.numpy())[1:] - behaviour)
        own = torch.zeros(len(gains)) if mask and sample.finish == "length" else advantage + gains
        ratio = (logp - behaviour).exp().detach().clamp(max=cap)
        loss = loss - (ratio * own * logp)[torch.tensor(sample.sampled.numpy()[1:] == 1)].sum() / total
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("reward", "mask"), [(1.0, False), (1.0, True), (0.0, False)])
def test_the_gradient_is_the_formula_s(tmp_path: Path, mesh: Any, reward: float, mask: bool) -> None:
    """Added to the reward's advantage, masked where overlong samples are, and alone."""
    model, entries = tiny_model(tmp_path), taught(make_samples(), reward=reward)
    algorithm = OPEN.model_copy(update={"overlong": "mask" if mask else "keep"})
    policy = policy_of(model, mesh)
    step = algorithm_of(policy, 64, algorithm, teachers=WEIGHTS)
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 64, policy.costs.quadratic)
    sums = step.backward(policy, batch)
    assert sums["advantages_nonzero"] > 0
    close(gradients(policy), by_hand(plain(model), entries, algorithm.is_cap, mask))


def test_shared_prompts_and_several_turns_change_nothing(tmp_path: Path, mesh: Any) -> None:
    model, entries = tiny_model(tmp_path), taught(make_groups())
    expected = by_hand(plain(model), entries, OPEN.is_cap)
    policy = policy_of(model, mesh)
    for budget, share in ((10**6, True), (64, True), (64, False)):
        step = algorithm_of(policy, budget, OPEN, teachers=WEIGHTS)
        batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), budget, policy.costs.quadratic, share)
        step.backward(policy, batch)
        close(gradients(policy), expected, tolerance=2e-5)
        step.optimizer.adamw.zero_grad()


def test_metrics_of_a_step_count_tokens_by_teacher(tmp_path: Path, mesh: Any) -> None:
    entries = taught(make_samples())
    policy = policy_of(tiny_model(tmp_path), mesh)
    step = algorithm_of(policy, 64, OPEN, teachers=WEIGHTS)
    metrics = step.step(policy, cut(entries, 3, [len(entries)], 0))
    gaps: dict[str, list[float]] = {"": [], "math": []}
    tokens = 0
    for sample in (Sample.unpack(entry.sample) for entry in entries):
        sampled = sample.sampled.numpy() != 0
        tokens += int(sampled.sum())
        if sample.teacher_logprobs is not None:
            gap = sample.behaviour_logprobs.numpy().astype(float) - sample.teacher_logprobs.numpy()
            gaps[sample.teacher] += gap[sampled].tolist()
    every = gaps[""] + gaps["math"]
    assert metrics["teacher/share"] == pytest.approx(len(every) / tokens)
    assert metrics["teacher/reverse_kl"] == pytest.approx(np.mean(every), rel=1e-6)
    assert metrics["teacher/math/reverse_kl"] == pytest.approx(np.mean(gaps["math"]), rel=1e-6)
    assert metrics["teacher/other/reverse_kl"] == pytest.approx(np.mean(gaps[""]), rel=1e-6)


def test_a_batch_without_teachers_has_none_in_its_rows(tmp_path: Path, mesh: Any) -> None:
    entries = make_samples()
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), 64)
    assert all(row.teacher is None for row in batch.microbatches) and not batch.teachers and pack([]).teacher is None


def test_the_learner_refuses_a_sample_of_a_teacher_that_the_run_has_not(tmp_path: Path, mesh: Any) -> None:
    policy, part = policy_of(tiny_model(tmp_path), mesh), cut(taught(make_samples(), every=True), 3, [24], 0)
    assert judged(part, bounds_of(policy, None, WEIGHTS)) == {}
    found = judged(part, bounds_of(policy, None, {"": 1.0}))
    assert found and all("teacher: 'math'; the run has ''" in why for why in found.values())
    plain_part = cut(make_samples(), 3, [24], 0)
    assert "there are none; every row" in next(iter(judged(plain_part, bounds_of(policy, None, WEIGHTS)).values()))


TOP = 3


def topped(entries: list[Entry], vocabulary: int) -> list[Entry]:
    """Each sample with a teacher has the TOP most probable tokens of random distributions in place of sampled ones."""
    draw, made = torch.Generator().manual_seed(7), []
    for entry in entries:
        sample = Sample.unpack(entry.sample)
        if sample.teacher_logprobs is not None:
            number = int(sample.sampled.numpy().sum())
            best = torch.randn(number, vocabulary, generator=draw).mul(2).log_softmax(-1).topk(TOP)
            ids, logprobs = Array.of(best.indices.int().numpy()), Array.of(best.values.numpy())
            top = TopTeacher(name=sample.teacher_name, ids=ids, logprobs=logprobs)
            sample = sample.model_copy(update={"teacher": top})
        made.append(Entry(entry.item, entry.dispatched, entry.rewards, sample.pack()))
    return made


def top_by_hand(model: Any, entries: list[Entry], cap: float, weight: dict[str, float]) -> dict[str, torch.Tensor]:
    """The gradient of `dppo` of the rewards alone, and of the mean over all sampled tokens of weight times the reverse
    KL over TOP tokens and all others as one, sample by sample."""
    samples = [Sample.unpack(entry.sample) for entry in entries]
    advantages = ADVANTAGES["group_mean"](
        torch.tensor([sample.reward for sample in samples]), torch.tensor([entry.item for entry in entries])
    )
    total, loss = sum(int(sample.sampled.numpy().sum()) for sample in samples), torch.zeros(())
    for sample, advantage in zip(samples, advantages, strict=True):
        ids, sampled = torch.tensor(sample.tokens.numpy()).long(), torch.tensor(sample.sampled.numpy()[1:] == 1)
        policy = model(ids[None]).logits[0, :-1].log_softmax(-1)[sampled]
        logp, behaviour = policy.gather(-1, ids[1:][sampled, None])[:, 0], sample.behaviour_logprobs.numpy()[1:]
        ratio = (logp - torch.tensor(behaviour)[sampled]).exp().detach().clamp(max=cap)
        loss = loss - (ratio * advantage * logp).sum() / total
        if (top := sample.teacher_top) is not None:
            q, own = torch.tensor(top.logprobs.numpy()), policy.gather(-1, torch.tensor(top.ids.numpy()).long())
            rest, left = 1 - q.exp().sum(-1), 1 - own.exp().sum(-1)
            distance = (own.exp() * (own - q)).sum(-1) + left * (left / rest).log()
            loss = loss + weight[top.name] * distance.sum() / total
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.parametrize(("budget", "share"), [(10**6, True), (64, True), (64, False)])
def test_with_most_probable_tokens_the_gradient_is_that_of_the_divergence(
    tmp_path: Path, mesh: Any, budget: int, share: bool
) -> None:
    """Beside the rewards' advantages, which gain nothing; with samples without a teacher, shared prompts and turns."""
    model = tiny_model(tmp_path)
    policy = policy_of(model, mesh)
    entries = topped(taught(make_groups()), policy.model.config.vocab_size)
    step = algorithm_of(policy, budget, OPEN, teachers=WEIGHTS, top_k=True)
    batch = Batch.from_part(cut(entries, 3, [len(entries)], 0), budget, policy.costs.quadratic, share)
    sums = step.backward(policy, batch)
    assert float(sums["loss/teacher"]) > 0 and float(sums["teacher_divergence"]) > 0
    close(gradients(policy), top_by_hand(plain(model), entries, OPEN.is_cap, WEIGHTS), tolerance=2e-5)


def test_a_step_reports_the_mean_divergence_of_tokens_with_a_teacher(tmp_path: Path, mesh: Any) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    entries = topped(taught(make_samples()), policy.model.config.vocab_size)
    step = algorithm_of(policy, 64, OPEN, teachers=WEIGHTS, top_k=True)
    metrics = step.step(policy, cut(entries, 3, [len(entries)], 0))
    assert metrics["teacher/divergence"] > 0 and metrics["loss/teacher"] > 0
    assert metrics["loss"] == pytest.approx(metrics["loss/policy"] + metrics["loss/teacher"])


def test_the_mean_divergence_is_of_tokens_that_are_trained(tmp_path: Path, mesh: Any) -> None:
    """Masked samples are neither in the sum nor in the count."""
    model = tiny_model(tmp_path)
    entries = topped(taught(make_samples()), policy_of(model, mesh).model.config.vocab_size)
    whole = [entry for entry in entries if Sample.unpack(entry.sample).finish == "stop"]
    assert 0 < len(whole) < len(entries)
    found = []
    for some, overlong in ((entries, "mask"), (whole, "keep")):
        algorithm = OPEN.model_copy(update={"overlong": overlong})
        step = algorithm_of(policy := policy_of(model, mesh), 64, algorithm, teachers=WEIGHTS, top_k=True)
        found.append(step.step(policy, cut(some, 3, [len(some)], 0))["teacher/divergence"])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_the_learner_refuses_another_number_of_most_probable_tokens(tmp_path: Path, mesh: Any) -> None:
    policy = policy_of(tiny_model(tmp_path), mesh)
    part = cut(topped(taught(make_samples(), every=True), policy.model.config.vocab_size), 3, [24], 0)
    assert judged(part, bounds_of(policy, None, WEIGHTS, TOP)) == {}
    found = next(iter(judged(part, bounds_of(policy, None, WEIGHTS, 5)).values()))
    assert f"teacher: {TOP} tokens in place of each sampled one; teacher.top_k is 5" in found


def test_with_most_probable_tokens_prompts_alone_are_shared(
    tmp_path: Path, mesh: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A token that several samples have in common would have a teacher's tokens from each of them."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    entries = topped(taught(make_forks(), every=True), policy.model.config.vocab_size)
    part = cut(entries, 3, [len(entries)], 0)
    assert any(row.targets for row in algorithm_of(policy, 400, OPEN).pack(policy, part).microbatches)
    step = algorithm_of(policy, 400, OPEN, teachers=WEIGHTS, top_k=True)
    with caplog.at_level(logging.INFO):
        batches = [step.pack(policy, part) for _ in range(2)]
    assert all(row.targets is None and row.teacher_ids is not None for each in batches for row in each.microbatches)
    assert caplog.text.count("no longer prefixes: teacher.top_k: most probable tokens are given for each sample") == 1
