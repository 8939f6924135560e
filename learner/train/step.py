"""One optimizer step per batch, the same whatever the ranks, packing or microbatches: each loss is divided by counts of
the whole batch."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from buffer.data.images import ImageFormat
from buffer.wire.protocol import Part, SampleRows
from configs.schema import AlgorithmConfig
from learner.algorithms.advantages import mask_overlong, soft_overlong, turn_returns
from learner.algorithms.corrections import m2_limit, m2_squares
from learner.algorithms.diagnostics import combine, per_sample_sums, sample_metrics, summary
from learner.algorithms.inputs import LossContext, LossInputs, aggregation_weights
from learner.algorithms.losses import is_tokenwise, needs_first_pass
from learner.algorithms.own import advantage_of, loss_of
from learner.algorithms.teachers import DIVERGENCE_SUM, DIVERGENCE_TOKENS, kl_metrics, kl_sums, with_teacher
from learner.critic.critic import Critic
from learner.model.context import check_same
from learner.model.experts.mixture import load_metrics
from learner.model.lora.base import Base
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.model.top_tokens import TopTokens
from learner.train import collectives
from learner.train.batch import Batch
from learner.train.extra_texts import TOTAL, DrawnBeside, TrainedBeside
from learner.train.in_turn import RowsInTurn
from learner.train.optimizer import Optimizer, QueuedUpdate
from learner.train.pictures import tower_work
from learner.train.skipped import TAUGHT, UNFIT_ADVANTAGES, SkippedSteps, may_retake
from learner.train.sums import TALLY, FetchedSums, all_reduce, uncounted

log = logging.getLogger(__name__)
PER_SAMPLE = ("prompt_tokens", "sequence_tokens", "sequence_log_ratio")
TEACHER_WEIGHTS = "teacher_weights"
JUDGED = "a critic judges each token of a row for one sample"
TOPPED = "teacher.top_k: most probable tokens are given for each sample's own tokens"
Result = tuple[Tensor, dict[str, Tensor]]
"""A microbatch's loss, ready for `backward`, and its sums."""


