"""Models of many families: each is computed as transformers computes it, or is refused by name before anything starts.

`reasons` tries the tiny configs below. An accepted one is saved, and packed rows of a whole `Policy` are compared with
transformers' own forward pass of each document.
"""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from configs.load import ConfigError
from configs.schema import LoraConfig, ModelConfig
from learner.model import loading
from learner.model.exactness import check_exact, reasons
from learner.model.microbatch import lay_out, one_document
from learner.model.shrink import small, stir
from tests.harness.world import policy_of

WINDOW = 16
COMMON: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
GDN = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
EXACT = {
    "qwen2": ("qwen2", {}),
    "qwen2 tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2 with windows": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 3},
    ),
    "qwen2 with yarn": ("qwen2", {"rope_parameters": YARN}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", MOE),
    "llama": ("llama", {}),
    "mistral with a window": ("mistral", {"sliding_window": WINDOW}),
    "gemma3_text": ("gemma3_text", {"query_pre_attn_scalar": 32, **SLIDING}),
    "granite without a scale": ("granite", {"embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "seed_oss, whose residual_dropout is switched off": ("seed_oss", {"residual_dropout": 0.3}),
    "starcoder2, whose embedding_dropout is switched off": ("starcoder2", {"embedding_dropout": 0.3}),
}
REFUSED = {
    "attention in chunks": (
        "llama4_text",
        {"layer_types": ["chunked_attention", "full_attention", "full_attention"]},
        "has layers of type chunked_attention",
    ),
    "a scale that the head ignores": ("glm4", {"logit_scale": 0.25}, "its head does more than"),
    "bounds that no block gets": ("gpt_neox_japanese", {}, "Layer is not given cu_seq_lens_q and max_length_q"),
    "blocks that share weights": (
        "zamba2",
        {
            **{"mamba_d_state": 16, "mamba_headdim": 32, "n_mamba_heads": 4, "num_mem_blocks": 1, "adapter_rank": 8},
            "layers_block_type": ["hybrid", "hybrid", "mamba"],
        },
        "Zamba2HybridLayer shares weights with another block",
    ),
    "a state that another sequence changes": (
        "minimax",
        {"num_local_experts": 4, "layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        "MiniMaxLightningAttention .* gives a token another output",
    ),
    "no decoder.layers": ("gpt2", {}, "has no decoder.layers"),
    "rope that follows the row": ("llama", {"rope_parameters": YARN | {"rope_type": "dynamic"}}, "of type dynamic"),
    "the same in transformers 4's words": ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
    "a part of a larger model": ("emu3", {}, "only its Emu3ForCausalLM would be trained"),
    "windows that vLLM gives to all layers": ("qwen2", {"use_sliding_window": True, **SLIDING}, "leaves 1 of 3 layers"),
    "a rotation that vLLM alone computes": ("llama", {"partial_rotary_factor": 0.5}, "by which vLLM computes"),
    "a window that vLLM alone computes": ("llama", {"sliding_window": WINDOW}, "vLLM goes by them; set sliding_window"),
    "a window in layers that vLLM computes without": (
        "phi3",
        {"sliding_window": WINDOW, "layer_types": SLIDING["layer_types"]},
        "vLLM goes by them; remove layer_types",
    ),
    "quantised": ("llama", {"quantization_config": {"quant_method": "fp8"}}, r"weights are quantised \(fp8\)"),
}


def config_of(kind: str, overrides: dict[str, Any]) -> Any:
    return AutoConfig.for_model(kind, **COMMON | overrides)


def worst_difference(config: Any, folder: Path, mesh: Any) -> float:
    """Return the largest error, in nats, of packed rows of a whole policy."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    stir(model)
    model.save_pretrained(folder)
    policy = policy_of(ModelConfig(path=str(folder), dtype="float32"), mesh)
    draw = np.random.default_rng(3)
    texts = [draw.integers(2, config.get_text_config().vocab_size, length) for length in (40, 7, 25, 33)]
    ones, zeros = ([np.full(len(x), number) for x in texts] for number in (1, 0))
    got = policy.score(policy.place(lay_out(texts, ones, zeros, zeros, range(len(texts)))), temperature=1.0)
    parts = []
    with torch.no_grad():
        for text in texts:
            ids = torch.as_tensor(text)[None]
            logp = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
            parts += [torch.zeros(1), logp[:-1].gather(-1, ids[0, 1:, None])[:, 0]]
    return float((got - torch.cat(parts)).abs().max())


@pytest.mark.parametrize("name", EXACT)
def test_an_accepted_model_is_exact(name: str, tmp_path: Path, mesh: Any) -> None:
    kind, overrides = EXACT[name]
    assert reasons(config_of(kind, overrides)) == []
    assert worst_difference(config_of(kind, overrides), tmp_path, mesh) < 1e-4


@pytest.mark.parametrize("name", REFUSED)
def test_an_inexact_model_is_refused_by_name(name: str) -> None:
    kind, overrides, words = REFUSED[name]
    (reason,) = reasons(config_of(kind, overrides))
    assert re.search(words, reason), reason


def test_windows_that_vllm_alone_cannot_give_are_trained_without_servers(tmp_path: Path, mesh: Any) -> None:
    config = config_of("qwen2", {"use_sliding_window": True, **SLIDING})
    assert reasons(config, served=False) == [] and worst_difference(config, tmp_path, mesh) < 1e-4


def test_a_large_model_is_tried_as_a_small_copy() -> None:
    """The shape of Qwen2.5-72B: a few narrow layers represent all, and heads keep their size."""
    config = AutoConfig.for_model("qwen2", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64)
    config.num_key_value_heads, config.intermediate_size = 8, 29568
    little = small(config)
    assert (little.num_hidden_layers, little.hidden_size, little.num_attention_heads) == (2, 512, 4)
    assert reasons(config) == [] and config.hidden_size == 8192


class Unknown(LlamaForCausalLM):
    """An unknown family: a llama with one changed part."""

    config_class = type("UnknownConfig", (LlamaConfig,), {"model_type": "unheard_of"})
    part: type[nn.Module]

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = self.part(layer.mlp)


class Looks(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.inner = mlp


class LooksBack(Looks):
    """A convolution over neighbouring tokens, which continues into the next document."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden + hidden.roll(1, dims=1).index_fill(1, torch.tensor([0]), 0.0))


class Drops(Looks):
    """Dropout that no key of the config switches off."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.inner(hidden), 0.1, self.training)


class DropsByModule(Looks):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.rest = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.rest(self.inner(hidden))


class HasExperts(Looks):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.experts = nn.ModuleList([mlp])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.experts[0](hidden)


class HasIdleWeight(Looks):
    """A weight that no token passes."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        self.rest = nn.Parameter(torch.zeros(3))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


class HasFrozenWeights(Looks):
    """A vector and a matrix that the model's own code never trains."""

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__(mlp)
        width = COMMON["hidden_size"]
        self.shift = nn.Parameter(torch.ones(1, width), requires_grad=False)
        self.mix = nn.Linear(width, width, bias=False).requires_grad_(False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + self.mix(hidden + self.shift)


AutoConfig.register("unheard_of", Unknown.config_class)
AutoModelForCausalLM.register(Unknown.config_class, Unknown)
PARTS = {
    LooksBack: r"its LooksBack \(layers\.0\.mlp\) gives .*: the log-probabilities of packed documents would be",
    Drops: r"its Drops \(layers\.0\.mlp\) gives a token another output",
    DropsByModule: r"its dropout cannot be switched off \(model\.layers\.0\.mlp\.rest\.p: 0\.1\)",
    HasIdleWeight: r"its weight model\.layers\.0\.mlp\.rest has no gradient",
    HasExperts: r"it has experts \(model\.layers\.0\.mlp\) that its config does not count",
}


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_an_unknown_family_is_refused_by_its_changed_part(part: type[nn.Module]) -> None:
    Unknown.part = part
    (reason,) = reasons(Unknown.config_class(**COMMON))
    assert re.search(PARTS[part], reason), reason


def test_weights_that_the_model_itself_freezes_stay_frozen(tmp_path: Path, mesh: Any) -> None:
    Unknown.part = HasFrozenWeights
    config = Unknown.config_class(**COMMON)
    assert reasons(config) == [] and worst_difference(config, tmp_path, mesh) < 1e-4
    policy = policy_of(ModelConfig(path=str(tmp_path), dtype="float32"), mesh)
    policy(one_document([2, 3, 4, 5]))[0].sum().backward()
    layers = [f"model.layers.{number}.mlp" for number in range(COMMON["num_hidden_layers"])]
    without = {name for name, parameter in policy.model.named_parameters() if parameter.grad is None}
    assert without == {f"{layer}.mix.weight" for layer in layers} == policy.frozen_names()
    published = {name for name, _ in policy.full_weights()}
    assert published >= without | {f"{layer}.shift" for layer in layers}


def test_the_refusal_names_folder_type_and_remedy(tmp_path: Path) -> None:
    config_of("glm4", {"logit_scale": 0.25}).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_exact(ModelConfig(path=str(tmp_path)), share=True)
    (line,) = error.value.problems
    assert line.startswith(f"model.path: {tmp_path} (glm4): it would be trained wrongly: its head does more")
    assert line.endswith("; take a model of a type that is trained exactly, such as qwen2, qwen3, llama or mistral")


def test_every_rate_of_dropout_is_switched_off() -> None:
    config = config_of("llama", {"attention_dropout": 0.2, "invented_drop_rate": 0.3, "router_jitter_noise": 0.1})
    config.vision_config = config_of("llama", {"attention_dropout": 0.4, "num_dropped": 7})
    loading.switch_off_dropout(config)
    nested = config.vision_config
    assert (config.attention_dropout, config.invented_drop_rate, nested.attention_dropout) == (0.0, 0.0, 0.0)
    assert config.router_jitter_noise == 0.0
    assert nested.num_dropped == 7


PARTS_ONLY = ("musicgen", "musicgen_melody")
"""Types whose config cannot be made without those of other models."""


@pytest.mark.long
@pytest.mark.parametrize("kind", sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - PARTS_ONLY))
def test_every_type_that_transformers_has_is_exact_or_refused(kind: str, tmp_path: Path, mesh: Any) -> None:
    """No type is trained wrongly, and no type causes a traceback. The activations are large: transformers' own float32
    is up to 4e-4 nat from its float64."""
    config = AutoConfig.for_model(kind)
    if not reasons(config):
        assert worst_difference(small(config), tmp_path, mesh) < 4e-4


@pytest.mark.parametrize(
    ("kind", "overrides", "words"),
    [
        ("lfm2", {"layer_types": ["conv", "conv", "full_attention"]}, r"keep a state \(Lfm2ShortConv\)"),
        ("gpt_neox", {"num_key_value_heads": 2}, r"files name otherwise \(lm_head.weight\)"),
        ("gpt_oss", {"num_local_experts": 4, **SLIDING}, "experts of a type beside which no server was seen"),
        ("granitemoe", {}, "experts of a type beside which no server was seen"),
    ],
)
def test_an_adapter_that_no_server_was_seen_to_take_is_refused(
    tmp_path: Path, kind: str, overrides: dict[str, Any], words: str
) -> None:
    config_of(kind, overrides).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=rf"^model.lora: .* \({kind}\) has .*{words}.*; set it to null$"):
        check_exact(ModelConfig(path=str(tmp_path), lora=LoraConfig(rank=2)), share=True)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_hidden_layers": 3, "layer_types": ["full_attention"]}, "`num_hidden_layers` (3) must be equal"),
        ({"hidden_size": 66}, "The hidden size (66) is not a multiple of the number of attention heads (4)"),
        ({"num_attention_heads": "4"}, "Field 'num_attention_heads' expected int, got str"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"rope_scaling": {"type": "linear"}}, "Missing required keys in `rope_parameters`"),
        ({"rope_scaling": "linear"}, "Field 'rope_parameters' with value 'linear'"),
        ({"quantization_config": "fp8"}, "AttributeError"),
        ({"model_type": ["llama"]}, "unhashable type"),
    ],
    ids=str,
)
def test_a_config_that_transformers_cannot_read_is_one_line(tmp_path: Path, wrong: dict, words: str) -> None:
    """As after shortening a model by hand: the exit code is 2, not a traceback and exit code 1."""
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"} | sizes | wrong))
    with pytest.raises(ConfigError) as refused:
        check_exact(ModelConfig(path=str(tmp_path)), True)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"model.path: {tmp_path}: config.json has a value that transformers refuses (")
    assert words in line and line.endswith("; correct it")
