"""A certificate fails for a learner that computes, shards, pushes or saves a model wrongly, and names the layer."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from configs.certificate import Check
from learner.certify import copies
from learner.certify.ranks import Answer, Pair
from learner.model import loading, towers, vision
from learner.model.policy import Policy
from learner.saved import export
from learner.train import pictures
from tests.harness.certified import copied, examined, tiny_config
from tests.harness.lanes import long_but
from tests.harness.pictured import seeing_model
from tests.learner.model.test_exactness import Looks, LooksBack, Unknown

ONE, PACKED, LONG, SHARED = (
    *("one document = eager", "packed documents = alone", "packed, longer than windows = alone"),
    "shared prompt = unshared",
)
RANKS, PUSHED, DISK, EXPORTED = (
    *("two ranks = one", "changed weights, pushed = learner", "weights pushed = loaded from disk"),
    "export, read back = learner",
)


class NoRanks(Pair):
    """In place of two ranks, which these tests do not need."""

    def __init__(self) -> None:
        pass

    def ask(self, *_: Any) -> list[Answer]:
        return [Answer(unmet="not started")] * 2


@pytest.fixture
def built_with(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Any], None]], None]:
    """Have the learner build models of another config than transformers."""

    def patch(mistake: Callable[[Any], None]) -> None:
        real = loading.build

        def build(config: Any, *rest: Any) -> Any:
            mistake(config.get_text_config())
            return real(config, *rest)

        monkeypatch.setattr(loading, "build", build)

    return patch


def faults(checks: dict[str, Check]) -> dict[str, str]:
    return {what: check.fault for what, check in checks.items() if check.fault}


def shorter_window(config: Any) -> None:
    config.sliding_window -= 1


def no_window(config: Any) -> None:
    config.sliding_window = None


def no_softcap(config: Any) -> None:
    config.attn_logit_softcapping = None


def other_scale(config: Any) -> None:
    config.attention_multiplier *= 1.1


def other_norm(config: Any) -> None:
    config.rms_norm_eps = 0.1


GEMMA2 = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": None, "layer_types": ["full_attention"] * 2}
MISTAKES = {
    "a window that is too short": (shorter_window, "mistral", {"sliding_window": 16}, "MistralAttention", True),
    "a window that is ignored": (no_window, "mistral", {"sliding_window": 16}, "MistralAttention", True),
    "a softcap that is ignored": (no_softcap, "gemma2", GEMMA2, "Gemma2Attention", False),
    "another scale of attention": (other_scale, "granite", {}, "GraniteAttention", False),
    "another epsilon of norms": (other_norm, "qwen3", {}, "Qwen3RMSNorm", False),
}


@pytest.mark.parametrize("name", long_but(MISTAKES, 0, 2, 4))
def test_another_attention_is_a_fault_of_its_layer(name: str, built_with: Any, mesh: Any, tmp_path: Path) -> None:
    mistake, kind, overrides, layer, only_long = MISTAKES[name]
    built_with(mistake)
    found = faults(examined(tiny_config(kind, **overrides), mesh, NoRanks(), tmp_path))
    assert f"its {layer} (layers.0." in found[LONG] and {ONE, PUSHED, EXPORTED} <= found.keys()
    assert (PACKED in found) == (not only_long), "short documents fit into the window"
    assert DISK not in found, "both have the same weights"


def test_an_unknown_layer_that_runs_on_is_a_fault(mesh: Any, tmp_path: Path) -> None:
    """Its state runs on into the next document."""
    Unknown.part = LooksBack
    found = faults(examined(Unknown.config_class(**tiny_config("llama").to_dict()), mesh, NoRanks(), tmp_path))
    assert re.search(r"LooksBack \(layers.0.mlp\)", found[PACKED]) and ONE not in found


class Remembers(Looks):
    """A scale in a persistent buffer, which differs from its initial value."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) * self.scale


@pytest.mark.parametrize("sent", [True, False])
def test_a_buffer_that_reaches_no_server_is_a_fault(sent: bool, mesh: Any, tmp_path: Path, monkeypatch: Any) -> None:
    Unknown.part = Remembers
    if not sent:
        monkeypatch.setattr(Policy, "_published_buffers", lambda policy, without=(): [])
    found = faults(examined(Unknown.config_class(**tiny_config("llama").to_dict()), mesh, NoRanks(), tmp_path))
    assert found.keys() == (set() if sent else {PUSHED, EXPORTED, DISK})
    assert sent or "does not have model.layers.0.mlp.scale and 1" in found[PUSHED]


