"""What `benchmarks.weights` and `benchmarks.weights_pause` run on: model shapes, which get random weights, and GPU
layouts."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen2.5-7B": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
    },
    "Qwen2.5-1.5B": {
        "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
        "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
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
COMMON = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "rms_norm_eps": 1e-6,
    "rope_theta": 1e6, "max_position_embeddings": 32768, "torch_dtype": "bfloat16", "initializer_range": 0.02,
    "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
"""No end token: sequences run to their full length."""


@dataclass(frozen=True)
class WeightsCase:
    """A layout and its targets: `ranks` learner GPUs, then `servers` servers of `tensor_parallel` GPUs each."""

    shape: str
    ranks: int
    servers: int
    tensor_parallel: int
    pause_ms: float | None = None
    lag_ms: float | None = None
    gb_per_s: float | None = None


CASES = {
    "a": WeightsCase("Qwen2.5-7B", 1, 1, 1, pause_ms=120, lag_ms=350, gb_per_s=300),
    "b": WeightsCase("Qwen2.5-1.5B", 1, 1, 1, pause_ms=90),
    "c": WeightsCase("Qwen2.5-7B", 2, 2, 1),
    "d": WeightsCase("Qwen2.5-7B", 2, 1, 2),
    "toy": WeightsCase("toy", 1, 1, 1),
}


def folder_of(shape: str, work: Path) -> Path:
    """A model folder without weights, and with a tokenizer of one word: the benchmarks use token ids only."""
    folder = work / shape
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(WordLevel({"word": 0}, unk_token="word"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="word").save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(COMMON | SHAPES[shape]))
    return folder
