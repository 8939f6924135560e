"""What the learner's benchmark runs: cases, model shapes, and batches like those of rollout servers.

Imported by `benchmarks.learner` and the files of its cases; waits for nothing.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.weights.shapes import EXPERTS, text_config
from buffer.wire.batches import parts
from buffer.wire.message import Array
from buffer.wire.protocol import Part
from buffer.wire.sample import Sample, sample_stats

LONGEST, MEDIAN, SIGMA, PROMPT = 8192, 1000, 0.8, 200
COMMON = {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768,
          "num_hidden_layers": 28, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu"}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "1.5b": COMMON | {"hidden_size": 1536, "intermediate_size": 8960, "num_attention_heads": 12,
                      "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    "7b": COMMON | {"hidden_size": 3584, "intermediate_size": 18944, "num_attention_heads": 28,
                    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False},
    "tiny": COMMON | {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
                      "num_key_value_heads": 1, "vocab_size": 512, "tie_word_embeddings": True},
    **{shape: text_config(shape) for shape in EXPERTS},
}  # fmt: skip


@dataclass
class Case:
    """One row of the table: what runs, and on how many GPUs."""

    kind: str
    model: str = "1.5b"
    gpus: int = 1
    samples: int = 512
    steps: int = 2
    learner: dict[str, Any] = field(default_factory=dict)
    algorithm: dict[str, Any] = field(default_factory=dict)
    lora: dict[str, Any] | None = None
    layers: int = 28
    profile: bool = False
    path: str | None = None
    """Folder of a real model, for `rounding`; None: random weights of `model`."""


CASES = {
    "ours-1.5b": Case("ours"),
    "ours-1.5b-pass": Case("ours", learner={"gather": "pass"}),
    "naive-1.5b": Case("naive", samples=64, steps=1),
    "ours-7b-2": Case("ours", "7b", 2),
    "ours-7b-4": Case("ours", "7b", 4),
    "ours-7b-lora": Case("ours", "7b", lora={"rank": 32}),
    "naive-7b-4": Case("naive", "7b", 4, samples=128, steps=1),
    "head": Case("head"),
}


def sample_of(draw: np.random.Generator, length: int, prompt: int, vocabulary: int) -> Sample:
    """A sample of `length` random tokens, the first `prompt` of them its prompt. Its log-probabilities are those of
    a uniform policy."""
    sampled = np.arange(length) >= prompt
    return Sample(
        tokens=Array.of(draw.integers(0, vocabulary, length).astype(np.int32)),
        sampled=Array.of(sampled.astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(sampled, -np.log(vocabulary), 0).astype(np.float32)),
        versions=Array.of(np.where(sampled, 0, -1).astype(np.int32)),
        reward=float(draw.integers(2)),
        finish="stop",
    )


def documents(samples: int, seed: int, vocabulary: int) -> list[Sample]:
    """Samples like those of rollout servers: random tokens, log-normal lengths."""
    draw = np.random.default_rng(seed)
    lengths = np.exp(draw.normal(np.log(MEDIAN), SIGMA, samples)).clip(16, LONGEST).astype(int)
    return [sample_of(draw, length, min(PROMPT, length // 2), vocabulary) for length in lengths]


def part_of(made: list[Sample], version: int, rank: int, world: int) -> Part:
    """The rank's part of a batch in groups of 8, split as the buffer splits it."""
    packed = [sample.pack() for sample in made]
    groups = [
        (item, 0, [(data, sample_stats(data)) for data in packed[start : start + 8]])
        for item, start in enumerate(range(0, len(packed), 8))
    ]
    return parts(version, world, groups)[rank]
