"""Decides `learner.gather: auto`: how many weights stay gathered for a batch, of what memory leaves."""

import logging
from bisect import bisect_left
from functools import lru_cache

from configs.schema import LearnerConfig, ModelConfig
from learner.model.memory import ENOUGH_TOKENS, GIB, SHARE, Estimate, RankRoom, sizes_of

log = logging.getLogger(__name__)
GATHERED_SHARE = 0.1
"""`gather: auto` takes at most this share of GPU memory. Where microbatches fill the GPU it takes so much of them, or
twice as much if that leaves ENOUGH_TOKENS."""
MORE_MICROBATCHES = 1.25
"""A batch may get so many times as many microbatches."""
WORTH = 0.5
"""Share of gathering in the time of a microbatch's exchanges with `pass`; the rest is for gradients. Of 7B on two H200s
.42 of the exchanges' kernels gather (`python -m benchmarks.idle --gather 0,16`); casts and copies come with them."""


def choose_gather(
    model: ModelConfig,
    learner: LearnerConfig,
    room: RankRoom,
    share: int | None = None,
    single: bool = False,
) -> LearnerConfig:
    """Decide `gather: auto`. `share`: of `share_of_batch`. `single`: a batch is one microbatch on all ranks
    (`is_single`)."""
    if learner.gather != "auto":
        return learner
    memory, tokens = room.memory, room.tokens
    blocks = len(sizes_of(model).of_blocks)
    ways = [learner.model_copy(update={"gather": gather}) for gather in gathers(blocks)]

    @lru_cache
    def of(way: int) -> Estimate:
        return room.estimate(model, ways[way])

    def too_much(way: int) -> bool:
        return way > 0 and memory is not None and not _costs_little(of(0), of(way), learner, memory, tokens, share)

    once = single and learner.tokens_per_microbatch == "auto"  # what stays gathered would be for nothing
    never = learner.cpu_offload is True or once
    taken = 0 if never else bisect_left(range(len(ways)), True, key=too_much) - 1
    if memory is not None and learner.tokens_per_microbatch == "auto" and 1 < taken < len(ways) - 1:
        full, left = (of(way).fit(int(SHARE * memory)) for way in (0, taken))
        if 1 - left / full > WORTH * (taken - 1) / blocks:  # more microbatches would cost what few blocks save
            taken = 1
    what = {0: "gathers in each pass", len(ways) - 1: "gathers once a batch"}
    some = f"of {blocks} blocks {taken - 1} stay gathered for a batch, and all outside of them"
    chosen, cost = ways[taken].gather, (of(taken).total(tokens) - of(0).total(tokens)) / GIB
    log.info("learner.gather: auto takes %s: %s, for %.1f GiB more than pass", chosen, what.get(taken, some), cost)
    return ways[taken]


def _costs_little(
    least: Estimate, other: Estimate, learner: LearnerConfig, memory: int, tokens: int, share: int | None
) -> bool:
    """Whether `other` leaves nearly as large microbatches as `least`, the estimate of `gather: pass`."""
    room = int(SHARE * memory)
    if learner.tokens_per_microbatch != "auto":
        more = other.total(tokens) - least.total(tokens)
        return more <= GATHERED_SHARE * memory and other.total(tokens) <= room
    full, left = least.fit(room), other.fit(room)
    enough = min(ENOUGH_TOKENS * learner.context_parallel, (1 - GATHERED_SHARE) * full)
    if left < max(1, tokens, enough, (1 - 2 * GATHERED_SHARE) * full):
        return False
    return share is None or -(-share // left) <= MORE_MICROBATCHES * -(-share // max(full, left))


def gathers(blocks: int) -> list[str | int]:
    """Values of `learner.gather` for a model of so many blocks, the least memory first."""
    return ["pass", *range(blocks + 1), "batch"]


def place_of(gather: str | int, blocks: int) -> int:
    """The index in `gathers` of a value, which may be a number above `blocks`."""
    return gathers(blocks).index(min(gather, blocks) if isinstance(gather, int) else gather)
