"""Episodes as text: a byte tokenizer with ChatML's marks, and samples from stretches of text."""

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from buffer.wire.message import Array
from buffer.wire.sample import Sample

SPECIAL = ["<|im_start|>", "<|im_end|>"]


def make_tokenizer(special: list[str]) -> Tokenizer:
    """A token per byte and per special text."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    return made


CHATML = make_tokenizer(SPECIAL)


def episode(
    *segments: list[tuple[str, int]], tokenizer: Tokenizer = CHATML, rewards: list[float] | None = None
) -> Sample:
    """An episode of stretches of text, each given (0) or sampled under a version."""
    pieces = [(tokenizer.encode(text).ids, version) for segment in segments for text, version in segment]
    tokens = [token for ids, _ in pieces for token in ids]
    versions = np.array([version or -1 for ids, version in pieces for _ in ids])
    lengths = [sum(len(tokenizer.encode(text).ids) for text, _ in segment) for segment in segments]
    return Sample(
        tokens=Array.of(np.array(tokens, np.int32)),
        sampled=Array.of((versions > 0).astype(np.uint8)),
        behaviour_logprobs=Array.of(np.where(versions > 0, -0.25, 0).astype(np.float32)),
        versions=Array.of(versions.astype(np.int32)),
        reward=sum(rewards or [1.0]),
        finish="stop",
        starts=np.cumsum([0, *lengths[:-1]]).tolist(),
        turn_rewards=rewards or [],
    )


HEAD = (
    "<|im_start|>system\nYou are terse.<|im_end|>\n<|im_start|>user\nWhat is 17*23?<|im_end|>\n<|im_start|>assistant\n"
)
CALLS = '<think>\nhm\n</think>\n<tool_call>\n{"name": "multiply", "arguments": {"a": 17}}\n</tool_call><|im_end|>'
TOOL = "\n<|im_start|>tool\n391<|im_end|>\n<|im_start|>assistant\n"
ANSWER = "It is 391.<|im_end|>"
