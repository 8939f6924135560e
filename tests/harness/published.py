"""What vLLM's engine is compared with: a transformers model, published as the learner would, and what it computes."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

VOCABULARY = 128


class TorchPolicy:
    """A transformers model as the learner would publish it; its float32 weights are numbers of `dtype`."""

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.model, self.dtype, self.device = model, dtype, device

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            yield name, parameter.detach().to(self.device, self.dtype)

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        return scores(self.model, tokens)


@torch.no_grad()
def step(model: Any, version: int, dtype: torch.dtype = torch.float32) -> None:
    """Other weights, as after an optimizer's step (a large one), that are numbers of `dtype`."""
    draw = torch.Generator().manual_seed(version)
    for parameter in model.parameters():
        parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape, generator=draw))
        parameter.copy_(parameter.to(dtype))


@torch.no_grad()
def scores(model: Any, tokens: list[int], temperature: float = 1.0) -> list[float]:
    """Log-probabilities of `tokens[1:]` by transformers."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float() / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


def difference(ours: list[float], theirs: list[float]) -> float:
    """Mean absolute difference."""
    return sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)


def tiny_qwen2(tied: bool = False, seed: int = 0, hidden: int = 64, vocabulary: int = VOCABULARY) -> Qwen2ForCausalLM:
    """A random model, in float32."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1024,
        initializer_range=0.2,
        tie_word_embeddings=tied,
        bos_token_id=0,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config).float()
