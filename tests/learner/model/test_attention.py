"""Packed documents through our attention against the same documents, padded, through transformers."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import torch

from learner.model import attention, loading
from learner.model.microbatch import lay_out
from tests.harness.world import VOCABULARY, plain, policy_of, tiny_model

LENGTHS = (5, 9, 1, 2, 7)


def documents() -> list[list[int]]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (n,), generator=draw).tolist() for n in LENGTHS]


def packed(texts: list[list[int]]):
    ones, zeros = ([[number] * len(ids) for ids in texts] for number in (1, 0))
    return lay_out(texts, ones, zeros, zeros, list(range(len(texts))))


def padded_scores(model, texts: list[list[int]], temperature: float) -> torch.Tensor:
    """[tokens]: log-probability of each token by transformers' own padded forward, 0 for first tokens."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in texts])
    logp = (model(ids, attention_mask=mask).logits / temperature).log_softmax(-1)
    scores = logp[:, :-1].gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.cat(
        [torch.cat([torch.zeros(1), row[: len(text) - 1]]) for row, text in zip(scores, texts, strict=True)]
    )


@pytest.mark.parametrize("name", attention.ATTENTIONS)
def test_transformers_builds_a_model_with_each(name: str, tmp_path: Path) -> None:
    """It must not mistake one of our names for a kernel of its own, for which it would look for a package."""
    model = loading.build_on_meta(tiny_model(tmp_path), attention.registered(name))
    assert model.config._attn_implementation == attention.registered(name)


@pytest.mark.parametrize("heads", [2, 4])
def test_sdpa_is_one_graph_with_grouped_heads_too(heads: int) -> None:
    """Where the compiler follows the sizes of padded rows; numbers of heads are sizes of the graph as well."""
    torch._dynamo.reset()
    q, k, v = torch.randn(24, 4, 8), torch.randn(24, heads, 8), torch.randn(24, heads, 8)
    given = torch.tensor([0, 5, 14, 24], dtype=torch.int32), 10, True, 0.3, None
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(attention.sdpa, dynamic=True, fullgraph=True, backend="eager")(q, k, v, *given)
    torch.testing.assert_close(compiled, attention.sdpa(q, k, v, *given))


@pytest.mark.parametrize("tied", [False, True])
def test_packed_equals_padded(tmp_path: Path, mesh, tied: bool) -> None:
    config = tiny_model(tmp_path, tied)
    policy, model, texts = policy_of(config, mesh, temperature=0.8), plain(config), documents()
    assert policy.attention == "sdpa"
    got, _ = policy(packed(texts))
    want = padded_scores(model, texts, 0.8)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    by = torch.randn(len(got), generator=torch.Generator().manual_seed(2))
    (got * by).sum().backward()
    (want * by).sum().backward()
    reference = dict(model.named_parameters())
    for name, parameter in policy.model.named_parameters():
        ours, theirs = parameter.grad.full_tensor(), reference[name].grad
        assert (ours - theirs).norm() <= 1e-5 * theirs.norm(), name


def test_documents_do_not_see_each_other(tmp_path: Path, mesh) -> None:
    policy, texts = policy_of(tiny_model(tmp_path), mesh), documents()
    before = policy.score(packed(texts))
    texts[1] = [(token + 1) % VOCABULARY for token in texts[1]]
    after = policy.score(packed(texts))
    torch.testing.assert_close(after[:5], before[:5])
    torch.testing.assert_close(after[14:], before[14:])
    assert not torch.equal(after[5:14], before[5:14])


def test_no_mask_is_made(tmp_path: Path, mesh) -> None:
    """No [tokens, tokens] tensor exists in the forward pass of many short documents."""
    policy = policy_of(tiny_model(tmp_path), mesh)
    texts = [[1, 2, 3, 4]] * 400
    largest = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            largest.extend(
                x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor)
            )
            return out

    with torch.no_grad(), Watch():
        policy(packed(texts))
    assert max(largest) < 1600 * 1600 / 4


