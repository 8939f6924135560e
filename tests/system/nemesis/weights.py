"""Weights that show whose they are: every tensor follows from the policy, and the policy can be read from them.

`policy` names a policy by 64 hex digits (`history.following`). A tensor that is torn, damaged or of another version is
found by comparing all of them with what the first one says.
"""

from collections.abc import Collection, Iterator, Mapping

import torch

from learner.weights.plan import Spec

LAYERS = 8
NAMED = "policy"
SPECS = [
    Spec(NAMED, (32,), torch.uint8),
    Spec("embed", (96, 1024), torch.float32),
    *(Spec(f"layer.{number}", (301, 333), torch.float32) for number in range(LAYERS)),
]
"""3.6 MiB: several buckets of 1 MiB, so that a fault meets the middle of a broadcast."""
PERIOD = 1021


def weights_of(policy: str) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors of `policy`, by name."""
    yield NAMED, torch.frombuffer(bytearray.fromhex(policy), dtype=torch.uint8)
    for number, spec in enumerate(SPECS[1:]):
        draw = torch.Generator().manual_seed(int(policy[:15], 16) + number)
        size = torch.Size(spec.shape).numel()
        yield spec.name, torch.randn(PERIOD, generator=draw).repeat(-(-size // PERIOD))[:size].view(spec.shape)


def policy_of(weights: Mapping[str, torch.Tensor]) -> str:
    """The policy whose weights these are; else which tensor is not of the policy that they name."""
    policy = bytes(weights[NAMED].tolist()).hex() if NAMED in weights else ""
    if len(policy) != 64:
        return "no policy"
    wrong = [name for name, right in weights_of(policy) if name not in weights or not torch.equal(weights[name], right)]
    return f"{policy}, but for {', '.join(wrong)}" if wrong else policy


class NamedPolicy:
    """A policy as the learner's loop and its sender see it: `state` says all."""

    def __init__(self, state: str) -> None:
        self.state = state

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        return ((name, tensor) for name, tensor in weights_of(self.state) if name not in without)

    def logprobs_of(self, tokens: list[int]) -> list[float]:
        return logprobs(self.state, tokens)


def logprobs(policy: str, tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens[1:]`, far from those of another policy."""
    return [-int(policy[:4], 16) / 1000 - 0.001 * token for token in tokens[1:]]
