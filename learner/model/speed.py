"""Decides `auto` keys that change the learner's speed, not its results; `memory.py` uses the rest of the memory."""

import logging
from collections.abc import Sequence

from configs.schema import LearnerConfig, ModelConfig
from learner.model.head import CHUNK_ON_CPU
from learner.model.memory import ENOUGH_TOKENS, SHARE, RankRoom

log = logging.getLogger(__name__)
VERSIONS_WORTH_COMPILING = 20
"""Compiling takes a minute at the start."""
HEAD_CHUNK_ON_GPU = 4096
STEP_TIME = {"none": 1.0, "selective": 1.1, "block": 4 / 3, "offload": 4 / 3}
"""`block` computes each forward pass twice; long rows hide copies to the host."""
MOST_BLOCKS = 0.8
"""`auto` recomputes at most this share of the blocks by their number. More would be at most 5 % faster than `block`,
which leaves room for larger microbatches."""
EAGER_TIME = 1.3
"""A compiled step has 49 % MFU, another 37 % (benchmarks/LOG.md)."""
NOTABLE = 1.2
REASONS = {
    "none": "recomputes nothing; {tokens:,} tokens per microbatch fit",
    "selective": "recomputes norms and activation functions; with none {tokens:,} tokens per microbatch do not fit",
    "block": "recomputes each block, a third more time; otherwise {tokens:,} tokens per microbatch do not fit",
}
SOME = "recomputes {way} of {blocks} blocks, {price:.0%} more time; with fewer of them {tokens:,} tokens do not fit"


def fastest_first(learner: LearnerConfig, on_gpu: bool, versions: int, blocks: int) -> list[LearnerConfig]:
    """Settings, each with more time than the one before, and no more memory but for a block's input: ranks agree on
    the last that one of them needs. `blocks`: of the model. Never empty."""
    worth = versions >= VERSIONS_WORTH_COMPILING or learner.matmul == "fp8"
    compiled = on_gpu and learner.cpu_offload is not True and worth
    if learner.compile != "auto":
        compiled = learner.compile
    ways: Sequence[str | int] = ("block",)
    if on_gpu:
        some = range(1, int(MOST_BLOCKS * blocks) + 1)
        ways = ("none", *(some if compiled else ("selective",)), "block")
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


def choose(model: ModelConfig, ways: Sequence[LearnerConfig], room: RankRoom) -> int:
    """Index of the first of `ways` that fits a rank, else the last; on CPU the first."""
    if room.memory is None:
        return 0
    for index, way in enumerate(ways[:-1]):
        if room.estimate(model, way).fit(int(SHARE * room.memory)) >= wanted_tokens(way, room.tokens):
            return index
    return len(ways) - 1


def wanted_tokens(learner: LearnerConfig, tokens: int) -> int:
    enough = ENOUGH_TOKENS * learner.context_parallel
    return max(tokens, enough) if learner.tokens_per_microbatch == "auto" else tokens


def report(
    written: LearnerConfig, chosen: LearnerConfig, on_gpu: bool, versions: int, tokens: int, blocks: int
) -> None:
    if written.compile == "auto":
        why = _why_compiled(written, chosen, on_gpu, versions)
        log.info("learner.compile: auto takes %s: %s", str(chosen.compile).lower(), why)
    if written.activation_checkpointing == "auto":
        taken = chosen.activation_checkpointing
        price = recomputing_time(taken, blocks) - 1
        known = {"tokens": wanted_tokens(written, tokens), "way": taken, "blocks": blocks, "price": price}
        text = SOME if isinstance(taken, int) else REASONS[taken]
        why = text.format(**known) if on_gpu else "the least memory, on CPU"
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


def report_slower(written: LearnerConfig, chosen: LearnerConfig, automatic: LearnerConfig, blocks: int) -> None:
    """Warn of keys that make a step `NOTABLE` times slower."""
    gain = step_time(chosen, blocks) / step_time(automatic, blocks)
    keys = [
        f"learner.{key}: {str(getattr(written, key)).lower()} (auto: {str(getattr(automatic, key)).lower()})"
        for key in ("compile", "activation_checkpointing")
        if getattr(written, key) not in ("auto", getattr(automatic, key))
    ]
    if gain >= NOTABLE and keys:
        log.warning("%s is kept; auto would be about %.1f times faster", " and ".join(keys), gain)


def step_time(learner: LearnerConfig, blocks: int) -> float:
    """Relative to a compiled step that recomputes nothing. `blocks`: of the model."""
    return recomputing_time(learner.activation_checkpointing, blocks) * (1.0 if learner.compile else EAGER_TIME)


def recomputing_time(way: str | int, blocks: int) -> float:
    """Time of a step with this `learner.activation_checkpointing`, relative to one that recomputes nothing."""
    if isinstance(way, str):
        return STEP_TIME[way]
    return 1 + (STEP_TIME["block"] - 1) * min(way, blocks) / blocks
