"""A server's trial of a mixture of experts that nobody has compared: which faults of a load it finds."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from configs.load import ConfigError
from rollout.engine.experts.reload_trial import LENGTHS, drawn_texts, try_reloads
from rollout.engine.experts.trial_weights import EVERY_KIND, TrialWeights, cannot_be_tried, kind_of
from rollout.errors import EngineDead

KINDS = ["layers.#.gate.weight", "layers.#.experts.#.up.weight", "layers.#.bias"]
LONGEST = 90


class LoadedEngine:
    """Log-probabilities are a function of the weights that were loaded; each `fault` is one that a load may have."""

    vocabulary, longest = 64, LONGEST

    def __init__(self, fault: str = "") -> None:
        self.fault, self.loads = fault, 0
        self.weights = dict.fromkeys(KINDS, -1.0)

    async def load_trial(self, changed: str, timeout_s: float) -> None:
        self.loads += 1
        for kind in KINDS:
            if kind != self.fault or self.loads == 1:
                self.weights[kind] = float(changed in (EVERY_KIND, kind))
        if self.fault == "dies" and self.loads > 1:
            raise EngineDead("vLLM's engine process died")
        if self.fault == "drifts":
            self.weights["drift"] = 0.01 * self.loads

    async def probe(self, tokens: list[int]) -> list[float]:
        value = sum(weight * (number + 1) for number, weight in enumerate(self.weights.values()))
        if self.fault == "not finite" and self.loads > 1:
            value = float("nan")
        return [-value] * (len(tokens) - 1)

    async def generate(self, prompt: list[int], max_tokens: int, temperature: float) -> Any:
        assert len(prompt) + max_tokens < LONGEST
        [value] = set(await self.probe([1, 2]))
        return SimpleNamespace(tokens=[1] * max_tokens, logprobs=[value + 3 * (self.fault == "decodes")] * max_tokens)


def test_loads_that_are_right_pass():
    engine = LoadedEngine()
    asyncio.run(try_reloads(engine, KINDS))
    assert engine.loads == len(KINDS) + 3


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        *((kind, f"a push that changes {kind} changes no log-probability; ") for kind in KINDS),
        ("decodes", "after a push, decoded tokens have other log-probabilities than the same tokens in a prompt; "),
        ("drifts", "the same weights, pushed again after others, give log-probabilities 0.2 nat off; "),
        ("dies", "it fails on random weights (vLLM's engine process died); "),
        ("not finite", "random weights give log-probabilities that are not finite; "),
    ],
)
def test_a_fault_is_refused_by_name(fault, words):
    with pytest.raises(ConfigError) as caught:
        asyncio.run(try_reloads(LoadedEngine(fault), KINDS))
    [problem] = caught.value.problems
    assert problem.startswith(f"model.path: this vLLM does not load policies into its experts: {words}use another")


def test_texts_have_room_for_what_is_decoded():
    assert [len(text) for text in drawn_texts(64, LONGEST)] == [73, 64, 23]
    assert [len(text) for text in drawn_texts(64, 4096)] == list(LENGTHS)
    assert all(0 <= token < 64 for text in drawn_texts(64, 4096) for token in text)


def model_config(folder, multimodal: bool = False, tied: bool = False) -> SimpleNamespace:
    text = SimpleNamespace(num_hidden_layers=2, tie_word_embeddings=tied)
    return SimpleNamespace(model=str(folder), dtype=torch.bfloat16, is_multimodal_model=multimodal, hf_text_config=text)


def test_weights_of_the_models_files_change_by_kind(tmp_path):
    """But those that vLLM does not read: a tied head, frequencies, and layers that predict further tokens."""
    names = ["model.layers.0.experts.0.up.weight", "model.layers.1.experts.0.up.weight", "model.layers.0.norm.weight"]
    unread = ["lm_head.weight", "model.layers.2.norm.weight", "mtp.norm.weight", "model.rotary_emb.inv_freq"]
    save_file({name: torch.zeros(4, 8) for name in names + unread}, tmp_path / "model.safetensors")
    weights = TrialWeights(model_config(tmp_path, tied=True), torch.device("cpu"))
    first, again = dict(weights.tensors("")), dict(weights.tensors(""))
    kinds = weights.kinds()
    assert set(first) == set(names) and kinds == sorted({kind_of(name) for name in names}) and len(kinds) == 2
    assert all(torch.equal(first[name], again[name]) and first[name].dtype == torch.bfloat16 for name in names)
    assert not torch.equal(first[names[0]], first[names[1]])
    for kind in kinds:
        changed = dict(weights.tensors(kind))
        assert [name for name in names if torch.equal(changed[name], first[name])] == [
            name for name in names if kind_of(name) != kind
        ]
    assert not any(torch.equal(tensor, first[name]) for name, tensor in weights.tensors(EVERY_KIND))


def test_weights_that_no_text_passes_are_loaded_and_not_tried(tmp_path):
    names = ["model.visual.patch.weight", "model.language_model.layers.0.norm.weight"]
    save_file({name: torch.zeros(4, 8) for name in names}, tmp_path / "model.safetensors")
    weights = TrialWeights(model_config(tmp_path, multimodal=True), torch.device("cpu"))
    assert weights.kinds() == ["model.language_model.layers.#.norm.weight"]
    assert {name for name, _ in weights.tensors("")} == set(names)


def test_a_model_without_files_cannot_be_tried(tmp_path):
    words = f"but {tmp_path} has no files of them; name a folder with the model's .safetensors files"
    assert cannot_be_tried(model_config(tmp_path)).endswith(words)
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    assert cannot_be_tried(model_config(tmp_path)) == ""
    (tmp_path / "model.safetensors").write_bytes(b"cut")
    assert "has no header of a safetensors file" in cannot_be_tried(model_config(tmp_path))