def test_another_rotary_embedding_is_a_fault(monkeypatch: Any, mesh: Any, tmp_path: Path) -> None:
    """The learner rotates twice as fast."""
    real = loading.build

    def build(*given: Any) -> Any:
        model = real(*given)
        model.model.rotary_emb.register_forward_pre_hook(
            lambda _, args, kwargs: (args, kwargs | {"position_ids": 2 * kwargs["position_ids"]}), with_kwargs=True
        )
        return model

    monkeypatch.setattr(loading, "build", build)
    found = faults(examined(tiny_config("llama"), mesh, NoRanks(), tmp_path))
    assert "its LlamaAttention (layers.0.self_attn)" in found[PACKED] and ONE in found


class HalfGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] / 2


def test_a_wrong_gradient_is_a_fault_though_values_agree(monkeypatch: Any, mesh: Any, tmp_path: Path) -> None:
    real = loading.build

    def build(*given: Any) -> Any:
        model = real(*given)
        model.model.layers[1].mlp.register_forward_hook(lambda *call: HalfGradient.apply(call[-1]))
        return model

    monkeypatch.setattr(loading, "build", build)
    found = faults(examined(tiny_config("qwen3"), mesh, NoRanks(), tmp_path))
    assert found.keys() == {f"{what}, gradient" for what in (ONE, PACKED, LONG)} | {
        what for what in found if "prompt" in what and what.endswith("gradient")
    }
    assert re.fullmatch(
        r"its \w+ \(model.layers.[01].[\w.]+.weight\) has another gradient", found[f"{PACKED}, gradient"]
    )