class Algorithm:
    """Loss, advantages and optimizer. `reference`: the initial model, if the loss needs one. `max_tokens`: the longest
    answer, for the soft overlong penalty and the default of `aggregation: constant`. `teachers`: weights by
    `data_source`; `top_k`: they gave their most probable tokens."""

    def __init__(
        self,
        config: AlgorithmConfig,
        optimizer: Optimizer,
        budget: int,
        max_tokens: int,
        reference: Policy | Base | None = None,
        form: ImageFormat | None = None,
        critic: Critic | None = None,
        beside: TrainedBeside | None = None,
        teachers: Mapping[str, float] = MappingProxyType({}),
        top_k: bool = False,
    ) -> None:
        self.teachers, self.top_k = teachers, top_k
        self.config = config.model_copy(update={"constant_length": config.constant_length or max_tokens})
        self.optimizer, self.budget, self.max_tokens, self.reference = optimizer, budget, max_tokens, reference
        self.form, self.beside, self.skipped = form, beside, SkippedSteps()
        self.loss, self.critic = loss_of(config), critic
        self.advantage = None if critic else advantage_of(config)
        # three large matmuls instead of four (docs/design/learner.md)
        self.forward = self.by_chunk if is_tokenwise(config) else self.at_once

    def step(self, policy: Policy, part: Part) -> dict[str, float]:
        """Train on this rank's `part`; all ranks have the same metrics. A collective. Raises StepsSkipped."""
        self.skipped.check()
        times = [time.perf_counter()]
        batch = self.pack(policy, part)
        drawn = self.beside.draw(policy, batch.version) if self.beside else None
        times.append(time.perf_counter())
        fetched = FetchedSums(self.backward(policy, batch, drawn) | ({TOTAL: drawn.total} if drawn else {}))
        held = self.critic is not None and self.critic.warms_up(batch.version)
        queued = None if held else self.optimizer.queue(batch.version)
        shown = [*batch.microbatches, *(drawn.microbatches if drawn else ())]
        known = per_sample_sums(_of_samples(batch))
        computed = _work(batch) | tower_work(shown, policy.costs.tower) | kl_sums(batch.teacher_kl, self.teachers)
        known |= {name: torch.tensor(number) for name, number in computed.items()}
        sums, tally = fetched.wait()  # for the passes; the GPU goes on with the update
        sums = sums | known if policy.counts else uncounted(sums | known)
        totals = all_reduce(sums)
        times.append(time.perf_counter())
        updated = self.optimizer.hold() if queued is None else self.optimizer.finish(queued)
        metrics = drawn.metrics(totals.pop(TOTAL)) if drawn else {}
        metrics |= batch_metrics(batch, totals) | _loads(policy, tally) | updated
        metrics |= kl_metrics(totals, self.teachers, metrics["tokens_sampled"])
        times.append(time.perf_counter())
        rewards = batch.rows.reward.numpy()
        self.skipped.note(batch.version + 1, (float(rewards.min()), float(rewards.max())), metrics, totals)
        metrics |= phase_times(times, queued)
        metrics |= buffer_metrics(part) | problem_metrics(part)
        work = totals["row_tokens"], totals["head_rows"], totals["squares"]
        flops, computed_tokens = policy.costs.total(*work), totals["row_tokens"]
        apart = policy.costs.total(totals["tokens_alone"], metrics["tokens_sampled"], totals["squares_alone"])
        metrics["flops_saved"] = apart - flops
        if self.critic and not may_retake(metrics):
            metrics |= self.critic.learn(batch.version)
            flops += self.critic.flops(*work)
        if drawn:
            flops, computed_tokens = flops + drawn.flops(policy), computed_tokens + drawn.tokens
        metrics |= {name: totals[name] for name in ("images", "patches") if name in totals}
        return metrics | {"flops": flops + totals.get("tower", 0.0), "tokens_computed": computed_tokens}

    def rehearse(self, policy: Policy, part: Part) -> bool:
        """Whether the gradient of `part` is finite, on all ranks alike. Trains nothing."""
        self.backward(policy, self.pack(policy, part))
        return self.optimizer.discard()

    def pack(self, policy: Policy, part: Part) -> Batch:
        costs = policy.costs.quadratic, policy.costs.patch_cost
        shared, replayed = policy.sharing.prompts, policy.replayed
        if policy.context_group is not None:
            check_same(_digest(part), policy.context_group)
        key_room = policy.sharing.key_room
        if (reason := JUDGED if self.critic else TOPPED if self.top_k else None) and key_room is not None:
            log.info("learner.share_prompts: prompts alone are computed once, no longer prefixes: %s", reason)
            key_room = policy.sharing.key_room = None
        batch = Batch.from_part(part, self.budget, costs[0], shared, self.form, costs[1], replayed, key_room)
        if self.critic:
            rewards = turn_rewards(batch, self._rewards(batch))
            batch = self.critic.judge(batch, rewards, masked=self.config.overlong == "mask")
        return batch

    def backward(self, policy: Policy, batch: Batch, drawn: DrawnBeside | None = None) -> dict[str, Tensor]:
        shared = self.shared_context(batch, policy.device, policy.counts)
        rows, more = RowsInTurn(policy, batch.microbatches), RowsInTurn(policy, drawn.microbatches if drawn else ())
        number = len(rows) + len(more)
        with policy.gathering.held():
            if needs_first_pass(self.config):
                shared["m2_limit"] = self._m2_limit(policy, rows, shared)
            if batch.scattered and not is_tokenwise(self.config):
                shared["sequence_log_ratio"] = self._log_ratios(policy, rows, shared)
            sums = []
            for index, microbatch in enumerate(rows, 1):
                policy.gathering.reduce_after_next(last=index == number)
                sums.append(self.backward_of(policy, microbatch, shared))
            for index, microbatch in enumerate(more, len(rows) + 1):
                policy.gathering.reduce_after_next(last=index == number)
                if drawn:
                    drawn.backward_of(policy, microbatch)
        advantages = shared["advantages"]
        counted = advantages != 0
        if self.teachers:
            counted = counted | (shared[TEACHER_WEIGHTS] != 0)
        taught = {UNFIT_ADVANTAGES: ~advantages.isfinite(), TAUGHT: counted}
        return combine(sums) | {name: turns.double().sum() for name, turns in taught.items()}

    def backward_of(self, policy: Policy, microbatch: Microbatch, shared: dict[str, Any]) -> dict[str, Tensor]:
        """Add one microbatch's gradient without waiting for the GPU, whose queue must not run empty."""
        if self.reference:
            unrouted = replace(microbatch, routes=None)  # the routes are the policy's
            shared = shared | {"reference": self.reference.score(unrouted)}
        context = loss_context(microbatch, shared)
        top = self._top(microbatch, context, shared[TEACHER_WEIGHTS]) if self.top_k else None
        loss, sums = self.forward(policy, microbatch, context, top)
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks, but the loss is a sum
        return sums if policy.mixture is None else sums | {TALLY: policy.mixture.tally.double()}

    def at_once(self, policy: Policy, microbatch: Microbatch, context: LossContext, top: TopTokens | None) -> Result:
        assert top is None
        logprobs, entropy = policy(microbatch)
        loss, sums = self.loss(context.inputs(logprobs, entropy), self.config)
        return loss + 0.0 * logprobs.sum(), sums  # a dummy's loss must depend on every parameter

    def by_chunk(self, policy: Policy, microbatch: Microbatch, context: LossContext, top: TopTokens | None) -> Result:
        """A tokenwise loss, differentiated in the head's chunks; its sums, which take many kernels, are computed once
        for all tokens."""
        loss, scored = self.loss, context.select(microbatch.predicted)

        def chunk_loss(logprobs: Tensor, entropy: Tensor, chunk: slice | Tensor) -> Tensor:
            return loss.of_tokens(scored.select(chunk).inputs(logprobs, entropy), self.config)

        logprobs, entropy, total, *distances = policy(microbatch, loss=chunk_loss, top=top)
        sums = loss(context.inputs(logprobs, entropy), self.config)[1]
        if top is not None:
            (of_token,) = distances
            sums["loss/teacher"] = (top.weights * of_token).sum().double()
            trained = top.weights != 0
            sums[DIVERGENCE_SUM] = torch.where(trained, of_token, 0).sum().double()
            sums[DIVERGENCE_TOKENS] = trained.sum().double()
        return total, sums

    def _top(self, microbatch: Microbatch, context: LossContext, of_turns: Tensor) -> TopTokens:
        config, scored = self.config, microbatch.scored
        inputs = context.select(scored).inputs(microbatch.behaviour[scored])
        weights = aggregation_weights(inputs, config.aggregation, config.constant_length)
        ids, logprobs = microbatch.teacher_ids, microbatch.teacher_top
        if ids is None or logprobs is None:
            ids, logprobs, weights = scored.new_zeros(len(scored), 1), weights.new_zeros(len(scored), 1), weights * 0
        return TopTokens(ids, logprobs, weights * of_turns[microbatch.turn[scored]])

    def shared_context(self, batch: Batch, device: torch.device, counts: bool = True) -> dict[str, Any]:
        """Fields of `LossInputs` that come from the whole batch: [samples]. `advantages` and TEACHER_WEIGHTS are of
        this rank's turns or, by a critic, `advantages` of its tokens."""
        _, item, sampled, _ = _tensors(batch.rows)
        _, group = item.unique(return_inverse=True)
        group_tokens = torch.zeros(int(group.max()) + 1, dtype=torch.int64).index_add_(0, group, sampled)
        return {
            "advantages": self._advantages(batch, counts).to(device),
            TEACHER_WEIGHTS: self._teacher_weights(batch).to(device),
            "prompt_tokens": group_tokens[group].to(device),
            "sequence_tokens": sampled.to(device),
            "num_sequences": len(sampled),
            "num_tokens": int(sampled.sum()),
            "num_prompts": len(group_tokens),
            "version": batch.version,
            "undone": batch.undone,
            "scattered": batch.scattered,
        }

    def _rewards(self, batch: Batch) -> Tensor:
        config, (rewards, _, lengths, _) = self.config, _tensors(batch.rows)
        if config.overlong != "soft":
            return rewards
        return soft_overlong(rewards, lengths, self.max_tokens, config.overlong_buffer, config.overlong_factor)

    def _advantages(self, batch: Batch, counts: bool = True) -> Tensor:
        """[turns + 1] float32, the last 0 for given tokens; by a critic [tokens]."""
        if self.advantage is None:
            return torch.cat([each.advantages for each in batch.microbatches if each.advantages is not None])
        config, turns = self.config, torch.from_numpy(batch.turns.rows)
        rewards, (_, items, lengths, truncated) = self._rewards(batch), _tensors(batch.rows)
        later = torch.zeros(())
        if config.turn_discount is not None:
            returns, rewards = discounted(batch, rewards, config.turn_discount, counts)
            later = returns - rewards[turns]
        advantages = self.advantage(rewards, items, lengths)[turns] + later
        if config.overlong == "mask":
            advantages = mask_overlong(advantages, truncated.bool()[turns])
        return torch.cat([advantages.float(), torch.zeros(1)])

    def _teacher_weights(self, batch: Batch) -> Tensor:
        rows, truncated = batch.turns.rows.tolist(), batch.rows.truncated.numpy()
        masked = truncated.astype(bool) if self.config.overlong == "mask" else np.zeros(len(truncated), bool)
        taught = {row: self.teachers[name] for row, name in batch.teachers.items() if not masked[row]}
        return torch.tensor([*(taught.get(row, 0.0) for row in rows), 0.0], dtype=torch.float32)

    def _log_ratios(self, policy: Policy, microbatches: RowsInTurn, shared: dict[str, Any]) -> Tensor:
        inputs = (loss_context(microbatch, shared).inputs(policy.score(microbatch)) for microbatch in microbatches)
        sums = [each.per_sequence(each.log_ratio)[: each.num_sequences] for each in map(LossInputs.clean, inputs)]
        return torch.stack(sums).sum(0)

    def _m2_limit(self, policy: Policy, microbatches: RowsInTurn, shared: dict[str, Any]) -> Tensor:
        inputs = (loss_context(microbatch, shared).inputs(policy.score(microbatch)) for microbatch in microbatches)
        squares = torch.cat([m2_squares(each.clean()) for each in inputs])
        every = collectives.all_gather_ragged(squares if policy.counts else squares[:0])
        return m2_limit(torch.cat(every), self.config.m2_budget)


