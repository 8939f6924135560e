"""A kernel of attention is compared with plain arithmetic before it trains: on a CPU, torch's own and broken ones."""

from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config, MambaConfig, MistralConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from configs.load import ConfigError
from learner.model import attention
from learner.model.kernels import implementations, tried
from learner.model.kernels.implementations import KERNELS, Kernel
from learner.model.kernels.tried import LIMIT, Heads, fault, largest_error

CPU = torch.device("cpu")


def other_heads_in_each_layer() -> PreTrainedConfig:
    """As OpenELM's."""
    config = PreTrainedConfig()
    vars(config).update(head_dim=64, num_attention_heads=[12, 16], num_key_value_heads=[3, 4])
    return config


@pytest.fixture(autouse=True)
def _no_results_of_other_tests() -> None:
    fault.cache_clear()


def break_kernel(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    """`change` gets output, then gradients of queries, keys and values, and returns others."""
    sound = KERNELS["sdpa"]

    def forward(*given: Any) -> Any:
        out, lse = sound.forward(*given)
        return change("out", out), lse

    def backward(*given: Any) -> Any:
        return tuple(change(name, x) for name, x in zip("qkv", sound.backward(*given), strict=True))

    monkeypatch.setitem(implementations.KERNELS, "sdpa", Kernel(forward, backward))


@pytest.mark.parametrize(
    ("name", "heads"),
    [
        ("sdpa", Heads(4, 4, 16)),
        ("sdpa", Heads(6, 2, 24)),
        ("sdpa", Heads(4, 1, 64)),
        ("plain", Heads(4, 2, 16, 32)),  # torch's own has no window on a CPU
    ],
)
def test_a_sound_kernel_is_as_exact_as_its_rounding(name: str, heads: Heads) -> None:
    assert 0.001 < largest_error(name, CPU, torch.bfloat16, heads) < LIMIT / 2
    assert fault(name, CPU, torch.bfloat16, heads) == ""


def test_a_window_that_a_kernel_ignores_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    sound = KERNELS["plain"]
    whole = Kernel(*(lambda *given, of=of: of(*given[:-1], given[-1]._replace(window=None)) for of in sound))
    monkeypatch.setitem(implementations.KERNELS, "sdpa", whole)
    assert fault("sdpa", CPU, torch.bfloat16, Heads(4, 2, 16)) == ""
    assert "off on heads of 16 numbers in a window of 32" in fault("sdpa", CPU, torch.bfloat16, Heads(4, 2, 16, 32))


@pytest.mark.parametrize("broken", ["out", "q", "k", "v"])
@pytest.mark.parametrize(
    "change",
    [lambda x: x * 1.05, lambda x: x.roll(1, 0), lambda x: x.roll(1, 1), lambda x: torch.full_like(x, torch.nan)],
    ids=["scaled", "other tokens", "other heads", "not finite"],
)
def test_a_wrong_result_is_seen(broken: str, change: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    break_kernel(monkeypatch, lambda name, x: change(x) if name == broken else x)
    found = fault("sdpa", CPU, torch.bfloat16, Heads(4, 2, 16))
    assert found.endswith("off on heads of 16 numbers on this GPU, compared with plain arithmetic"), found


def test_a_kernel_that_raises_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("no kernel\nfor this width")

    break_kernel(monkeypatch, failing)
    words = "fails on heads of 16 numbers on this GPU (RuntimeError: no kernel for this width)"
    assert fault("sdpa", CPU, torch.bfloat16, Heads(4, 2, 16)) == words


def test_auto_takes_the_next_kernel_and_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, seen = torch.device("cuda", 0), list[tuple[str, Heads]]()

    def broken(name: str, device: torch.device, dtype: torch.dtype, heads: Heads) -> str:
        seen.append((name, heads))
        return "is 118% off on this GPU" if name == "flash4" else ""

    monkeypatch.setattr(tried, "fault", broken)
    monkeypatch.setattr(attention, "_unusable", lambda name, *_: None if name != "flash" else "is not installed")
    config = MistralConfig(num_attention_heads=12, num_key_value_heads=4, head_dim=64, sliding_window=4096)
    assert attention.choose("auto", gpu, torch.bfloat16, config) == "varlen"
    assert "learner.attention: flash4 is 118% off on this GPU" in caplog.text
    with pytest.raises(ConfigError, match=r"^learner\.attention: flash4 is 118% off on this GPU; use auto, or sdpa"):
        attention.choose("flash4", gpu, torch.bfloat16, config)
    assert {heads for name, heads in seen if name == "varlen"} == {Heads(6, 2, 64), Heads(6, 2, 64, 64)}
    seen.clear()
    alike = Qwen2Config(hidden_size=512, num_attention_heads=8, num_key_value_heads=8)
    attention.choose("varlen", gpu, torch.bfloat16, alike)
    attention.choose("varlen", torch.device("cuda"), torch.bfloat16, Qwen3Config())  # not to be touched yet
    assert seen == [("varlen", Heads(2, 2, 64))]


@pytest.mark.parametrize(
    ("config", "tried_heads"),
    [
        (MambaConfig(), []),
        (other_heads_in_each_layer(), [Heads(2, 2, 64)]),
        (DeepseekV3Config(), [Heads(2, 2, 192)]),
    ],
    ids=["no attention", "other heads in each layer", "latent attention"],
)
def test_any_config_is_tried_with_heads_that_it_may_have(
    config: Any, tried_heads: list[Heads], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = list[Heads]()
    monkeypatch.setattr(tried, "fault", lambda name, device, dtype, heads: seen.append(heads) or "")
    monkeypatch.setattr(attention, "_unusable", lambda *_: None)
    assert attention.choose("varlen", torch.device("cuda", 0), torch.bfloat16, config) == "varlen"
    assert seen == tried_heads