def test_sliding_windows_hide_what_is_further_back() -> None:
    """With `sdpa`, on any device, in a row whose documents are longer and shorter than the window."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 11, 4, generator=draw) for _ in range(3))
    row = {"cu_seq_lens_q": torch.tensor([0, 8, 11], dtype=torch.int32), "max_length_q": 8}
    got, _ = attention.ATTENTIONS["sdpa"](None, q, k, v, None, **row, sliding_window=4)
    place, document = torch.arange(11), torch.tensor([0] * 8 + [1] * 3)
    back = place[:, None] - place
    mask = (document[:, None] == document) & (back >= 0) & (back < 4)
    scores = (q @ k.transpose(-1, -2) / 2).masked_fill(~mask, -torch.inf)
    torch.testing.assert_close(got[0].transpose(0, 1), scores.softmax(-1)[0] @ v[0])


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"position_bias": torch.ones(2)}, "has an attention with position_bias, which the learner ignores"),
        ({"dropout": 0.1}, "has dropout in its attention"),
        ({"max_length_q": ...}, "is not given cu_seq_lens_q and max_length_q"),
    ],
)
def test_an_attention_that_would_be_computed_wrongly_is_refused(given: dict, words: str) -> None:
    x = torch.ones(1, 2, 5, 4)
    row = {
        "query": x,
        "key": x,
        "value": x,
        "cu_seq_lens_q": torch.tensor([0, 5], dtype=torch.int32),
        "max_length_q": 5,
    }
    arguments = {name: x for name, x in (row | given).items() if x is not ...}
    with pytest.raises(ValueError, match=f"Linear {words}"):
        attention.ATTENTIONS["sdpa"](torch.nn.Linear(1, 1), attention_mask=None, **arguments)


def test_choice() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    assert attention.choose("auto", cpu, torch.bfloat16) == "sdpa"
    assert attention.choose("auto", gpu, torch.float32) == "sdpa"
    assert attention.choose("auto", gpu, torch.bfloat16) in ("flash4", "flash", "varlen")
    with pytest.raises(ValueError, match=r"learner.attention: varlen needs an NVIDIA GPU, .* on cpu; use auto"):
        attention.choose("varlen", cpu, torch.bfloat16)
    with pytest.raises(ValueError, match=r"flash needs model\.dtype bfloat16, and it is float32"):
        attention.choose("flash", gpu, torch.float32)
    if not attention.installed("flash4"):
        with pytest.raises(ValueError, match=r"flash4 is not installed \(pip install flash-attn-4\[cu13\]\); use auto"):
            attention.choose("flash4", gpu, torch.bfloat16)


def test_the_two_packages_that_share_a_name_are_distinguished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    for name, file in (("flash4", "cute/__init__.py"), ("flash", "flash_attn_interface.py")):
        shutil.rmtree(tmp_path / "flash_attn", ignore_errors=True)
        path = tmp_path / "flash_attn" / file
        path.parent.mkdir(parents=True)
        path.write_text("")
        importlib.invalidate_caches()
        for loaded in [loaded for loaded in sys.modules if loaded.startswith("flash_attn")]:
            del sys.modules[loaded]
        assert [found for found in attention.PACKAGES if attention.installed(found)] == [name]


def test_auto_skips_a_kernel_that_does_not_load_and_logs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("import no_such_cutlass")
    importlib.invalidate_caches()
    for loaded in [loaded for loaded in sys.modules if loaded.startswith("flash_attn")]:
        monkeypatch.delitem(sys.modules, loaded)
    attention._import_failure.cache_clear()  # its result is about this test's package
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    gpu = torch.device("cuda", 0)
    assert attention.choose("auto", gpu, torch.bfloat16) == "varlen"
    assert "flash_attn.cute is installed and does not load (ModuleNotFoundError: No module named" in caplog.text
    with pytest.raises(ValueError, match=r"flash4 is installed and does not load .*; use auto"):
        attention.choose("flash4", gpu, torch.bfloat16)
    attention._import_failure.cache_clear()
    (package / "__init__.py").write_text("flash_attn_varlen_func = None")
    assert attention.choose("auto", gpu, torch.bfloat16) == "flash4"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert attention.choose("auto", gpu, torch.bfloat16) == "varlen"
    with pytest.raises(ValueError, match=r"flash4 needs a Hopper GPU or a later one; use auto"):
        attention.choose("flash4", gpu, torch.bfloat16)
    attention._import_failure.cache_clear()
