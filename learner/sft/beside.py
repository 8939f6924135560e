"""Demonstrations trained beside each batch of reinforcement learning, with `weight` times their mean -log p. The
version alone decides which, so a restart or another number of ranks draws the same, and the ledger need not know of
them."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from configs.checks import max_sample_tokens
from configs.schema import Config, DemonstrationsConfig, SftConfig
from learner.model.microbatch import Microbatch
from learner.model.policy import Policy
from learner.saved.manifest import DataPosition
from learner.sft.answers import TrainedText, reader_of
from learner.sft.demonstrations import Demonstrations, began_in, read_demonstrations
from learner.sft.packing import microbatches, num_trained

KEY = "data.demonstrations"


class Beside:
    """`rows` of `data` beside each batch."""

    def __init__(self, data: Demonstrations, rows: int, weight: float, budget: int) -> None:
        self.data, self.rows, self.weight, self.budget = data, rows, weight, budget
        self.digest = data.digest

    def draw(self, policy: Policy, version: int) -> "Drawn":
        """A collective. Raises ImageChanged."""
        position = version * self.rows
        texts = self.data.drawn(position, self.rows)
        packed = list(microbatches(policy, texts, self.data.images, self.budget))
        return Drawn(policy, texts, packed, self.weight, self.rows, (position + self.rows) / len(self.data))

    def position(self, version: int) -> DataPosition:
        return DataPosition(data=self.digest, rows=version * self.rows, beside=True, began=self.data.began)


class Drawn:
    """The demonstrations of one batch."""

    def __init__(
        self,
        policy: Policy,
        texts: Sequence[TrainedText],
        packed: Sequence[Microbatch],
        weight: float,
        rows: int,
        epoch: float,
    ) -> None:
        self._lengths, self._trained = [len(text.tokens) for text in texts], num_trained(texts)
        self._weight, self._rows, self._epoch = weight, rows, epoch
        self.microbatches = packed
        self.total = torch.zeros((), dtype=torch.float64, device=policy.device)
        """This rank's -log p so far: [] float64."""

    def backward_of(self, policy: Policy, microbatch: Microbatch) -> None:
        scale = self._weight / self._trained

        def chunk_loss(logprobs: Tensor, entropy: Tensor, chunk: slice) -> Tensor:
            return -logprobs.sum() * scale

        logprobs, _, loss = policy(microbatch, temperature=1.0, loss=chunk_loss)  # fine-tuning's, whatever sampling has
        (loss * dist.get_world_size()).backward()  # FSDP averages over ranks, but the loss is a sum
        self.total -= logprobs.double().sum()

    def metrics(self, total: float) -> dict[str, float]:
        return {
            "demonstrations/loss": total / self._trained,
            "demonstrations/rows": float(self._rows),
            "demonstrations/tokens_trained": float(self._trained),
            "demonstrations/epoch": self._epoch,
        }

    def flops(self, policy: Policy) -> float:
        return policy.costs.total(self.tokens, self._trained, float(sum(n * n for n in self._lengths)))

    @property
    def tokens(self) -> float:
        return float(sum(self._lengths))


def read_beside(config: Config, budget: int) -> Beside | None:
    """None without `data.demonstrations`. Raises ConfigError if a row cannot be trained. A collective."""
    given = config.data.demonstrations
    if given is None:
        return None
    rows = given.rows(config.batch.groups * config.batch.samples)
    fitting = config.model_copy(update={"sft": _as_sft(given, rows, max_sample_tokens(config))})
    reader = reader_of(fitting, KEY, began_in(config.run.path / "checkpoints"))
    try:
        data = read_demonstrations(fitting, KEY, given.path, reader)
    finally:
        reader.close()
    return Beside(data, rows, given.weight, budget)


def _as_sft(given: DemonstrationsConfig, rows: int, longest: int) -> SftConfig:
    return SftConfig(rows=rows, turns=given.turns, max_tokens=longest, too_long=given.too_long)
