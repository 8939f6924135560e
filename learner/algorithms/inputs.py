"""Inputs of a loss for one microbatch, and its tokens' weights in the batch."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossInputs:
    """One packed microbatch: every tensor is [tokens]; counts are of the whole batch."""

    policy_logprobs: Tensor
    """float, with gradient."""
    behaviour: Tensor
    """float, recorded by the rollout server."""
    advantages: Tensor
    """float: of the sample, the turn or, by a critic, the token."""
    sampled: Tensor
    """bool: sampled by the policy, hence trained."""
    sequence: Tensor
    """int64: index of the sample in this microbatch or, if `scattered`, in the batch."""
    num_sequences: int
    num_tokens: int
    """Sampled tokens, before any mask."""
    proximal: Tensor | None = None
    """float, from the start of the step. None: `policy_logprobs`."""
    reference: Tensor | None = None
    """float, of the frozen initial model."""
    entropy: Tensor | None = None
    """float, of the learner."""
    versions: Tensor | None = None
    """int: version that sampled the token."""
    version: int = 0
    undone: tuple[int, int] = (0, 0)
    """A rewind undid versions above the first, up to the second; later policies reuse their numbers."""
    num_prompts: int | None = None
    prompt_tokens: Tensor | None = None
    """int64: sampled tokens of the token's whole group."""
    sequence_tokens: Tensor | None = None
    """int64: sampled tokens of the token's sample. None: counted here, wrong if scattered."""
    scattered: bool = False
    """Whether a sample may span microbatches; losses of whole samples then need `sequence_log_ratio`."""
    sequence_log_ratio: Tensor | None = None
    """float: sum of `log_ratio` over the sample; needs `sequence_tokens`. None: counted here."""
    m2_limit: Tensor | None = None
    """[] float, of the batch. None: of this microbatch."""

    @property
    def log_ratio(self) -> Tensor:
        """log pi - log mu, with gradient."""
        return self.policy_logprobs - self.behaviour

    def clean(self) -> "LossInputs":
        """Zero what was not sampled (versions: `version`), so that NaN there reaches nothing."""
        changes: dict[str, Tensor] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Tensor) and value.dim() == 1 and field.name != "sampled":
                changes[field.name] = torch.where(self.sampled, value, self.version if field.name == "versions" else 0)
        return replace(self, **changes)  # type: ignore[arg-type]

    def copy(self) -> "LossInputs":
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return replace(self, **{name: value.clone() for name, value in values if isinstance(value, Tensor)})  # type: ignore[arg-type]

    def per_sequence(self, values: Tensor) -> Tensor:
        """Sums of `values` [tokens] over each sequence's sampled tokens: [sequences or more]. No device sync."""
        size = max(values.numel(), self.num_sequences)
        values = torch.where(self.sampled, values, 0)
        return values.new_zeros(size).index_add(0, self.sequence, values)

    def lengths(self) -> Tensor:
        """Sampled tokens by sequence, shaped as `per_sequence`."""
        return self.per_sequence(self.sampled.to(self.policy_logprobs.dtype))

    def sequence_mean(self, values: Tensor) -> Tensor:
        """Mean over each token's sequence: [tokens]."""
        return (self.per_sequence(values) / self.lengths().clamp(min=1))[self.sequence]

    def sample_log_ratio(self) -> Tensor:
        """Sum of `log_ratio` over each token's sample, detached: [tokens]."""
        if self.sequence_log_ratio is None:
            return self.per_sequence(self.log_ratio.detach())[self.sequence]
        return self.sequence_log_ratio

    def mean_log_ratio(self) -> Tensor:
        """Mean of `log_ratio` over each token's sample, detached: [tokens]."""
        if self.sequence_log_ratio is None or self.sequence_tokens is None:
            return self.sequence_mean(self.log_ratio.detach())
        return self.sequence_log_ratio / self.sequence_tokens.clamp(min=1)


@dataclass(frozen=True)
class LossContext:
    """Fields of `LossInputs` known before a forward pass."""

    known: dict[str, Any]

    def select(self, tokens: Tensor | slice) -> "LossContext":
        per_token = {name: x[tokens] for name, x in self.known.items() if isinstance(x, Tensor) and x.dim()}
        return LossContext(self.known | per_token)

    def inputs(self, policy_logprobs: Tensor, entropy: Tensor | None = None) -> LossInputs:
        return LossInputs(policy_logprobs=policy_logprobs, entropy=entropy, **self.known)


def aggregation_weights(inputs: LossInputs, aggregation: str, constant_length: int | None) -> Tensor:
    """Weights of token losses in the batch's loss: [tokens].

    token: 1/N (DAPO). sequence: 1/(S |y|) (GRPO). prompt: 1/(P tokens of the group) (ScaleRL). constant: 1/(S L) (Dr.
    GRPO). Counts include masked tokens. Raises ValueError for a missing one.
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