def phase_times(times: Sequence[float], queued: QueuedUpdate | None) -> dict[str, float]:
    """The update is queued before the backward pass is over."""
    pack, backward, update = (end - start for start, end in pairwise(times))
    early = 0.0 if queued is None else queued.seconds
    return {"time/pack_s": pack, "time/backward_s": backward - early, "time/update_s": update + early}


def turn_rewards(batch: Batch, rewards: Tensor) -> Tensor:
    """Rewards of this rank's turns: [turns] float64. A penalty in `rewards` [samples] is the last turn's."""
    turns, of_turns = map(torch.from_numpy, batch.turns)
    last = turns.diff(append=turns.new_tensor([-1])) != 0
    penalties = rewards - torch.tensor(batch.rows.reward.numpy())
    return of_turns + torch.where(last, penalties[turns], 0)


def discounted(batch: Batch, rewards: Tensor, discount: float, counts: bool = True) -> tuple[Tensor, Tensor]:
    """Returns of this rank's turns, and the first return of each sample of the batch, float64. A collective: each rank
    that `counts` contributes its samples."""
    turns = torch.from_numpy(batch.turns.rows)
    first = turns.diff(prepend=turns.new_tensor([-1])) != 0
    returns = turn_returns(turn_rewards(batch, rewards), turns, discount)
    mine = torch.zeros_like(rewards).index_put((turns[first],), returns[first])
    return returns, collectives.all_reduce_sum(mine if counts else torch.zeros_like(mine))