class Halves(Pair):
    """Two ranks of which one forgets its part: right values, and half of the gradient."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair

    def ask(self, *given: Any) -> list[Answer]:
        first, second = self._pair.ask(*given)
        return [Answer(first.logprobs, {name: grad / 2 for name, grad in first.gradients.items()}), second]


@pytest.mark.parametrize("wrong", [False, True])
def test_two_ranks_are_compared(wrong: bool, mesh: Any, pair: Pair, tmp_path: Path) -> None:
    checks = examined(tiny_config("qwen2", tie_word_embeddings=True), mesh, Halves(pair) if wrong else pair, tmp_path)
    assert faults(checks).keys() == ({f"{RANKS}, gradient"} if wrong else set())
    assert checks[RANKS].verdict == "holds" and 0 < checks[f"{RANKS}, gradient"].figure < 1


@pytest.mark.parametrize("kind", ["qwen2", "gemma2"])
def test_rows_that_two_ranks_share_are_compared(kind: str, mesh: Any, pair: Pair, tmp_path: Path) -> None:
    """Windows, softcaps, one head of keys for both ranks, and prompts shared in both forms."""
    prompts = 0 if kind == "gemma2" else 4
    checks = examined(tiny_config(kind), mesh, pair, tmp_path, splits=True)
    split = {what: check for what, check in checks.items() if what.startswith("two ranks, one row: ")}
    assert faults(checks) == {} and len(split) == 2 * (1 + prompts)
    assert {check.verdict for check in split.values()} == {"holds"}
    (name,) = (what for what in split if what == f"two ranks, one row: {LONG}")
    assert 0 < split[name].figure < 1e-4


def test_a_rank_that_forgets_its_half_of_a_row_is_a_fault(mesh: Any, pair: Pair, tmp_path: Path) -> None:
    class Lost(Halves):
        def ask(self, model: Any, shares: Any, sharing: Any = None) -> list[Answer]:
            first, second = self._pair.ask(model, shares, sharing)
            if sharing:
                for part in second.logprobs:
                    part[len(part) // 2 :] = 0.0
                first.gradients["model.embed_tokens.weight"] /= 2
            return [first, second]

    found = faults(examined(tiny_config("qwen2"), mesh, Lost(pair), tmp_path, splits=True))
    assert found[f"two ranks, one row: {LONG}"] == "two ranks compute other log-probabilities than one"
    line = found[f"two ranks, one row: {LONG}, gradient"]
    assert line == "its Embedding (model.embed_tokens.weight) has another gradient"
    assert len(found) == 10 and all(what.startswith("two ranks, one row: ") for what in found)


def test_an_error_of_a_rank_is_a_fault_and_the_next_model_gets_others(mesh: Any, pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir(), (tmp_path / "b").mkdir()
    broken = Pair.ask

    class Broken(Halves):
        def ask(self, model: Any, shares: Any, sharing: Any = None) -> list[Answer]:
            return broken(self._pair, model.model_copy(update={"path": "nowhere"}), shares)

    found = faults(examined(tiny_config("qwen2"), mesh, Broken(pair), tmp_path / "a"))
    assert found.keys() == {RANKS} and "nowhere" in found[RANKS]
    assert faults(examined(tiny_config("qwen2"), mesh, pair, tmp_path / "b")) == {}


def transposed(weights: dict[str, torch.Tensor]) -> None:
    name = "model.layers.1.self_attn.o_proj.weight"
    weights[name] = weights[name].T.contiguous()


def swapped(weights: dict[str, torch.Tensor]) -> None:
    one, other = (f"model.layers.0.self_attn.{which}_proj.weight" for which in "kv")
    weights[one], weights[other] = weights[other], weights[one]


def renamed(weights: dict[str, torch.Tensor]) -> None:
    weights["model.last.weight"] = weights.pop("model.norm.weight")


def left_out(weights: dict[str, torch.Tensor]) -> None:
    del weights["model.layers.1.mlp.up_proj.weight"]


def stale(weights: dict[str, torch.Tensor]) -> None:
    weights["model.layers.1.mlp.up_proj.weight"] *= 1.01


PUSHES = {
    transposed: r"such as model.layers.1.self_attn.o_proj.weight of its Linear",
    swapped: r"such as model.layers.0.self_attn.k_proj.weight of its Linear",
    renamed: r"it does not have model.norm.weight",
    left_out: r"it does not have model.layers.1.mlp.up_proj.weight",
    stale: r"such as model.layers.1.mlp.up_proj.weight of its Linear",
}


@pytest.mark.parametrize("end", ["push", "export"])
@pytest.mark.parametrize("spoil", PUSHES, ids=lambda spoil: spoil.__name__)
def test_wrong_weights_are_a_fault(spoil: Any, end: str, monkeypatch: Any, mesh: Any, tmp_path: Path) -> None:
    module, name = (copies, "as_received") if end == "push" else (export, "collect")
    real = getattr(module, name)

    def spoilt(policy: Any) -> dict[str, torch.Tensor]:
        weights = real(policy)
        spoil(weights)
        return weights

    monkeypatch.setattr(module, name, spoilt)
    found = faults(copied(tiny_config("qwen3"), mesh, tmp_path))
    assert found.keys() == {PUSHED if end == "push" else EXPORTED, DISK}
    assert re.search(PUSHES[spoil], found[PUSHED if end == "push" else EXPORTED])


def test_weights_that_do_not_change_prove_nothing(monkeypatch: Any, mesh: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(copies, "CHANGE", 0.0)
    found = faults(copied(tiny_config("qwen3"), mesh, tmp_path))
    assert found.keys() == {PUSHED, EXPORTED} and "the change of its weights changes no" in found[PUSHED]


def features_in_reverse(monkeypatch: pytest.MonkeyPatch) -> None:
    real = vision.Sight.inputs

    def inputs(self: Any, tokens: torch.Tensor, images: Any) -> Any:
        return real(self, tokens, images and replace(images, take=images.take.flip(0)))

    monkeypatch.setattr(vision.Sight, "inputs", inputs)


def positions_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "rope_positions", lambda length, *_: np.tile(np.arange(length), (3, 1)))


def colours_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    real = towers._normalised
    monkeypatch.setattr(towers, "_normalised", lambda images, frames: real(images, frames) + 1)


def images_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (towers.GridTower, towers.PooledTower):

        def layout(self: Any, grid: torch.Tensor, real: Any = kind.layout) -> dict[str, Any]:
            found = real(self, grid)
            return found | {"cu_seqlens": found["cu_seqlens"][[0, -1]], "max_seqlen": int(found["cu_seqlens"][-1])}

        monkeypatch.setattr(kind, "layout", layout)


def images_are_causal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "_blocks", lambda placed: None)


def images_see_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pictures._blocks
    monkeypatch.setattr(pictures, "_blocks", lambda placed: real([each._replace(document=0) for each in placed]))


def images_see_no_document(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pictures._blocks
    monkeypatch.setattr(pictures, "_blocks", lambda placed: real([x._replace(document=x.start) for x in placed]))


OF_IMAGES = (features_in_reverse, positions_of_text, colours_not_normalised, images_see_each_other)
OF_BLOCKS = (images_are_causal, images_see_other_documents, images_see_no_document)
OF_GEMMA = (*OF_BLOCKS, features_in_reverse, colours_not_normalised, images_see_each_other)
"""Its positions are those of text."""


@pytest.mark.parametrize(
    ("kind", "mistake"),
    long_but(
        [
            (kind, mistake)
            for kind, mistakes in (
                ("qwen3_5", OF_IMAGES),
                ("qwen3_vl", OF_IMAGES),
                ("gemma3", OF_GEMMA),
            )
            for mistake in mistakes
        ],
        *(0, 1, 2, 3, 8, 9),
    ),
)
def test_images_that_are_computed_wrongly_are_a_fault(
    kind: str, mistake: Callable[[Any], None], mesh: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of text hold all the same."""
    config = AutoConfig.from_pretrained(seeing_model(tmp_path / "tiny", kind).path)
    mistake(monkeypatch)
    found = faults(examined(config, mesh, NoRanks(), tmp_path))
    assert {"images, packed = alone", "images, packed = alone, gradient", PUSHED} <= found.keys()
    assert all(what.startswith("images") or what in (PUSHED, EXPORTED) for what in found)
