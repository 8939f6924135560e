"""What a critic learns: values of families of models, of a bandit whose values are known, and a policy beside it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from buffer.wire.message import Array
from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig, CriticConfig, ModelConfig
from learner.model.policy import Policy
from tests.harness.valued import LEARNER, actor_critic, critic_of, head
from tests.harness.world import Entry, cut, plain, policy_of, tiny_model, weights
from tests.learner.model.test_families import FAMILIES, config_of, row_of, saved, texts_of
from tests.learner.model.test_families import LEARNER as OF_FAMILIES

CHANCES = (0.1, 0.4, 0.6, 0.9)
"""Chance of a reward of 1 after each prompt, whatever the answer is."""
FAST = ("gemma2", "qwen3_5", "lfm2", "falcon_h1")
LATER = [
    name
    for name in ("mistral", "gemma4", "gpt_neox", "granite", "cohere", "phi", "olmo3", "glm4", "nemotron_h")
    if name in FAMILIES
]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.long) for name in LATER)])
def test_values_of_a_family_are_its_own_hidden_states_product(name: str, tmp_path: Path, mesh: Any) -> None:
    """Documents are packed, with windows, softcaps and layers that keep a state; gradients are compared too."""
    model = saved(config_of(name), tmp_path)
    body = Policy(ModelConfig(path=str(tmp_path), dtype="float32"), OF_FAMILIES, mesh, valued=True)
    weight = body.model.get_output_embeddings().weight
    given = head(weight.shape[0])
    with torch.no_grad():
        weight.copy_(torch.distributed.tensor.distribute_tensor(given, weight.device_mesh, weight.placements))
    texts, decoder = texts_of(40, 7, 1, 25), model.get_decoder()
    wanted = torch.cat([
        decoder(input_ids=torch.as_tensor(text)[None], use_cache=False).last_hidden_state[0] @ given for text in texts
    ])  # fmt: skip
    (got,) = body(body.place(row_of(texts)))
    assert float((got - wanted).detach().abs().max()) < 1e-4 * float(wanted.detach().abs().max())
    by = torch.randn(len(got), generator=torch.Generator().manual_seed(2))
    (wanted * by).sum().backward()
    (got * by).sum().backward()
    theirs = {key: p.grad for key, p in model.named_parameters()}
    scale = max(float(grad.norm()) for grad in theirs.values() if grad is not None)
    for key, parameter in body.model.named_parameters():
        if theirs.get(key) is not None:
            ours = parameter.grad.full_tensor()
            assert float((ours - theirs[key]).norm()) <= 1e-4 * float(ours.norm()) + 1e-6 * scale, key


def answered(model: torch.nn.Module, prompts: np.ndarray, version: int, reward: Any, draw: Any) -> list[Entry]:
    """A batch: four answers of one token to each of `prompts`, sampled from `model`; `reward` of prompt and answer."""
    with torch.no_grad():
        logp = model(torch.as_tensor(prompts)[:, None]).logits[:, 0].log_softmax(-1).double()
    chances, entries = logp.exp().numpy(), []
    for item, prompt in enumerate(prompts.tolist()):
        answers = draw.choice(chances.shape[1], 4, p=chances[item] / chances[item].sum()).tolist()
        rewards = [reward(prompt, answer) for answer in answers]
        for answer, one in zip(answers, rewards, strict=True):
            sample = Sample(
                tokens=Array.of(np.array([prompt, answer], np.int32)),
                sampled=Array.of(np.array([0, 1], np.uint8)),
                behaviour_logprobs=Array.of(np.array([0, float(logp[item, answer])], np.float32)),
                versions=Array.of(np.array([-1, version], np.int32)),
                reward=one,
                finish="stop",
            )
            entries.append(Entry(item, version, rewards, sample.pack()))
    return entries


@pytest.mark.long
def test_the_values_of_a_bandit_are_the_chances_of_its_rewards(tmp_path: Path, mesh: Any) -> None:
    """Rewards depend on the prompt and on luck alone, so that the value of its state is known."""
    model, draw = tiny_model(tmp_path), np.random.default_rng(0)
    config = AlgorithmConfig(loss="ppo", advantage="gae", critic=CriticConfig(warmup_versions=59, updates=2, clip=0.2))
    learner = LEARNER.model_copy(update={"lr": 2e-3})
    policy, critic = policy_of(model, mesh), critic_of(model, mesh, config.critic, learner, stirred=False)
    algorithm, sampler = actor_critic(policy, critic, 10**4, config), plain(model)
    explained = []
    for version in range(50):
        prompts = np.repeat(np.arange(len(CHANCES)), 8)
        entries = answered(sampler, prompts, version, lambda prompt, _: float(draw.random() < CHANCES[prompt]), draw)
        figures = algorithm.step(policy, cut(entries, version, [len(entries)], 0))
        explained.append(figures["critic/explained_variance"])
    row = row_of([np.array([prompt, 9]) for prompt in range(len(CHANCES))])
    learnt = critic.body.score(critic.body.place(row))[::2]
    assert learnt.tolist() == pytest.approx(CHANCES, abs=0.12)
    assert explained[0] == pytest.approx(0, abs=1e-6)  # a head of zeros knows nothing
    known = np.var(CHANCES) / (np.mean(CHANCES) * (1 - np.mean(CHANCES)))  # of all variance, what prompts explain
    assert np.mean(explained[-10:]) == pytest.approx(known, abs=0.1)


@pytest.mark.long
@pytest.mark.parametrize("loss", ["ppo", pytest.param("dppo", marks=pytest.mark.long)])
def test_a_policy_learns_with_it(tmp_path: Path, mesh: Any, loss: str) -> None:
    """The reward is 1 if the answer is as odd or even as the prompt: chance is .5."""
    model, draw = tiny_model(tmp_path), np.random.default_rng(1)
    config = AlgorithmConfig(loss=loss, advantage="gae", critic=CriticConfig(warmup_versions=2))
    policy, critic = policy_of(model, mesh), critic_of(model, mesh, config.critic, stirred=False)
    algorithm, sampler, rewards = actor_critic(policy, critic, 10**4, config, held=2), plain(model), []
    for version in range(24):
        sampler.load_state_dict(weights(policy))
        prompts = draw.integers(0, 8, 32)
        entries = answered(sampler, prompts, version, lambda prompt, answer: float(prompt % 2 == answer % 2), draw)
        figures = algorithm.step(policy, cut(entries, version, [len(entries)], 0))
        rewards.append(figures["reward/mean"])
    assert np.mean(rewards[:3]) < 0.65 and np.mean(rewards[-4:]) > 0.9, rewards
    assert abs(figures["critic/value"] - figures["critic/return"]) < 0.15