def _digest(part: Part) -> int:
    digest = crc32(part.positions.data)
    for sample in part.samples:
        digest = crc32(sample, digest)
    return digest


def _of_samples(batch: Batch) -> dict[str, Sequence[int]]:
    turns = np.unique(batch.turns.rows, return_counts=True)[1].tolist()
    return {"versions": batch.num_versions, "segments": batch.num_segments, "turns": turns}


def _work(batch: Batch) -> dict[str, float]:
    done: dict[str, float] = {"row_tokens": batch.tokens, "squares": batch.squares, "head_rows": batch.head_rows}
    return done | {"tokens_alone": batch.alone[0], "squares_alone": batch.alone[1]}


def _loads(policy: Policy, tally: Tensor | None) -> dict[str, float]:
    if policy.mixture is None or tally is None:
        return {}
    total = collectives.all_reduce_sum(tally)
    return load_metrics(total, policy.mixture.sizes, policy.replayed is not None)


def loss_context(microbatch: Microbatch, shared: dict[str, Any]) -> LossContext:
    """Collect the inputs of a microbatch's loss that are known before its forward pass."""
    known = {name: x[microbatch.sequence] if name in PER_SAMPLE else x for name, x in shared.items()}
    weights, own = known.pop(TEACHER_WEIGHTS)[microbatch.turn], microbatch.advantages
    known["advantages"] = shared["advantages"][microbatch.turn] if own is None else own
    if microbatch.teacher is not None and microbatch.teacher_ids is None:
        facts = known["advantages"], microbatch.teacher, microbatch.behaviour
        known["advantages"] = with_teacher(*facts, weights)
    fields = ("behaviour", "sampled", "sequence", "versions")
    return LossContext(known | {name: getattr(microbatch, name) for name in fields})


