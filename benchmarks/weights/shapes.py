"""What the benchmarks run on: shapes of models, which get weights of `known.py`, and the GPU layouts of
`benchmarks.weights`."""

import json
import string
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, PreTrainedTokenizerFast

from benchmarks.weights.family_shapes import FAMILIES, family_config, vocabulary_of
from benchmarks.weights.seeing import ARCHITECTURES, SEEING, SPECIAL_WORDS, config_of, processor_files

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-14B": {
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "8B": {
        "hidden_size": 4096, "intermediate_size": 12288, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 151936, "tie_word_embeddings": False,
    },
    "Qwen2.5-7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
    },
    "SmolLM2-135M": {
        "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
        "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True,
    },
    "toy": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 50000, "tie_word_embeddings": False,
    },
    "speck": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": False,
    },
}  # fmt: skip
EXPERTS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8,
    },
    "Qwen3-30B-A3B-8": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 8,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8,
    },
    "Qwen3-30B-A3B-4": {
        "hidden_size": 2048, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 4,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936,
        "num_experts": 128, "num_experts_per_tok": 8,
    },
    "tiny-experts": {
        "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "vocab_size": 512,
        "num_experts": 8, "num_experts_per_tok": 2, "initializer_range": 0.2,
    },
}  # fmt: skip
"""Mixtures of experts, which `known.py` does not silence. `Qwen3-30B-A3B-8` has 8 of the 48 layers of Qwen3-30B-A3B,
`-4` has 4."""
MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "norm_topk_prob": True,
    "tie_word_embeddings": False,
}  # fmt: skip
COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
"""No end token: sequences run to their full length."""
END = 2
"""The token that ends an answer where the weights give it a probability (`known.py`)."""
FIRST_LETTER, LETTERS = 3, string.ascii_lowercase
LINES = ["\n" * number for number in (1, 2, 3, 4)]
"""Tokens that vLLM looks for in Gemma 3's tokenizer."""
SQUARE_TOKENS = ("boi_token", "eoi_token", "image_token")
"""Names by which Gemma 3's processor asks the tokenizer for the first of SPECIAL_WORDS."""


@dataclass(frozen=True)
class WeightsCase:
    """A layout and its targets: `ranks` learner GPUs, then `servers` servers of `tensor_parallel` GPUs each."""

    shape: str
    ranks: int
    servers: int
    tensor_parallel: int
    interrupted_ms: float | None = None
    silence_ms: float | None = None
    lag_ms: float | None = None
    gb_per_s: float | None = None


CASES = {
    "a": WeightsCase("Qwen2.5-7B", 1, 1, 1, interrupted_ms=25, silence_ms=45, lag_ms=150, gb_per_s=300),
    "b": WeightsCase("Qwen2.5-1.5B", 1, 1, 1, interrupted_ms=20),
    "c": WeightsCase("Qwen2.5-7B", 2, 2, 1),
    "d": WeightsCase("Qwen2.5-7B", 2, 1, 2),
    "e": WeightsCase("Qwen2.5-7B", 2, 1, 1, lag_ms=100),
    "f": WeightsCase("Qwen2.5-7B", 3, 1, 1, lag_ms=90),
    "g": WeightsCase("Qwen2.5-7B", 1, 1, 2),
    "toy": WeightsCase("toy", 1, 1, 1),
    "toy2": WeightsCase("toy", 2, 1, 1),
    "toy3": WeightsCase("toy", 3, 1, 1),
}


def folder_of(shape: str, work: Path) -> Path:
    """A model folder without weights. Each letter is a token, each id a word of letters, and id END ends an answer."""
    folder = work / shape
    folder.mkdir(parents=True, exist_ok=True)
    if shape in SEEING:
        write_seeing(shape, folder)
    else:
        config = text_config(shape)
        write_tokenizer(folder, vocabulary_of(config))
        (folder / "config.json").write_text(json.dumps(config))
    return folder


def text_config(shape: str) -> dict[str, Any]:
    """`config.json` of a model without images."""
    if shape in FAMILIES:
        return family_config(shape)
    return COMMON | (MIXTURE | EXPERTS[shape] if shape in EXPERTS else SHAPES[shape])


def write_tokenizer(
    folder: Path, vocabulary: int, special: dict[int, str] | None = None, own: dict[str, str] | None = None
) -> None:
    """The tokenizer of `folder_of`, with words of its own at some ids. `own`: names by which a processor knows some."""
    words = [f"T{token}" for token in range(vocabulary)]
    words[END] = "<|endoftext|>"  # the name under which transformers' own Qwen2 tokenizer looks for it
    words[FIRST_LETTER : FIRST_LETTER + len(LETTERS)] = LETTERS
    for token, word in (special or {}).items():
        words[token] = word
    if own:
        words[-len(LINES) :] = LINES
    tokenizer = Tokenizer(BPE({word: token for token, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False, use_regex=False), ByteLevelDecoder()
    named: dict[str, Any] = {"eos_token": words[END], "pad_token": words[END]}
    named |= {"extra_special_tokens": list(special.values())} if special else {}
    named |= {"model_specific_special_tokens": own} if own else {}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named).save_pretrained(folder)


def write_seeing(shape: str, folder: Path) -> None:
    """The folder of a vision-language model."""
    kind, first = SEEING[shape]["model_type"], SEEING[shape]["first_special"]
    own = dict(zip(SQUARE_TOKENS, SPECIAL_WORDS, strict=False)) if "tokens" in SEEING[shape] else None
    write_tokenizer(folder, SEEING[shape]["text_config"]["vocab_size"], dict(enumerate(SPECIAL_WORDS, first)), own)
    config = AutoConfig.for_model(kind, **config_of(shape, END))
    config.architectures = [ARCHITECTURES[kind]]
    config.save_pretrained(folder)
    for name, content in processor_files(shape).items():
        (folder / name).write_text(json.dumps(content, indent=1))
