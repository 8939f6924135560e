"""Critics for the learner's tests, and an independent one: transformers in float64, token by token."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import distribute_tensor

from buffer.wire.sample import Sample
from configs.schema import AlgorithmConfig, CriticConfig, LearnerConfig, ModelConfig
from learner.checkpoint import Checkpoints
from learner.critic.critic import Critic
from learner.mesh import shards
from learner.model.policy import Policy
from learner.train.optimizer import Optimizer
from learner.train.step import Algorithm
from tests.harness import world

LEARNER = world.LEARNER.model_copy(update={"warmup_versions": 0, "lr": 1e-2})


def critic_of(
    model: ModelConfig,
    mesh: DeviceMesh,
    config: CriticConfig | None = None,
    learner: LearnerConfig = LEARNER,
    stirred: bool = True,
) -> Critic:
    """`stirred`: its value head is `head`, not zeros."""
    body = Policy(model, learner, mesh, valued=True)
    if stirred:
        weight = body.model.get_output_embeddings().weight
        with torch.no_grad():
            weight.copy_(distribute_tensor(head(weight.shape[0]), weight.device_mesh, weight.placements))
    return Critic(config or CriticConfig(), body, Optimizer(body, learner, 10))


def head(size: int) -> Tensor:
    """A value head that is not zero: [size] float32."""
    return torch.randn(size, generator=torch.Generator().manual_seed(7)) / size**0.5


def actor_critic(policy: Policy, critic: Critic, budget: int, config: AlgorithmConfig, held: int = 0) -> Algorithm:
    """An algorithm with a critic."""
    optimizer = Optimizer(policy, LEARNER, 10, held)
    return Algorithm(config, optimizer, budget, max_tokens=30, critic=critic)


def by_definition(steps: Sequence[dict[str, Any]], gamma: float, gae_lambda: float) -> list[float]:
    """A_t = sum over l of (the product of the decays between t and t + l) delta_(t + l), over single tokens: `value` of
    the state before each and `after` it, the `reward` that it earned, and whether it ends a turn. Only between turns
    there is a decay; the `after` of a finished episode counts as 0."""
    deltas, decays = [], []
    for number, step in enumerate(steps):
        last = number == len(steps) - 1
        discount = gamma if step["ends"] and not last else 1.0
        following = (step["after"] if step["truncated"] else 0.0) if last else steps[number + 1]["value"]
        deltas.append(step["reward"] + discount * following - step["value"])
        decays.append(discount * (gae_lambda if step["ends"] else 1.0))
    advantages = []
    for start in range(len(steps)):
        total, weight = 0.0, 1.0
        for number in range(start, len(steps)):
            total += weight * deltas[number]
            weight *= decays[number]
        advantages.append(total)
    return advantages


class NaiveCritic(nn.Module):
    """transformers' model and a vector, in float64."""

    def __init__(self, model: ModelConfig) -> None:
        super().__init__()
        self.model = world.plain(model).double().model
        self.head = nn.Parameter(head(self.model.config.hidden_size).double())

    def states(self, sample: Sample) -> Tensor:
        """Value of the state after each token of a sample, each segment alone: [tokens]."""
        found = []
        for start, stop in sample.bounds:
            ids = torch.tensor(sample.tokens.numpy()[start:stop]).long()
            found.append(self.model(ids[None]).last_hidden_state[0] @ self.head)
        return torch.cat(found)

    def steps(self, sample: Sample) -> tuple[list[dict[str, Any]], Tensor]:
        """The sampled tokens of a sample as `by_definition` has them, and their values with gradient."""
        states, flags = self.states(sample), sample.sampled.numpy()
        found, known = list[dict[str, Any]](), states.tolist()
        places, turns = list[int](), 0
        for start, stop in sample.bounds:
            place = start
            for own, run in groupby(flags[start:stop]):
                length = len(list(run))
                for token in range(place, place + length) if own else ():
                    ends = token == place + length - 1
                    found.append({"value": known[token - 1], "after": known[token], "ends": ends,
                                  "truncated": sample.finish == "length", "turn": turns, "reward": 0.0})  # fmt: skip
                    places.append(token - 1)
                turns += int(own)
                place += length
        rewards = sample.turn_rewards or [0.0] * (turns - 1) + [sample.reward]
        for step in found:
            step["reward"] = rewards[step["turn"]] if step["ends"] else 0.0
        return found, states[places]


def naive_advantages(
    critic: NaiveCritic, samples: Sequence[Sample], config: CriticConfig
) -> tuple[list[Tensor], list[Tensor]]:
    """The advantages of each sample's sampled tokens, before they are whitened, and their values: [sampled] float64
    each."""
    advantages, values = [], []
    for sample in samples:
        steps, own = critic.steps(sample)
        advantages.append(torch.tensor(by_definition(steps, config.gamma, config.gae_lambda), dtype=torch.float64))
        values.append(own)
    return advantages, values


def gradients_of_both(algorithm: Algorithm, policy: Policy, part: Any) -> dict[str, Any]:
    """Gradients of one batch, of the policy and of its critic, before any step; and the critic's figures."""
    critic = algorithm.critic
    assert critic is not None
    algorithm.backward(policy, algorithm.pack(policy, part))
    found = {"policy": world.gradients(policy)}
    algorithm.optimizer.adamw.zero_grad()
    clipped = critic._backward()
    return found | {"critic": world.gradients(critic.body), "figures": critic._figures | {"clipped": clipped}}


def run(
    folder: Path, mesh: DeviceMesh, rank: int, start: int, stop: int, cuts: list[int], **options: Any
) -> dict[str, Any]:
    """Train policy and critic on a fixed sequence of batches from version `start` (asserted) to `stop`; returns the
    metrics and the weights of both. Checkpoints every second version are in `folder`."""
    model = ModelConfig(path=str(folder / "model"), dtype="float32")
    learner = LEARNER.model_copy(update={"checkpoint_every": 2})
    config = AlgorithmConfig(advantage="gae", critic=CriticConfig(**options))
    policy, critic = world.policy_of(model, mesh, learner), critic_of(model, mesh, config.critic, learner, False)
    algorithm = actor_critic(policy, critic, 200, config, config.critic.warmup_versions)
    where = folder / "checkpoints", model, learner, algorithm.optimizer, 100, shards(mesh)
    checkpoints = Checkpoints(*where, critic=critic)
    assert checkpoints.restore(policy) == start
    records = []
    for version in range(start, stop):
        figures = algorithm.step(policy, world.cut(world.make_samples(version), version, cuts, rank))
        records.append({name: value for name, value in figures.items() if not name.startswith("time/")})
        checkpoints.save(policy, version + 1, figures["reward/mean"])
    checkpoints.close()
    return {"records": records, "weights": world.weights(policy), "critic": world.weights(critic.body)}
