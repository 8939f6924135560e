"""Decides `auto` keys that change the learner's speed, not its results; `memory.py` uses the rest of the memory."""

import logging
from collections.abc import Sequence

from configs.schema import LearnerConfig, ModelConfig
from learner.model.head import CHUNK_ON_CPU
from learner.model.memory import SHARE, estimate

log = logging.getLogger(__name__)
VERSIONS_WORTH_COMPILING = 20
"""Compiling takes a minute at the start."""
ENOUGH_TOKENS = 8192
"""So many tokens fill a GPU and hide the gathering of weights."""
HEAD_CHUNK_ON_GPU = 4096
STEP_TIME = {"none": 1.0, "selective": 1.1, "block": 4 / 3, "offload": 4 / 3}
"""`block` computes each forward pass twice; long rows hide copies to the host."""
EAGER_TIME = 1.3
"""A compiled step has 49 % MFU, another 37 % (benchmarks/LOG.md)."""
NOTABLE = 1.2
REASONS = {
    "none": "recomputes nothing; {tokens:,} tokens per microbatch fit",
    "selective": "recomputes norms and activation functions; with none {tokens:,} tokens per microbatch do not fit",
    "block": "recomputes each block, a third more time; with none {tokens:,} tokens per microbatch do not fit",
}


def fastest_first(learner: LearnerConfig, on_gpu: bool, versions: int) -> list[LearnerConfig]:
    """Settings, each with no more memory than the one before. Never empty."""
    worth = versions >= VERSIONS_WORTH_COMPILING or learner.matmul == "fp8"
    compiled = on_gpu and learner.cpu_offload is not True and worth
    if learner.compile != "auto":
        compiled = learner.compile
    ways: Sequence[str] = (
        ("block",) if not on_gpu else ("none", "block") if compiled else ("none", "selective", "block")
    )
    if learner.activation_checkpointing != "auto":
        ways = (learner.activation_checkpointing,)
    chunk = HEAD_CHUNK_ON_GPU if on_gpu else CHUNK_ON_CPU
    if learner.head_chunk_tokens != "auto":
        chunk = learner.head_chunk_tokens
    found = [(way, chunk) for way in ways]
    if on_gpu and learner.head_chunk_tokens == "auto":  # with 150,000 words it takes 2.6 GiB less
        found.append((ways[-1], CHUNK_ON_CPU))
    keys = ("activation_checkpointing", "head_chunk_tokens")
    return [learner.model_copy(update={"compile": compiled} | dict(zip(keys, way, strict=True))) for way in found]


def choose(
    model: ModelConfig,
    ways: Sequence[LearnerConfig],
    shards: int,
    memory: int | None,
    tokens: int,
    reference: bool = False,
    sends: int = 0,
    critic: bool = False,
) -> int:
    """Index of the first of `ways` that fits `memory` bytes of a rank (None: on CPU), else the last."""
    if memory is None:
        return 0
    for index, way in enumerate(ways[:-1]):
        expected = estimate(model, way, shards, reference, sends, critic)
        if expected.fit(int(SHARE * memory)) >= wanted_tokens(way, tokens):
            return index
    return len(ways) - 1


def wanted_tokens(learner: LearnerConfig, tokens: int) -> int:
    enough = ENOUGH_TOKENS * learner.context_parallel
    return max(tokens, enough) if learner.tokens_per_microbatch == "auto" else tokens


def report(written: LearnerConfig, chosen: LearnerConfig, on_gpu: bool, versions: int, tokens: int) -> None:
    if written.compile == "auto":
        why = _why_compiled(written, chosen, on_gpu, versions)
        log.info("learner.compile: auto takes %s: %s", str(chosen.compile).lower(), why)
    if written.activation_checkpointing == "auto":
        taken = chosen.activation_checkpointing
        why = REASONS[taken].format(tokens=wanted_tokens(written, tokens)) if on_gpu else "the least memory, on CPU"
        log.info("learner.activation_checkpointing: auto takes %s: %s", taken, why)
    if written.head_chunk_tokens == "auto":
        small = on_gpu and chosen.head_chunk_tokens == CHUNK_ON_CPU
        why = f": with {HEAD_CHUNK_ON_GPU} {wanted_tokens(written, tokens):,} tokens per microbatch do not fit"
        log.info("learner.head_chunk_tokens: auto takes %d%s", chosen.head_chunk_tokens, why if small else "")


def _why_compiled(written: LearnerConfig, chosen: LearnerConfig, on_gpu: bool, versions: int) -> str:
    if chosen.compile and chosen.matmul == "fp8":
        return "a minute at the start; casts to FP8 are fused with what comes before them"
    if chosen.compile:
        return f"a minute at the start, then about {EAGER_TIME:g} times the tokens/s"
    if not on_gpu:
        return "it is for GPUs"
    if written.cpu_offload is True:
        return "compiling is not tested with learner.cpu_offload: true"
    return f"{versions} versions are too few for its minute at the start"


def report_slower(written: LearnerConfig, chosen: LearnerConfig, automatic: LearnerConfig) -> None:
    """Warn of keys that make a step `NOTABLE` times slower."""
    gain = step_time(chosen) / step_time(automatic)
    keys = [
        f"learner.{key}: {str(getattr(written, key)).lower()} (auto: {str(getattr(automatic, key)).lower()})"
        for key in ("compile", "activation_checkpointing")
        if getattr(written, key) not in ("auto", getattr(automatic, key))
    ]
    if gain >= NOTABLE and keys:
        log.warning("%s is kept; auto would be about %.1f times faster", " and ".join(keys), gain)


def step_time(learner: LearnerConfig) -> float:
    """Relative to a compiled step that recomputes nothing."""
    return STEP_TIME[learner.activation_checkpointing] * (1.0 if learner.compile else EAGER_TIME)
