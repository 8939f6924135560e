"""Fine-tuning's step and held-out loss: the mean of -log p over trained tokens. Methods are collectives."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from buffer.wire.protocol import EvaluationResult
from learner.model.experts.mixture import load_metrics
from learner.model.host_copies import Fetched
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.sft.answers import TrainedText
from learner.sft.demonstrations import Demonstrations
from learner.sft.packing import microbatches, num_trained, own_cut, rows_of
from learner.train import collectives
from learner.train.optimizer import Optimizer
from learner.train.pictures import tower_work
from learner.train.skipped import SkippedSteps

MEASURED_AT_ONCE = 1024


class AnswerSteps:
    """`rows` of `data` a batch, in microbatches of `budget` tokens."""

    def __init__(self, data: Demonstrations, optimizer: Optimizer, budget: int, rows: int) -> None:
        self.data, self.optimizer, self.budget, self.rows = data, optimizer, budget, rows
        self.skipped = SkippedSteps()

    def step(self, policy: Policy, version: int) -> dict[str, float]:
        """Train on batch `version`. Raises StepsSkipped, ImageChanged."""
        self.skipped.check()
        began = time.perf_counter()
        position = version * self.rows
        texts = self.data.drawn(position, self.rows)
        tokens, trained = [len(text.tokens) for text in texts], num_trained(texts)
        cuts, own = own_cut(policy, texts, self.budget), dict[str, float]()
        backward_began = time.perf_counter()
        total, tally = self._backward(policy, self._placed(policy, cuts, own), len(cuts), trained)
        queued = self.optimizer.queue(version)
        sums = collectives.all_reduce_sum(total.wait())  # waits for the passes; the GPU goes on with the update
        seen = _summed(own)
        update_began = time.perf_counter()
        metrics = {"loss": float(sums) / trained} | self.optimizer.finish(queued)
        self.skipped.note_supervised(version + 1, metrics)
        squares = float(sum(n * n for n in tokens))
        return metrics | _loads(policy, tally) | {
            "rows": float(self.rows),
            "epoch": (position + self.rows) / len(self.data),
            "rows_dropped": float(self.data.dropped),
            "tokens": float(sum(tokens)),
            "tokens_trained": float(trained),
            "tokens_computed": float(sum(tokens)),
            "tokens_microbatch_max": float(max(sum(len(text.tokens) for text in chosen) for chosen in cuts)),
            "microbatches": float(len(cuts)),
            "flops": policy.costs.total(sum(tokens), trained, squares) + seen.pop("tower", 0.0),
            "time/pack_s": backward_began - began,
            "time/backward_s": update_began - backward_began - queued.seconds,
            "time/update_s": time.perf_counter() - update_began + queued.seconds,
        } | seen  # fmt: skip

    def _placed(
        self, policy: Policy, cuts: Sequence[Sequence[TrainedText]], seen: dict[str, float]
    ) -> Iterator[Microbatch]:
        """Microbatches on the policy's device, each made when it is asked for, so that no batch of pixels is in memory.
        Adds what the tower encodes to `seen`."""
        for row in rows_of(cuts, self.data.images):
            for name, number in tower_work([row], policy.costs.tower).items():
                seen[name] = seen.get(name, 0.0) + number
            yield policy.place(row)

    def _backward(
        self, policy: Policy, placed: Iterable[Microbatch], number: int, trained: int
    ) -> tuple[Fetched, Fetched | None]:
        """This rank's sum of -log p, [] float64, and the tally of its routers."""

        def chunk_loss(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
            return -logprobs.sum() / trained

        total, tally = torch.zeros((), dtype=torch.float64, device=policy.device), None
        with policy.gathering.held():
            for index, microbatch in enumerate(placed, 1):
                policy.gathering.reduce_after_next(last=index == number)
                logprobs, _, loss = policy(microbatch, loss=chunk_loss)
                (loss * dist.get_world_size()).backward()  # FSDP averages over ranks, but the loss is a sum
                total -= logprobs.double().sum()
                if policy.mixture is not None:
                    tally = policy.mixture.tally.double() + (0 if tally is None else tally)
        return Fetched(total), None if tally is None else Fetched(tally)


def _summed(figures: dict[str, float]) -> dict[str, float]:
    """The sums over all ranks. A collective."""
    if not figures:
        return {}
    totals = collectives.all_reduce_sum(torch.tensor([*figures.values()], dtype=torch.float64))
    return dict(zip(figures, totals.tolist(), strict=True))


def _loads(policy: Policy, tally: Fetched | None) -> dict[str, float]:
    """A collective."""
    if policy.mixture is None or tally is None:
        return {}
    return load_metrics(collectives.all_reduce_sum(tally.wait()), policy.mixture.sizes, False)


class HeldOut:
    """The loss on `sets`, every `every` versions and at both ends."""

    def __init__(self, sets: Mapping[str, Demonstrations], every: int | None, versions: int, budget: int) -> None:
        self.sets, self.every, self.versions, self.budget = sets, every, versions, budget

    def measure(self, policy: Policy, version: int) -> list[EvaluationResult]:
        due = version in (0, self.versions) or (self.every is not None and version % self.every == 0)
        if not due or not self.sets:
            return []
        figures = {name: self._figures(policy, data) for name, data in self.sets.items()}
        return [EvaluationResult(due=version, version=version, server="learner", figures=figures)]

    def _figures(self, policy: Policy, data: Demonstrations) -> dict[str, float]:
        texts = [text for row in data.rows for text in row]
        total = torch.zeros((), dtype=torch.float64, device=policy.device)
        with policy.gathering.held():
            for start in range(0, len(texts), MEASURED_AT_ONCE):
                some = texts[start : start + MEASURED_AT_ONCE]
                for microbatch in microbatches(policy, some, data.images, self.budget):
                    total -= policy.score(policy.place(microbatch)).double().sum()
        trained = num_trained(texts)
        loss = float(collectives.all_reduce_sum(total.cpu())) / trained
        return {"loss": loss, "tokens_trained": float(trained), "rows": float(len(data))}
