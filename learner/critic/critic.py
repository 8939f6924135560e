"""The critic judges a batch before the policy is trained on it, and learns from the batch afterwards. Values are those
of the critic as it is now, whatever version sampled the tokens. Methods that compute are collectives of all ranks.
`judge` waits for the GPU: returns are computed on the CPU."""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from configs.schema import CriticConfig
from learner.algorithms.advantages import mask_overlong
from learner.algorithms.gae import turn_targets, value_losses, whitened
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.train import collectives
from learner.train.batch import Batch
from learner.train.optimizer import Optimizer
from learner.train.skipped import SkippedSteps

log = logging.getLogger(__name__)
KEY = "critic"
ALL_EQUAL = 1e-12
"""Variance of returns over their square, below which they are equal but for rounding."""
SHOWN = ("gradient/norm", "gradient/skipped", "lr")


class Judged(NamedTuple):
    """A microbatch on the critic's device; [trainable tokens] float32."""

    microbatch: Microbatch
    before: Tensor
    """Value of the state before each token."""
    targets: Tensor


class Critic:
    """Its `body` is a `Policy` that is `valued`."""

    def __init__(self, config: CriticConfig, body: Policy, optimizer: Optimizer) -> None:
        self.config, self.body, self.optimizer = config, body, optimizer
        self.skipped = SkippedSteps()
        self._judged: list[Judged] = []
        self._tokens = 1
        self._figures: dict[str, float] = {}
        self._announced = dist.get_rank() != 0

    def warms_up(self, version: int) -> bool:
        """Whether only the critic learns in the step from `version`."""
        last = self.config.warmup_versions
        if version < last and not self._announced:
            line = "critic warm-up: from version %d to %d the critic learns, the policy stays as it is"
            log.info(line, version, last)
            self._announced = True
        return version < last

    def judge(self, batch: Batch, rewards: Tensor, masked: bool = False) -> Batch:
        """Give each token its advantage. `rewards`: [turns] float64, of this rank's turns. `masked`: truncated samples
        get 0."""
        placed = [self.body.place(replace(each, routes=None)) for each in batch.microbatches]
        with self.body.gathering.held():
            states = [self.body.score(each) for each in placed]
        truncated = torch.from_numpy(batch.rows.truncated.numpy()[batch.turns.rows] != 0)
        targets = self._targets(batch, rewards, placed, states, truncated).float().to(self.body.device)
        self._judged = [
            Judged(each, values[each.predictor], targets[each.turn[each.scored]])
            for each, values in zip(placed, states, strict=True)
        ]
        advantages = self._advantages()
        if masked:
            cut = truncated.to(self.body.device)
            turns = [each.turn[each.scored] for each in placed]
            advantages = [mask_overlong(x, cut[turn]) for x, turn in zip(advantages, turns, strict=True)]
        spread = [_spread(each, x).cpu() for each, x in zip(placed, advantages, strict=True)]
        known = zip(batch.microbatches, spread, strict=True)
        return replace(batch, microbatches=[replace(each, advantages=x) for each, x in known])

    def _targets(
        self, batch: Batch, rewards: Tensor, placed: Sequence[Microbatch], states: Sequence[Tensor], truncated: Tensor
    ) -> Tensor:
        begins, ends = torch.zeros(2, len(rewards), device=self.body.device)
        for each, values in zip(placed, states, strict=True):
            turn = each.turn[each.scored]
            first = turn.diff(prepend=turn.new_tensor([-1])) != 0
            last = turn.diff(append=turn.new_tensor([-1])) != 0
            begins[turn[first]] = values[each.predictor[first]]
            ends[turn[last]] = values[each.scored[last]]
        samples = torch.from_numpy(batch.turns.rows)
        gamma, gae_lambda = self.config.gamma, self.config.gae_lambda
        return turn_targets(rewards, samples, begins.cpu(), ends.cpu(), truncated, gamma, gae_lambda)

    def _advantages(self) -> list[Tensor]:
        every = [judged.targets.double() - judged.before.double() for judged in self._judged]
        moments = [torch.cat([each.targets for each in self._judged]).double(), torch.cat(every)]
        tokens, *sums = collectives.all_reduce_sum(_stack(len(moments[0]), *(x.sum() for x in moments))).tolist()
        self._tokens = max(int(tokens), 1)
        means = [total / self._tokens for total in sums]
        squares = [((x - mean) ** 2).sum() for x, mean in zip(moments, means, strict=True)]
        spread = collectives.all_reduce_sum(_stack(*squares)).tolist()
        self._figures = {
            "critic/loss": 0.5 * (spread[1] / self._tokens + means[1] ** 2),
            "critic/value": means[0] - means[1],
            "critic/return": means[0],
        }
        if spread[0] > ALL_EQUAL * self._tokens * (1 + means[0] ** 2):
            self._figures["critic/explained_variance"] = 1 - spread[1] / spread[0]
        if not self.config.whiten:
            return [advantages.float() for advantages in every]
        variance = spread[1] / max(self._tokens - 1, 1)
        return [whitened(advantages, means[1], variance).float() for advantages in every]

    def learn(self, version: int) -> dict[str, float]:
        """Train on the batch judged last; metrics are the same on all ranks."""
        self.skipped.check()
        began, clipped, figures = time.perf_counter(), 0.0, dict[str, float]()
        for _ in range(self.config.updates):
            clipped = self._backward()
            figures = self.optimizer.update(version)
            self.skipped.note_critic(version + 1, figures)
        self._judged = []
        clip = {"critic/clipped": clipped / self._tokens} if self.config.clip else {}
        named = {f"critic/{name.replace('/', '_')}": value for name, value in figures.items() if name in SHOWN}
        return self._figures | clip | named | {"time/critic_s": time.perf_counter() - began}

    def _backward(self) -> float:
        """The mean is over all sampled tokens of the batch. Returns how many values were clipped."""
        clipped = torch.zeros((), dtype=torch.float64, device=self.body.device)
        with self.body.gathering.held():
            for judged in self._judged:
                self.body.gathering.reduce_after_next(last=judged is self._judged[-1])
                values = self.body(judged.microbatch)[0].index_select(0, judged.microbatch.predictor)
                losses, outside = value_losses(values, judged.before, judged.targets, self.config.clip)
                (losses.sum() / self._tokens * dist.get_world_size()).backward()  # FSDP averages over ranks
                clipped += outside.sum()
        return float(collectives.all_reduce_sum(clipped.cpu()))

    def flops(self, tokens: float, trainable: float, squares: float) -> float:
        """Passes without gradient do not count."""
        return self.config.updates * self.body.costs.total(tokens, trainable, squares)

    def state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.body.model, self.optimizer.adamw)
        return {KEY: {"model": model, "optimizer": optimizer}}

    def load(self, state: dict[str, Any]) -> None:
        part = state[KEY]
        set_state_dict(
            self.body.model,
            self.optimizer.adamw,
            model_state_dict=part["model"],
            optim_state_dict=part["optimizer"],
        )
        self.optimizer.restore_options()


def _stack(*numbers: float | Tensor) -> Tensor:
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def _spread(microbatch: Microbatch, advantages: Tensor) -> Tensor:
    zeros = advantages.new_zeros(len(microbatch.tokens))
    return zeros.index_copy(0, microbatch.scored, advantages)
