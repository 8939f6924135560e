"""What a loss gets for one microbatch, and how its tokens are averaged over the whole batch.

Values at positions that were not sampled are replaced before any arithmetic, so that NaN there reaches neither value
nor gradient.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One packed microbatch: every tensor is [tokens], and entry i is about token i."""

    policy_logprobs: Tensor
    """float: learner's log-probability, with gradient."""
    behaviour: Tensor
    """float: log-probability recorded by the server that sampled it."""
    advantages: Tensor
    """float: of the token's sample, of its turn or, by a critic, of the token."""
    sampled: Tensor
    """bool: sampled by the policy, hence trained. All other tokens are context."""
    sequence: Tensor
    """int64: index of the token's sample, in this microbatch or, if `scattered`, in the batch."""
    num_sequences: int
    """Samples in the whole batch, over all ranks."""
    num_tokens: int
    """Sampled tokens in the whole batch, before any mask."""
    proximal: Tensor | None = None
    """float: under the weights at the start of the step. None: `policy_logprobs`, the same while a batch is one
    optimizer step."""
    reference: Tensor | None = None
    """float: under the frozen initial model."""
    entropy: Tensor | None = None
    """float: of the learner's distribution, with gradient if there is a bonus."""
    versions: Tensor | None = None
    """int: version that sampled the token."""
    version: int = 0
    undone: tuple[int, int] = (0, 0)
    """A rewind undid policies with versions above the first and up to the second; later ones have the same numbers."""
    num_prompts: int | None = None
    """Groups in the whole batch; for `aggregation: prompt`."""
    prompt_tokens: Tensor | None = None
    """int64: sampled tokens of the token's whole group, over all ranks; for `aggregation: prompt`."""
    sequence_tokens: Tensor | None = None
    """int64: sampled tokens of the token's sample. None: counted here, correct only if it is not scattered."""
    scattered: bool = False
    """Parts of a sample may be in other microbatches: then losses of whole samples need `sequence_log_ratio`."""
    sequence_log_ratio: Tensor | None = None
    """float: sum of `log_ratio` over the token's whole sample, under the same weights; comes with `sequence_tokens`.
    None: counted here."""
    m2_limit: Tensor | None = None
    """[] float: of the whole batch. None: of this microbatch, correct if it is the batch."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log mu, with gradient: [tokens]."""
        return self.policy_logprobs - self.behaviour

    def clean(self) -> "LossInputs":
        """The same with zeros (for versions: `version`) at all tokens that were not sampled."""
        changes: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.dim() == 1 and field.name != "sampled":
                changes[field.name] = torch.where(self.sampled, value, self.version if field.name == "versions" else 0)
        return replace(self, **changes)  # type: ignore[arg-type]

    def copy(self) -> "LossInputs":
        """The same in tensors of their own, through which gradients pass."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: value.clone() for name, value in values if isinstance(value, Tensor)})  # type: ignore[arg-type]

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sums of `values` [tokens] over the sampled tokens of each sequence: [sequences or more]. No device sync."""
        size = max(values.numel(), self.num_sequences)
        values = torch.where(self.sampled, values, 0)
        return values.new_zeros(size).index_add(0, self.sequence, values)

    def lengths(self) -> Tensor:
        """Sampled tokens of each sequence, same shape as `per_sequence`."""
        return self.per_sequence(self.sampled.to(self.policy_logprobs.dtype))

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean of `values` over the sampled tokens of each token's sequence: [tokens]."""
        return (self.per_sequence(values) / self.lengths().clamp(min=1))[self.sequence]

    def sample_log_ratio(self) -> Tensor:
        """Sum of `log_ratio` over each token's sample, without gradient: [tokens]."""
        if self.sequence_log_ratio is None:
            return self.per_sequence(self.log_ratio.detach())[self.sequence]
        return self.sequence_log_ratio

    def mean_log_ratio(self) -> Tensor:
        """Its mean likewise: [tokens]."""
        if self.sequence_log_ratio is None or self.sequence_tokens is None:
            return self.sequence_mean(self.log_ratio.detach())
        return self.sequence_log_ratio / self.sequence_tokens.clamp(min=1)


@dataclass(frozen=True)
class LossContext:
    """The fields of `LossInputs` that are known before a forward pass."""

    known: dict[str, Any]

    def select(self, tokens: Tensor | slice) -> "LossContext":
        """The same of the given tokens only; counts stay those of the whole batch."""
        per_token = {name: x[tokens] for name, x in self.known.items() if isinstance(x, Tensor) and x.dim()}
        return LossContext(self.known | per_token)

    def inputs(self, policy_logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
        return LossInputs(policy_logprobs=policy_logprobs, entropy=entropy, **self.known)


def aggregation_weights(inputs: LossInputs, aggregation: str, constant_length: int | None) -> Tensor:
    """[tokens] weights w such that the loss of the batch is the sum of w times the loss of each token.

    token: 1/N (DAPO). sequence: 1/(S |y|) (GRPO). prompt: 1/(P tokens of the group) (ScaleRL). constant: 1/(S L) (Dr.
    GRPO). The counts are of the whole batch and include masked tokens. Raises ValueError if a count is missing.
    """
    ones = torch.ones_like(inputs.policy_logprobs)
    if aggregation == "token":
        weights = ones / max(inputs.num_tokens, 1)
    elif aggregation == "sequence":
        counted = inputs.sequence_tokens
        lengths = inputs.lengths()[inputs.sequence] if counted is None else counted
        weights = ones / lengths.clamp(min=1) / max(inputs.num_sequences, 1)
    elif aggregation == "prompt":
        if inputs.prompt_tokens is None or inputs.num_prompts is None:
            raise ValueError("algorithm.aggregation is prompt, but LossInputs has no prompt_tokens or num_prompts")
        weights = ones / inputs.prompt_tokens.clamp(min=1) / max(inputs.num_prompts, 1)
    else:
        if constant_length is None:
            raise ValueError("algorithm.aggregation is constant, but algorithm.constant_length is null")
        weights = ones / (constant_length * max(inputs.num_sequences, 1))
    return torch.where(inputs.sampled, weights, 0)