def _tensors(rows: SampleRows) -> list[Tensor]:
    """Reward, item, sampled tokens, truncated: [samples] each."""
    return [torch.tensor(column.numpy()) for column in (rows.reward, rows.item, rows.sampled, rows.truncated)]


def buffer_metrics(part: Part) -> dict[str, float]:
    """What the buffer has counted."""
    counts = {f"buffer/{name}": float(getattr(part, name)) for name in ("failed", "dropped", "retried", "quarantined")}
    servers = {f"servers/{name}": float(getattr(part, name)) for name in ("running", "places")}
    return counts | servers | {"buffer/failed_share": part.failed / max(part.failed + part.generated, 1)}


def problem_metrics(part: Part) -> dict[str, float]:
    """Problems in each band of solved share."""
    metrics = {f"problems/{name}": float(number) for name, number in part.problems.items()}
    if rows := sum(part.problems.values()) - part.problems.get("retired", 0):
        metrics["problems/left_out_share"] = part.problems["left_out"] / rows
    if part.new_groups:
        metrics["groups/flat"] = part.flat_groups / part.new_groups
    return metrics


def batch_metrics(batch: Batch, sums: dict[str, float]) -> dict[str, float]:
    """Metrics from the losses' `sums` and the samples' rows."""
    rows = batch.rows
    metrics = summary(sums)
    metrics["loss"] = sum(value for key, value in metrics.items() if key.startswith("loss/"))
    tokens, ages = rows.tokens.numpy(), batch.version - rows.dispatched.numpy()
    return (
        metrics
        | sample_metrics(*_tensors(rows))
        | {f"sample/{name}": float(np.nanmean(column.numpy())) for name, column in rows.metrics.items()}
        | {
            "age/mean": float(ages.mean()),
            "age/max": float(ages.max()),
            "tokens": float(tokens.sum()),
            "tokens_sampled": float(rows.sampled.numpy().sum()),
            "samples": float(len(tokens)),
            "microbatches": float(len(batch.microbatches)),
            "tokens_microbatch_max": float(max(len(microbatch.tokens) for microbatch in batch.microbatches)),
        }
    )
