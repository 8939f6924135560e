"""The algorithm's step: a batch becomes one optimizer step, the same whatever the ranks, packing or microbatches.

Consumes the buffer's `Part`; gradients of microbatches add up under counts of the whole batch. A collective: all ranks
must come, each with its part of the same batch. Called by `learner.loop`.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.wire.protocol import Part
from configs.schema import AlgorithmConfig
from learner import collectives
from learner.algorithms import (
    ADVANTAGES,
    LOSSES,
    LossInputs,
    combine,
    group_sums,
    is_max,
    is_tokenwise,
    m2_limit,
    m2_squares,
    mask_overlong,
    needs_first_pass,
    sample_sums,
    soft_overlong,
    summary,
)
from learner.model.policy import Policy
from learner.train.batch import Batch, Microbatch
from learner.train.optimizer import Optimizer

PER_SAMPLE = ("advantages", "prompt_tokens", "sequence_tokens")
PHASES = ("pack", "backward", "update")
"""Of a step: laying out the batch, forward and backward pass with their waits, optimizer."""
Known = dict[str, Any]
"""What `LossInputs` is told of a microbatch before its forward pass: all but log-probabilities and entropies."""
Pass = Callable[[Policy, Microbatch, Known, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
"""A forward pass: the loss of the microbatch, ready for `backward`, and its sums."""


class Algorithm:
    """Loss, advantages and optimizer. `reference` is the frozen initial model, where the loss wants one.

    `max_tokens` is the longest answer: soft punishment of length and `aggregation: constant` count from it.
    """

    def __init__(
        self,
        config: AlgorithmConfig,
        optimizer: Optimizer,
        budget: int,
        max_tokens: int,
        reference: Policy | None = None,
    ) -> None:
        length = config.constant_length or max_tokens
        self.config = config.model_copy(update={"constant_length": length})
        self.optimizer, self.budget, self.max_tokens, self.reference = optimizer, budget, max_tokens, reference
        self.forward: Pass = by_chunk if is_tokenwise(config) else at_once

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        """Train on this rank's `part`; the metrics are of the whole batch and the same on all ranks."""
        marks = [time.perf_counter()]
        batch = Batch.from_part(part, self.budget, policy.attention_cost)
        marks.append(time.perf_counter())
        sums = self.backward(policy, batch)
        total = _added(sums)  # waits for the GPU
        marks.append(time.perf_counter())
        figures = self.optimizer.update(batch.version)
        marks.append(time.perf_counter())
        spent = {f"time/{name}_s": end - start for name, start, end in zip(PHASES, marks, marks[1:], strict=False)}
        metrics = summary({**total, **_facts(batch)})
        metrics["loss"] = sum(value for key, value in metrics.items() if key.startswith("loss/"))
        flops = policy.costs.total((row.tokens, row.sampled) for row in batch.rows)
        return metrics | figures | _more(batch) | spent | {"flops": flops}

    def backward(self, policy: Policy, batch: Batch) -> dict[str, Tensor]:
        """Leave the gradient of the batch's loss in the parameters; returns this rank's sums."""
        shared = self._shared(batch, policy.device)
        microbatches = [microbatch.to(policy.device) for microbatch in batch.microbatches]  # at once: copies wait
        if needs_first_pass(self.config):
            shared |= {"m2_limit": self._m2_limit(policy, microbatches, shared)}
        return combine([self.backward_of(policy, moved, shared) for moved in microbatches])

    def backward_of(self, policy: Policy, microbatch: Microbatch, shared: dict[str, Any]) -> dict[str, Tensor]:
        """Add one microbatch's gradient. Nothing in here waits for the GPU, so that it is never left without work."""
        reference = self.reference.score(microbatch) if self.reference else None
        known = _known(microbatch, shared) | {"reference": reference}
        loss, sums = self.forward(policy, microbatch, known, self.config)
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks where the loss is a sum
        return sums

    def _shared(self, batch: Batch, device: torch.device) -> dict[str, Any]:
        """What the losses of all microbatches are told alike; tensors are [samples], in the order of `batch.rows`."""
        sampled, group_tokens = [row.sampled for row in batch.rows], Counter[int]()
        for row in batch.rows:
            group_tokens[row.item] += row.sampled
        return {
            "advantages": self._advantages(batch).to(device),
            "prompt_tokens": torch.tensor([group_tokens[row.item] for row in batch.rows]).to(device),
            "sequence_tokens": torch.tensor(sampled).to(device),
            "num_sequences": len(batch.rows),
            "num_tokens": group_tokens.total(),
            "num_prompts": len(group_tokens),
            "version": batch.version,
        }

    def _advantages(self, batch: Batch) -> Tensor:
        """Advantage of each of `batch.rows`: [samples] float32. Each rank computes them all: it is cheap, and exact."""
        config, rows = self.config, batch.rows
        rewards = torch.tensor([row.reward for row in rows], dtype=torch.float64)
        lengths = torch.tensor([row.sampled for row in rows])
        if config.overlong == "soft":
            rewards = soft_overlong(rewards, lengths, self.max_tokens, config.overlong_buffer, config.overlong_factor)
        advantages = ADVANTAGES[config.advantage](rewards, torch.tensor([row.item for row in rows]), lengths)
        if config.overlong == "mask":
            advantages = mask_overlong(advantages, torch.tensor([row.truncated for row in rows]))
        return advantages.float()

    def _m2_limit(self, policy: Policy, microbatches: list[Microbatch], shared: dict[str, Any]) -> Tensor:
        """M2PO's bound over the whole batch, from one more pass.

        No other loss needs one: a batch is one optimizer step, so that the proximal policy of `decoupled` is the policy
        itself, which is what LossInputs without `proximal` means.
        """
        scored = (LossInputs(policy_logprobs=policy.score(moved), **_known(moved, shared)) for moved in microbatches)
        squares = [m2_squares(inputs) for inputs in scored]
        return m2_limit(collectives.concatenate(torch.cat(squares), torch.inf), self.config.m2_budget)


