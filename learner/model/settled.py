"""What `auto` takes on a card that need not be present, and what each GPU then holds.

Rank 0, which holds the copies for the servers, and the last rank are both computed; at the learner's start ranks agree
by a collective.
"""

from dataclasses import dataclass

from configs.critic import keeps_critic
from configs.publishing import copies_over
from configs.schema import Config, LearnerConfig
from learner.algorithms.losses import needs_reference
from learner.model.gather_choice import choose_gather, place_of
from learner.model.memory import (
    SHARE,
    Estimate,
    RankRoom,
    budget_in,
    is_single,
    least_microbatch,
    share_of_batch,
    sizes_of,
)
from learner.model.speed import choose, fastest_first


@dataclass(frozen=True)
class RankMemory:
    estimate: Estimate
    tokens: int
    least: int

    @property
    def total(self) -> int:
        return self.estimate.total(max(self.tokens, self.least))

    def describe(self) -> str:
        return self.estimate.describe(max(self.tokens, self.least))

    def fills(self, memory: int) -> bool:
        return self.total > SHARE * memory


@dataclass(frozen=True)
class Settled:
    """The learner with every `auto` decided, and its ranks."""

    learner: LearnerConfig
    first: RankMemory
    others: RankMemory | None


def settle(config: Config, memory: int, patches: int = 0) -> Settled:
    """Decide what is `auto` for GPUs with `memory` bytes. Raises ConfigError if a GPU is too small."""
    config = settle_gather(settle_speed(config, memory, patches), memory, patches)
    shards, reference, least = shards_of(config.learner), keeps_reference(config), least_microbatch(config, patches)
    single = all_single(config, memory, patches)
    first, *others = (
        RankMemory(*budget_in(config, memory, shards, reference, sends, patches, single), least)
        for sends in roles(config)
    )
    return Settled(config.learner, first, others[0] if others else None)


def settle_speed(config: Config, memory: int, patches: int) -> Config:
    """As the learner's `decide_speed`: all ranks take what fits the fullest."""
    ways = fastest_first(config.learner, True, config.run.versions, len(sizes_of(config.model).of_blocks))
    taken = max(choose(config.model, ways, room) for room in rooms(config, memory, patches))
    return config.model_copy(update={"learner": ways[taken]})


def settle_gather(config: Config, memory: int, patches: int) -> Config:
    """As the learner's `decide_gather`: what every rank has room for."""
    share, blocks = share_of_batch(config, patches), len(sizes_of(config.model).of_blocks)
    of_batch = share, all_single(config, memory, patches)
    own = [choose_gather(config.model, config.learner, room, *of_batch) for room in rooms(config, memory, patches)]
    return config.model_copy(update={"learner": min(own, key=lambda way: place_of(way.gather, blocks))})


def all_single(config: Config, memory: int, patches: int) -> bool:
    """Whether a batch is one microbatch on every rank."""
    sizes = memory, shards_of(config.learner), keeps_reference(config)
    return all(is_single(config, *sizes, sends, patches) for sends in roles(config))


def rooms(config: Config, memory: int, patches: int) -> list[RankRoom]:
    """Of rank 0 and the last rank."""
    sizes = shards_of(config.learner), memory, least_microbatch(config, patches), keeps_reference(config)
    return [RankRoom(*sizes, sends, keeps_critic(config)) for sends in roles(config)]


def roles(config: Config) -> list[int]:
    """`sends` of `memory.estimate` for rank 0 and the last rank."""
    shards = shards_of(config.learner)
    return [copies_over(config, shards, rank) for rank in sorted({0, config.learner.ranks - 1})]


def shards_of(learner: LearnerConfig) -> int:
    """Ranks that share one copy of the model."""
    return learner.shard or max(1, learner.ranks // learner.nodes)


def keeps_reference(config: Config) -> bool:
    """An adapter's own base is its reference."""
    return needs_reference(config.algorithm) and config.model.lora is None
