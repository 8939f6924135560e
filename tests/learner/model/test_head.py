"""The chunked head against torch.autograd and against a head that holds all logits; three matmuls, not four."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from learner.model.epilogue import Epilogue
from learner.model.head import HeadOptions, chunked_loss, logprobs_and_entropy
from learner.model.memory import MATMULS


def naive(hidden, weight, targets, temperature):
    logits = (hidden @ weight.T) / temperature
    logp = logits.log_softmax(-1)
    return logp.gather(-1, targets[:, None]).squeeze(-1), -(logp.exp() * logp).sum(-1)


def curved(by, bonus: bool):
    """A loss whose gradient depends on the log-probability (and, with `bonus`, the entropy) of each token alone."""

    def loss(logprobs, entropy, chunk):
        terms = by[0][chunk] * logprobs.sin()
        return (terms + by[1][chunk] * entropy.cos() if bonus else terms).sum()

    return loss


def case(tokens, dtype=torch.float64, vocabulary=11, width=5, seed=0):
    draw = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, width, dtype=dtype, generator=draw, requires_grad=True)
    weight = torch.randn(vocabulary, width, dtype=dtype, generator=draw, requires_grad=True)
    return hidden, weight, torch.randint(vocabulary, (tokens,), generator=draw)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_gradient_by_finite_differences(entropy_gradient: bool) -> None:
    hidden, weight, targets = case(7)

    def both(h, w):
        logprobs, entropy = logprobs_and_entropy(h, w, targets, HeadOptions(0.7, 3, entropy_gradient))
        return (logprobs, entropy) if entropy_gradient else logprobs

    assert torch.autograd.gradcheck(both, (hidden, weight))


@pytest.mark.parametrize("bonus", [False, True])
def test_gradient_of_a_chunked_loss_by_finite_differences(bonus: bool) -> None:
    hidden, weight, targets = case(7)
    by = torch.randn(2, 7, dtype=torch.float64)

    def total(h, w):
        return 3 * chunked_loss(h, w, targets, curved(by, bonus), HeadOptions(0.7, 3, bonus))[2] + h.sum()

    assert torch.autograd.gradcheck(total, (hidden, weight))


COMMON = given(
    tokens=st.integers(0, 9),
    chunk=st.integers(1, 12),
    temperature=st.floats(0.1, 5),
    seed=st.integers(0, 99),
    bonus=st.booleans(),
)


@settings(max_examples=30)
@COMMON
def test_chunked_loss_equals_the_loss_of_all(
    tokens: int, chunk: int, temperature: float, seed: int, bonus: bool
) -> None:
    """Log-probabilities to the bit, loss and gradients to rounding; the gradient scales with the incoming one."""
    hidden, weight, targets = case(tokens, seed=seed)
    loss = curved(torch.randn(2, tokens, dtype=torch.float64), bonus)
    options = HeadOptions(temperature, chunk, bonus)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, options)
    want = loss(logprobs, entropy, slice(None))
    *scores, total = chunked_loss(hidden, weight, targets, loss, options)
    assert not any(score.requires_grad for score in scores)
    assert all(torch.equal(a, b) for a, b in zip(scores, (logprobs, entropy), strict=True))
    torch.testing.assert_close(total, want, rtol=1e-10, atol=1e-10)
    for a, b in zip(*(torch.autograd.grad(5 * x, (hidden, weight)) for x in (total, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@settings(max_examples=30)
@COMMON
def test_equals_the_naive_head(tokens: int, chunk: int, temperature: float, seed: int, bonus: bool) -> None:
    hidden, weight, targets = case(tokens, seed=seed)
    got = logprobs_and_entropy(hidden, weight, targets, HeadOptions(temperature, chunk, bonus))
    want = naive(hidden, weight, targets, temperature)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)
    by = torch.randn(2, tokens, dtype=torch.float64)
    losses = [(by[0] * lp).sum() + (by[1] * en).sum() * bonus for lp, en in (got, want)]
    for a, b in zip(*(torch.autograd.grad(loss, (hidden, weight)) for loss in losses), strict=True):
        torch.testing.assert_close(a, b)


def test_bf16_hidden_states_give_fp32_logprobs() -> None:
    hidden, weight, targets = (x.detach() for x in case(6, torch.bfloat16))
    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, HeadOptions(1.0, 4))
    want = naive(hidden.float(), weight.float(), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == torch.float32
    torch.testing.assert_close(logprobs, want[0])
    torch.testing.assert_close(entropy, want[1])
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.bfloat16
    kept, hidden.grad, weight.grad = (hidden.grad, weight.grad), None, None
    chunked_loss(hidden, weight, targets, lambda lp, en, chunk: lp.sum(), HeadOptions(1.0, 4))[2].backward()
    for a, b in zip((hidden.grad, weight.grad), kept, strict=True):
        assert torch.equal(a, b)


def whole_pass(hidden, weight, targets, chunk: int) -> None:
    logprobs_and_entropy(hidden, weight, targets, HeadOptions(1.0, chunk))[0].sum().backward()


def chunked_pass(hidden, weight, targets, chunk: int) -> None:
    chunked_loss(hidden, weight, targets, lambda lp, en, chunk: lp.sum(), HeadOptions(1.0, chunk))[2].backward()


PASSES = pytest.mark.parametrize("head", [whole_pass, chunked_pass])


@PASSES
def test_never_holds_tokens_times_vocabulary(head: Callable[..., None]) -> None:
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
        head(hidden, weight, targets, chunk)
    assert max(largest) <= max(chunk * vocabulary, tokens * width, vocabulary * width)


@pytest.mark.parametrize(("head", "matmuls"), [(whole_pass, 4), (chunked_pass, 3)])
def test_matmuls_per_chunk(head: Callable[..., None], matmuls: int) -> None:
    """Logits, gradient of the hidden states, gradient of the weight; and the logits again if the loss comes later."""
    made = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            made.append(func in MATMULS)
            return func(*args, **(kwargs or {}))

    hidden, weight, targets = case(12)
    with Count():
        head(hidden, weight, targets, 4)
    assert sum(made) == 3 * matmuls


def peak_bytes(head: Callable[..., None], path: Path) -> int:
    """Peak bytes that `head` allocates beyond what was allocated before."""
    hidden, weight, targets = case(400, torch.float32, 2000, 100)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        head(hidden, weight, targets, 100)
    seen.export_chrome_trace(str(path))
    events = [event for event in json.loads(path.read_text())["traceEvents"] if event["name"] == "[memory]"]
    events.sort(key=lambda event: event["ts"])
    totals = torch.tensor([event["args"]["Bytes"] for event in events]).cumsum(0)
    return int(totals.max())


def test_three_matmuls_take_no_more_memory_than_four(tmp_path: Path) -> None:
    """The gradient of the weight lives from the forward pass on, when nothing else has to."""
    assert peak_bytes(chunked_pass, tmp_path / "a.json") <= 1.02 * peak_bytes(whole_pass, tmp_path / "b.json")


EPILOGUES = [Epilogue(0.25), Epilogue(-2.0), Epilogue(1.0, 1.5), Epilogue(3.0, 0.7)]


@pytest.mark.parametrize("epilogue", EPILOGUES, ids=str)
@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_bias_scale_and_softcap(epilogue: Epilogue, entropy_gradient: bool) -> None:
    """Values as written out, gradients by finite differences, of both forms of the head."""
    hidden, weight, targets = case(7)
    bias = torch.randn(11, dtype=torch.float64, generator=torch.Generator().manual_seed(3), requires_grad=True)
    options = HeadOptions(0.7, 3, entropy_gradient, epilogue)
    z = epilogue.scale * (hidden @ weight.T + bias)
    z = z if epilogue.softcap is None else epilogue.softcap * (z / epilogue.softcap).tanh()
    logp = (z / 0.7).log_softmax(-1)
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets, options, bias)
    torch.testing.assert_close(logprobs, logp.gather(-1, targets[:, None]).squeeze(-1))
    torch.testing.assert_close(entropy, -(logp.exp() * logp).sum(-1))
    by = torch.randn(2, 7, dtype=torch.float64)

    def both(h, w, b):
        found = logprobs_and_entropy(h, w, targets, options, b)
        return found if entropy_gradient else found[0]

    def total(h, w, b):
        return chunked_loss(h, w, targets, curved(by, entropy_gradient), options, b)[2]

    assert torch.autograd.gradcheck(both, (hidden, weight, bias))
    assert torch.autograd.gradcheck(total, (hidden, weight, bias))
