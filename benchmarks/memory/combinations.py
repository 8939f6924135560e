"""What `benchmarks.memory` trains: shapes of models, each combined with keys of the learner. Pure data."""

from dataclasses import dataclass, field
from typing import Any

from benchmarks.learner.cases import COMMON
from benchmarks.weights.family_shapes import FAMILIES, family_config, text_alone
from benchmarks.weights.shapes import EXPERTS, MIXTURE, text_config

Sections = dict[str, dict[str, Any]]
"""Keys of a run file, by section."""


def shape(hidden: int, inner: int, layers: int, heads: int, kv: int, tied: bool = True, **more: Any) -> dict[str, Any]:
    """`config.json` of a dense model with Qwen2.5's words."""
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_ = {"num_attention_heads": heads, "num_key_value_heads": kv}
    return COMMON | sizes | heads_ | {"vocab_size": 151936, "tie_word_embeddings": tied} | more


def of_type(kind: str, architecture: str, **more: Any) -> dict[str, Any]:
    """Keys of another family for `shape`."""
    return {"model_type": kind, "architectures": [architecture], "eos_token_id": None, "pad_token_id": None} | more


QWEN3 = of_type("qwen3", "Qwen3ForCausalLM", head_dim=128)
LLAMA = of_type("llama", "LlamaForCausalLM", vocab_size=128256)
GEMMA3 = of_type("gemma3_text", "Gemma3ForCausalLM", vocab_size=262144, head_dim=256, sliding_window=512,
                 query_pre_attn_scalar=256, hidden_activation="gelu_pytorch_tanh")  # fmt: skip
OLMO2 = of_type("olmo2", "Olmo2ForCausalLM", vocab_size=100352)
PHI3 = of_type("phi3", "Phi3ForCausalLM", vocab_size=200064)
MODELS = {
    "0.5B": shape(896, 4864, 24, 14, 2),
    "1.5B": shape(1536, 8960, 28, 12, 2),
    "3B": shape(2048, 11008, 36, 16, 2),
    "4B": shape(2560, 9728, 36, 32, 8, **QWEN3),
    "7B": shape(3584, 18944, 28, 28, 4, tied=False),
    "14B": shape(5120, 13824, 48, 40, 8, tied=False),
    "32B": shape(5120, 27648, 64, 40, 8, tied=False),
    "30B-A3B, 8 layers": COMMON | MIXTURE | EXPERTS["Qwen3-30B-A3B-8"],
    "Qwen3-0.6B": shape(1024, 3072, 28, 16, 8, **QWEN3),
    "Qwen3-1.7B": shape(2048, 6144, 28, 16, 8, **QWEN3),
    "Llama-3.2-1B": shape(2048, 8192, 16, 32, 8, **LLAMA),
    "Llama-3.2-3B": shape(3072, 8192, 28, 24, 8, **LLAMA),
    "Gemma-3-1B": shape(1152, 6912, 26, 4, 1, **GEMMA3),
    "OLMo-2-1B": shape(2048, 8192, 16, 16, 16, tied=False, **OLMO2),
    "Phi-4-mini, 16 layers": shape(3072, 8192, 16, 24, 8, **PHI3),
}


def model_of(name: str) -> dict[str, Any]:
    """`config.json` of a shape in MODELS, FAMILIES or `benchmarks/weights/shapes.py`."""
    if name in FAMILIES:
        return family_config(name)
    if name not in MODELS:
        return text_config(name)
    return MODELS[name] | {"max_position_embeddings": 65536, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Combination:
    """A shape, its longest answer in tokens, sections of its run file, and the ranks that share it."""

    model: str
    tokens: int
    sections: Sections = field(default_factory=dict)
    ranks: int = 1

    @property
    def name(self) -> str:
        more = "".join(f", {key} {value}" for keys in self.sections.values() for key, value in keys.items())
        return f"{self.model}, answers of {self.tokens:,}{more}" + (f", {self.ranks} ranks" * (self.ranks > 1))

    @property
    def given(self) -> Sections:
        """Its sections of a run file, with what the shape and the ranks add."""
        added: Sections = {"learner": {"ranks": self.ranks}, "model": {}}
        if text_alone(self.model):
            added["model"]["text_alone"] = True
        return {name: added.get(name, {}) | self.sections.get(name, {}) for name in added | self.sections}


ADAPTER: Sections = {"model": {"lora": {"rank": 32}}}
SHAPES = [
    *(Combination(model, tokens) for model in ("0.5B", "1.5B", "3B") for tokens in (1024, 8192, 32768)),
    *(Combination("4B", tokens) for tokens in (1024, 8192)),
    *(Combination("7B", tokens, ADAPTER) for tokens in (1024, 8192, 32768)),
    *(Combination("14B", tokens, ADAPTER) for tokens in (1024, 8192)),
    *(Combination("1.5B", 8192, {"learner": keys}) for keys in ({"compile": False}, {"gather": "batch"})),
    Combination("1.5B", 4096, {"algorithm": {"reference_kl": 0.01}}),
    Combination("30B-A3B, 8 layers", 4096),
]
"""Run files without keys for speed."""


def forced(model: str, way: str | int, compiled: bool = False, ranks: int = 1, lora: bool = False) -> Combination:
    """A combination in which `auto` decides the microbatch, and not what is kept."""
    learner = {"activation_checkpointing": way, "compile": compiled}
    return Combination(model, 2048, (ADAPTER if lora else {}) | {"learner": learner}, ranks)


COMBINATIONS = [
    forced("Qwen3-0.6B", "block"),
    forced("gpt-oss-20b-cut", "block"),
    forced("Llama-3.2-1B", "none"),
    forced("3B", "block", compiled=True),
    forced("Gemma-3-1B", "block"),
    forced("30B-A3B, 8 layers", "block"),
    forced("7B", "block", lora=True),
    forced("Qwen3-1.7B", "none", compiled=True),
    forced("1.5B", "block"),
    forced("DeepSeek-V3-cut", "block"),
    forced("OLMo-2-1B", "none"),
    forced("7B", "block", compiled=True, lora=True),
    forced("Llama-3.2-3B", "block"),
    forced("Nemotron-H-cut", "block"),
    forced("Phi-4-mini, 16 layers", "none"),
    forced("Gemma-3-1B", "none", compiled=True),
    forced("3B", "none", lora=True),
    forced("gpt-oss-20b-cut", "none"),
    forced("1.5B", "selective"),
    forced("Qwen3.5-2B", "block"),
    forced("30B-A3B, 8 layers", "none", compiled=True),
    forced("3B", "block", ranks=2),
    forced("4B", "block", compiled=True, ranks=2),
    forced("1.5B", "none", ranks=2),
    forced("1.5B", 14, compiled=True),
    forced("7B", 14, compiled=True, lora=True),
]
"""Shapes of many families with what is kept given, in an order in which every share of the list has some of each."""


def with_critic(model: str, way: str, ranks: int = 1) -> Combination:
    """A policy that is trained beside a critic."""
    forced_keys = forced(model, way).sections
    return Combination(model, 2048, forced_keys | {"algorithm": {"loss": "ppo", "advantage": "gae"}}, ranks)


CRITICS = [with_critic("Qwen3-0.6B", "none"), with_critic("1.5B", "block"), with_critic("3B", "block", ranks=2)]
SMALL = [
    forced("speck", "block"),
    forced("speck-gpt-oss", "none"),
    forced("speck", "none", ranks=2),
    with_critic("speck", "none"),
    with_critic("speck", "none", ranks=2),
]
"""For a CPU, which has no peak: they show that the command works."""
