"""The chunked head against torch.autograd and against the head that holds all logits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.head import logprobs_and_entropy


def naive(hidden, weight, targets, temperature):
    logits = (hidden @ weight.T) / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def case(tokens, dtype=torch.float64, vocabulary=11, width=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, generator=draw, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, generator=draw, requires_grad=True)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradient_by_finite_differences(entropy_gradient: bool) -> None:
    hidden, weight, targets = case(7)

    def both(h, w):
        logprobs, entropy = logprobs_and_entropy(h, w, targets, 0.7, 3, entropy_gradient)
        return (logprobs, entropy) if entropy_gradient else logprobs

    assert torch.autograd.gradcheck(both, (hidden, weight))


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.floats(0.1, 5),
    seed=st.integers(0, 99),
    bonus=st.booleans(),
)
def test_equals_the_naive_head(tokens: int, chunk: int, temperature: float, seed: int, bonus: bool) -> None:
    hidden, weight, targets = case(tokens, seed=seed)
    got = logprobs_and_entropy(hidden, weight, targets, temperature, chunk, bonus)
    want = naive(hidden, weight, targets, temperature)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    by = torch.randn(2, tokens, dtype=torch.float64)
    losses = [(by[0] * lp).sum() + (by[1] * en).sum() * bonus for lp, en in (got, want)]
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in losses), strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_states_are_scored_in_fp32() -> None:
    hidden, weight, targets = (x.detach() for x in case(6, torch.bfloat16))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, 1.0, 4)
    want = naive(hidden.float(), weight.float(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, want[0])
    torch.testing.assert_close(entropy, want[1])
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16


def test_never_holds_tokens_times_vocabulary() -> None:
    """The largest tensor that autograd or the forward pass makes stays at a chunk of logits or a copy of the weight."""
    tokens, vocabulary, width, chunk = 512, 256, 8, 16
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)
            )
            return out

    hidden, weight, targets = case(tokens, torch.float32, vocabulary, width)
    with Watch():
        logprobs, _ = logprobs_and_entropy(hidden, weight, targets, 1.0, chunk)
        logprobs.sum().backward()
    assert max(largest) <= max(chunk * vocabulary, tokens * width, vocabulary * width)