def at_once(
    policy: Policy, microbatch: Microbatch, known: Known, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of all tokens together, after their pass; the head's logits are computed again to differentiate it."""
    logprobs, entropy = policy(microbatch)
    loss, sums = LOSSES[config.loss](LossInputs(policy_logprobs=logprobs, entropy=entropy, **known), config)
    return loss + 0.0 * logprobs.sum(), sums  # the anchor ties even a dummy's loss to every parameter


def by_chunk(
    policy: Policy, microbatch: Microbatch, known: Known, config: AlgorithmConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    """The same for a loss that `is_tokenwise`, differentiated in the head's chunks; the sums of all tokens together.

    A chunk's loss is some fifty kernels of microseconds beside milliseconds of matrix products; the sums would be three
    times as many again.
    """
    name, scored = config.loss, _at(known, microbatch.scored)

    def loss(logprobs: Tensor, entropy: Tensor, part: slice) -> Tensor:
        return LOSSES[name].of_tokens(
            LossInputs(policy_logprobs=logprobs, entropy=entropy, **_at(scored, part)), config
        )

    logprobs, entropy, total = policy(microbatch, loss=loss)
    return total, LOSSES[name](LossInputs(policy_logprobs=logprobs, entropy=entropy, **known), config)[1]


def _known(microbatch: Microbatch, shared: dict[str, Any]) -> Known:
    place = microbatch.sequence
    told = {name: x[place] if name in PER_SAMPLE else x for name, x in shared.items()}
    return told | {name: getattr(microbatch, name) for name in ("behaviour", "sampled", "sequence", "versions")}


def _at(known: Known, place: Tensor | slice) -> Known:
    """`known` of the tokens at `place`."""
    return {name: x[place] if isinstance(x, Tensor) and x.dim() else x for name, x in known.items()}


def _added(sums: dict[str, Tensor]) -> dict[str, float]:
    """This rank's sums, added (or the largest taken) over all ranks."""
    names = {side: [key for key in sums if is_max(key) is side] for side in (False, True)}
    total: dict[str, float] = {}
    for side, operation in ((False, dist.ReduceOp.SUM), (True, dist.ReduceOp.MAX)):
        values = torch.stack([sums[key].double() for key in names[side]]).cpu()
        dist.all_reduce(values, operation)
        total |= dict(zip(names[side], values.tolist(), strict=True))
    return total


def _facts(batch: Batch) -> dict[str, Tensor]:
    """Sums over the samples and groups of the whole batch, which every rank knows."""
    groups: dict[int, list[float]] = defaultdict(list)
    for row in batch.rows:
        groups[row.item].append(row.reward)
    columns = ((row.reward, row.sampled, row.truncated, row.num_versions) for row in batch.rows)
    return sample_sums(*(torch.tensor(column) for column in zip(*columns, strict=True))) | group_sums(groups.values())


def _more(batch: Batch) -> dict[str, float]:
    """Ages by dispatch, sizes, and the means of what rewards and tasks report."""
    ages = [batch.version - row.dispatched for row in batch.rows]
    reported: dict[str, list[float]] = defaultdict(list)
    for row in batch.rows:
        for name, value in row.metrics.items():
            reported[f"sample/{name}"].append(value)
    return {name: fmean(values) for name, values in reported.items()} | {
        "age/mean": fmean(ages),
        "age/max": float(max(ages)),
        "tokens": float(sum(row.tokens for row in batch.rows)),
        "tokens_sampled": float(sum(row.sampled for row in batch.rows)),
        "samples": float(len(batch.rows)),
        "microbatches": float(len(batch.microbatches)),
        "tokens_microbatch_max": float(max(len(microbatch.tokens) for microbatch in batch.microbatches)),
    }
