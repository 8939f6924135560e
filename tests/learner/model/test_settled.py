"""The settings for a card that is not here are those that the learner decides on it."""

from pathlib import Path

import pytest

from configs.schema import AlgorithmConfig, BatchConfig, Config, WeightsConfig
from learner.model.memory import GIB, SHARE, budget_in, estimate, is_single
from learner.model.settled import roles, settle, settle_gather, settle_speed, shards_of
from learner.model.speed import fastest_first
from learner.starting import decide_speed
from tests.learner.model.test_memory import wide_model

BLOCKS = 12
"""Of `wide_model`."""


def config_of(folder: Path, **learner: object) -> Config:
    model = wide_model(folder)
    return Config.model_validate(
        {
            "model": model.model_dump(), "data": {"train": "d", "max_prompt_tokens": 64}, "run": {"versions": 1000},
            "reward": {"function": "math"}, "sampling": {"max_tokens": 192}, "learner": learner,
            "batch": {"groups": 512, "samples": 8},
        }
    )  # fmt: skip


def test_it_is_what_the_learner_decides(tmp_path: Path, mesh) -> None:
    config = config_of(tmp_path)
    ways = fastest_first(config.learner, True, 1000, BLOCKS)
    sizes = [int(estimate(config.model, way, 1, sends=True).total(8192) / SHARE) for way in ways]
    taken = set()
    for memory in [*(size + GIB // 64 for size in sizes), *(size - GIB // 64 for size in sizes)]:
        settled = settle_speed(config, memory, 0).learner
        assert settled == decide_speed(config, memory, mesh, 0).learner
        taken.add((settled.activation_checkpointing, settled.head_chunk_tokens))
    assert len(taken) > 1


def test_all_ranks_take_what_fits_rank_0(tmp_path: Path) -> None:
    config = config_of(tmp_path, ranks=4)
    rows = config.model_copy(update={"weights": WeightsConfig(publish="rows")})
    assert roles(rows) == [4, 4], "each has its share of the copies for the servers"
    fast = fastest_first(config.learner, True, 1000, BLOCKS)[0]
    memory = int(estimate(config.model, fast, 4, sends=True).total(8192) / SHARE) - GIB // 64
    assert estimate(config.model, fast, 4).fit(int(SHARE * memory)) > 8192  # the others have room
    settled = settle(config, memory)
    assert settled.learner.activation_checkpointing == 1, "of its blocks"
    assert settled.others and settled.others.tokens > settled.first.tokens
    assert settled.first.total > settled.others.estimate.total(settled.first.tokens)


def test_all_ranks_gather_as_one_that_needs_several_microbatches(tmp_path: Path) -> None:
    """The last rank has no copies for servers, so it has room for its part in one microbatch. Rank 0 has not."""
    config = config_of(tmp_path, ranks=2, compile=False, activation_checkpointing="block", head_chunk_tokens=1024)
    config = config.model_copy(update={"batch": BatchConfig(groups=16, samples=8)})
    config = config.model_copy(update={"weights": WeightsConfig(publish="gather")})

    def singles(memory: int) -> list[bool]:
        return [is_single(config, memory, 2, False, sends) for sends in roles(config)]

    memory = next(size for size in range(GIB // 8, 8 * GIB, GIB // 64) if singles(size) == [False, True])
    assert settle_gather(config, memory, 0).learner.gather != "pass"
    whole = next(size for size in range(memory, 8 * GIB, GIB // 64) if singles(size) == [True, True])
    assert settle_gather(config, whole, 0).learner.gather == "pass"
    assert settle(config, whole).first.tokens == settle(config, whole).others.tokens == 64 * 256


def test_a_critic_takes_its_room_here_as_it_does_there(tmp_path: Path, mesh) -> None:
    """Its bytes come off the microbatch, on each rank's share; both sides decide alike."""
    plain, taken = config_of(tmp_path), set()
    valued = plain.model_copy(update={"algorithm": AlgorithmConfig(advantage="gae")})
    held = estimate(plain.model, plain.learner, 1, critic=True).candidates[0].fixed["critic"]
    for config in (plain, valued):
        settled = settle(config, 4 * GIB)
        assert settle_speed(config, 4 * GIB, 0).learner == decide_speed(config, 4 * GIB, mesh, 0).learner
        assert settled.first.estimate.candidates[0].fixed.get("critic", 0) == (held if config is valued else 0)
        taken.add(settled.first.tokens)
    assert len(taken) == 2 and "critic" in settled.first.describe()


def test_a_budget_is_the_learner_s(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    settled = settle(config, 4 * GIB)
    decided = config.model_copy(update={"learner": settled.learner})
    assert settled.first.tokens == budget_in(decided, 4 * GIB, 1, False, True)[1]
    assert settled.others is None and roles(config) == [True]


@pytest.mark.parametrize(
    ("learner", "shards"), [({}, 1), ({"ranks": 8}, 8), ({"ranks": 8, "nodes": 2}, 4), ({"ranks": 8, "shard": 2}, 2)]
)
def test_ranks_that_share_a_copy(learner: dict[str, int], shards: int, tmp_path: Path) -> None:
    assert shards_of(config_of(tmp_path, **learner).learner) == shards
