"""Layers whose kernels are given the bounds of documents: each document as if it stood alone, or a refusal by name."""

import re
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d
from torch.utils.checkpoint import checkpoint
from transformers import Lfm2Config, Qwen3_5TextConfig
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, torch_chunk_gated_delta_rule

from configs.load import ConfigError
from learner.model import bounded_state, loading, state

EDGES = (0, 1, 70, 75, 192, 230)
RULE = "torch_chunk_gated_delta_rule"


def delta_net() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3_5TextConfig(
        hidden_size=32, layer_types=["linear_attention"], num_hidden_layers=1,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
    )  # fmt: skip
    return Qwen3_5GatedDeltaNet(config, 0).double()


def installed(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel as transformers' `use_kernel_func_from_hub_with_fallback` wraps it."""
    torch_function = torch_chunk_gated_delta_rule.__wrapped__

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        assert torch_function
        return implementation(*args, **kwargs)

    return wrapped


def bounded(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **others: Any) -> tuple[Tensor, None]:
    """A delta rule that knows bounds, as a kernel for GPUs does."""
    rule, gates = torch_chunk_gated_delta_rule.__wrapped__, ("g", "beta")
    outputs = []
    for a, b in pairwise(cu_seqlens.tolist()):
        parts = {name: others[name][:, a:b] for name in gates}
        outputs.append(rule(query[:, a:b], key[:, a:b], value[:, a:b], **(others | parts))[0])
    return torch.cat(outputs, 1), None


def bounds_ignored(*args: Any, cu_seqlens: Tensor, **kwargs: Any) -> Any:
    return torch_chunk_gated_delta_rule.__wrapped__(*args, **kwargs)


def row(tokens: int = EDGES[-1]) -> Tensor:
    return torch.randn(1, tokens, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("taps", [2, 4])
def test_a_convolution_sees_each_document_alone(taps: int) -> None:
    """Documents shorter than the convolution, too, and in the gradient."""

    def convolution(x: Tensor, weight: Tensor) -> Tensor:
        return conv1d(x, weight[:, None], padding=weight.shape[-1] - 1, groups=len(weight))[..., : x.shape[-1]]

    edges, weight = (0, 1, 3, 4, 9), torch.randn(5, taps, dtype=torch.float64, requires_grad=True)
    x = torch.randn(1, 5, edges[-1], dtype=torch.float64, requires_grad=True)
    got = bounded_state.convolve(convolution, x, weight, torch.tensor(edges, dtype=torch.int32))
    alone = torch.cat([convolution(x[..., a:b], weight) for a, b in pairwise(edges)], -1)
    torch.testing.assert_close(got, alone)
    scale = torch.randn_like(got)
    for ours, wanted in zip(
        *(torch.autograd.grad((out * scale).sum(), (x, weight)) for out in (got, alone)), strict=True
    ):
        torch.testing.assert_close(ours, wanted)


def test_a_delta_rule_with_bounds_is_one_call_and_sees_each_document_alone() -> None:
    """The row is handed on whole: with and without bounds in the kernel the layer computes the same."""
    block, calls = nn.Module(), []
    block.mixer = delta_net()
    block.forward = lambda hidden, **_: block.mixer(hidden)
    loading.bounds.follow([block])
    state.separate([block])
    given: dict[str, Any] = {"cu_seq_lens_q": torch.tensor(EDGES, dtype=torch.int32), "max_length_q": 117}
    apart = block(row(), **given)  # transformers' torch function takes no bounds

    def counted(query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **kwargs: Any) -> Any:
        calls.append(query.shape[:2])
        return bounded(query, key, value, cu_seqlens, **kwargs)

    with bounded_state.replaced(block.mixer, {RULE: installed(counted)}):
        whole = block(row(), **given)
    assert calls == [(1, EDGES[-1])]
    torch.testing.assert_close(whole, apart)
    assert bounded_state.namespace(block.mixer)[RULE] is torch_chunk_gated_delta_rule


@pytest.mark.parametrize("tokens", [64, EDGES[-1]])
def test_a_kernel_that_sees_neighbours_is_refused_by_name(tokens: int) -> None:
    """`check` compares a GPU's kernels with transformers' torch functions before anything is trained by them."""
    layer = delta_net()
    with bounded_state.replaced(layer, {RULE: installed(bounded)}):
        bounded_state.check(layer, layer.forward, row(tokens))
        bounded_state.check(layer, layer.forward, row(1))
    with (
        bounded_state.replaced(layer, {RULE: installed(bounds_ignored)}),
        pytest.raises(
            ConfigError, match=r"^model.path: the output of .*Qwen3_5GatedDeltaNet differs by 0\.\d+ of its norm"
        ),
    ):
        bounded_state.check(layer, layer.forward, row(tokens))


def fail(*_: Any, **__: Any) -> Any:
    raise RuntimeError("Triton on this GPU is wrong.\nInstall tilelang.")


class WrongGradient(torch.autograd.Function):
    """The identity, whose gradient is a tenth too large."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 1.1


def wrong_gradient(*args: Any, **kwargs: Any) -> Any:
    output, last = bounded(*args, **kwargs)
    return WrongGradient.apply(output), last


@pytest.mark.parametrize(
    ("kernel", "words"),
    [
        (fail, r"fail: Triton on this GPU is wrong. Install tilelang.; or un"),
        (wrong_gradient, r"the gradient of .*0\.\d+ of"),
    ],
    ids=["fails", "wrong gradient"],
)
def test_a_kernel_that_cannot_train_is_refused_by_name(kernel: Callable[..., Any], words: str) -> None:
    """Some releases of Triton compile a wrong backward pass, and flash-linear-attention refuses them only there."""
    layer = delta_net()
    with bounded_state.replaced(layer, {RULE: installed(kernel)}), pytest.raises(ConfigError, match=words):
        bounded_state.check(layer, layer.forward, row())


def test_a_check_within_a_recomputed_block_leaves_its_gradient_right() -> None:
    """Activation checkpointing keeps no tensor of the check, and recomputes the block once."""
    layer, given = delta_net(), row().requires_grad_()

    def checked(hidden: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with bounded_state.replaced(layer, {RULE: installed(bounded)}):
                bounded_state.check(layer, layer.forward, hidden)
        output: Tensor = layer(hidden)
        return output

    got = torch.autograd.grad(checkpoint(checked, given, use_reentrant=False).sum(), given)
    torch.testing.assert_close(got, torch.autograd.grad(layer(given).sum(), given))


def test_layers_without_kernels_are_named_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A package that is installed and cannot be imported is no missing package, as transformers calls it."""
    layer = delta_net()
    monkeypatch.setitem(sys.modules, "fla", None)
    state.report(layer, torch.device("cpu"))
    assert not caplog.records
    state.report(layer, torch.device("cuda"))
    assert re.search(r"Qwen3_5GatedDeltaNet: fla cannot be imported \(ModuleNotFoundError: .*fla", caplog.text)
    with bounded_state.replaced(layer, {RULE: installed(bounded)}):
        assert bounded_state.slow_because([layer]) is None


def test_only_layers_whose_kernels_know_bounds_are_given_them() -> None:
    layer = delta_net()
    short = Lfm2ShortConv(Lfm2Config(hidden_size=16, layer_types=["conv"], num_hidden_layers=1), 0)
    assert bounded_state.takes_bounds(short)
    assert not bounded_state.takes_bounds(layer), "transformers' torch function takes no bounds"
    with bounded_state.replaced(layer, {RULE: installed(bounded)}):
        assert bounded_state.takes_bounds(layer)
    assert not bounded_state.takes_bounds(type("FalconH1Mixer", (nn.Identity,), {})())
