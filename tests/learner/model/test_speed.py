"""`auto` takes the fastest choice that fits, the same on all ranks, and logs one line for each decision."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from configs.schema import LearnerConfig, ModelConfig
from learner.model import speed
from learner.model.memory import GIB, SHARE, RankRoom, estimate
from tests.harness import world
from tests.learner.model.test_memory import wide_model

AUTO = LearnerConfig()
BLOCKS = 12
"""Of `wide_model`."""


def decided(
    learner: LearnerConfig, on_gpu: bool = True, versions: int = 1000, blocks: int = 1
) -> list[tuple[object, str | int, object]]:
    ways = speed.fastest_first(learner, on_gpu, versions, blocks)
    return [(way.compile, way.activation_checkpointing, way.head_chunk_tokens) for way in ways]


def test_a_run_file_without_keys_for_speed_compiles_on_a_gpu_and_recomputes_only_if_needed() -> None:
    assert decided(AUTO) == [(True, "none", 4096), (True, "block", 4096), (True, "block", 1024)]
    assert decided(AUTO, on_gpu=False) == [(False, "block", 1024)]


def test_a_short_run_and_one_with_offload_are_not_compiled() -> None:
    eager = [*((False, way, 4096) for way in ("none", "selective", "block")), (False, "block", 1024)]
    assert decided(AUTO, versions=19) == eager and decided(AUTO, versions=20) != eager
    assert decided(AUTO.model_copy(update={"cpu_offload": True})) == eager
    assert decided(AUTO.model_copy(update={"matmul": "fp8"}), versions=1)[0] == (True, "none", 4096)


@pytest.mark.parametrize(
    ("written", "ways"),
    [
        (
            {"compile": False, "head_chunk_tokens": 4096},
            [(False, "none", 4096), (False, "selective", 4096), (False, "block", 4096)],
        ),
        ({"cpu_offload": "optimizer"}, [(True, "none", 4096), (True, "block", 4096), (True, "block", 1024)]),
        ({"compile": True, "cpu_offload": True}, [(True, "none", 4096), (True, "block", 4096), (True, "block", 1024)]),
        ({"activation_checkpointing": "selective"}, [(True, "selective", 4096), (True, "selective", 1024)]),
        ({"activation_checkpointing": 3}, [(True, 3, 4096), (True, 3, 1024)]),
        ({"head_chunk_tokens": 7}, [(True, "none", 7), (True, "block", 7)]),
    ],
)
def test_keys_of_the_run_file_are_kept(written: dict, ways: list) -> None:
    assert decided(LearnerConfig.model_validate(written)) == ways


def test_some_blocks_recompute_before_all_do() -> None:
    """Not beside `selective`, which takes less memory than few blocks and more than many."""
    assert [way for _, way, _ in decided(AUTO, blocks=5)] == ["none", 1, 2, 3, 4, "block", "block"]
    assert [way for _, way, _ in decided(AUTO, blocks=10)][-3:] == [8, "block", "block"]
    assert [way for _, way, _ in decided(AUTO, versions=1, blocks=4)] == ["none", "selective", "block", "block"]


def test_each_way_needs_less_memory_and_more_time_than_the_one_before(tmp_path: Path) -> None:
    model = wide_model(tmp_path)
    for written in ({"head_chunk_tokens": 4096}, {"head_chunk_tokens": 4096, "compile": False}):
        ways = speed.fastest_first(LearnerConfig.model_validate(written), True, 1000, BLOCKS)
        for faster, slower in pairwise(ways):
            assert speed.step_time(faster, BLOCKS) < speed.step_time(slower, BLOCKS)
        totals = [estimate(model, way, 1).total(4096) for way in ways]
        assert all(more > less for more, less in pairwise(totals))


def chosen(
    model: ModelConfig, learner: LearnerConfig, memory: int | None, tokens: int = 512, **options: bool
) -> str | int:
    ways = speed.fastest_first(learner, True, 1000, BLOCKS)
    return ways[speed.choose(model, ways, RankRoom(1, memory, tokens, **options))].activation_checkpointing


def test_the_first_way_whose_microbatches_fit_is_taken(tmp_path: Path) -> None:
    model = wide_model(tmp_path)
    ways = speed.fastest_first(AUTO, True, 1000, BLOCKS)

    def room(tokens: int, sends: bool = False, way: int = 0) -> int:
        return int(estimate(model, ways[way], 1, sends=sends).total(tokens) / SHARE) + 2

    assert chosen(model, AUTO, room(speed.ENOUGH_TOKENS)) == "none"
    assert chosen(model, AUTO, room(speed.ENOUGH_TOKENS - 256)) == 1
    assert [chosen(model, AUTO, room(speed.ENOUGH_TOKENS, way=n)) for n in (5, 9, 10)] == [5, 9, "block"]
    assert chosen(model, AUTO, room(speed.ENOUGH_TOKENS), tokens=speed.ENOUGH_TOKENS + 1) == 1
    assert chosen(model, AUTO, room(speed.ENOUGH_TOKENS), sends=True) in range(1, BLOCKS)
    assert chosen(model, AUTO, room(speed.ENOUGH_TOKENS, sends=True), sends=True) == "none"
    small = AUTO.model_copy(update={"tokens_per_microbatch": 512})
    assert chosen(model, small, room(512)) == "none" and chosen(model, small, room(256)) in range(1, BLOCKS)
    assert chosen(model, AUTO, 1) == "block"
    assert speed.choose(model, ways, RankRoom(1, None, 512)) == 0


def test_each_decision_is_a_line_with_its_reason(caplog) -> None:
    caplog.set_level("INFO")
    none, some, block, small = speed.fastest_first(AUTO, True, 1000, 2)
    speed.report(AUTO, none, True, 1000, 100, 2)
    assert [record.message for record in caplog.records] == [
        "learner.compile: auto takes true: a minute at the start, then about 1.3 times the tokens/s",
        "learner.activation_checkpointing: auto takes none: recomputes nothing; 8,192 tokens per microbatch fit",
        "learner.head_chunk_tokens: auto takes 4096",
    ]
    caplog.clear()
    speed.report(AUTO.model_copy(update={"tokens_per_microbatch": 900, "compile": True}), block, True, 1000, 900, 2)
    assert caplog.records[0].message == (
        "learner.activation_checkpointing: auto takes block: recomputes each block, a third more time; otherwise 900 "
        "tokens per microbatch do not fit"
    )
    caplog.clear()
    speed.report(AUTO, some, True, 1000, 100, 2)
    assert caplog.records[1].message == (
        "learner.activation_checkpointing: auto takes 1: recomputes 1 of 2 blocks, 17% more time; with fewer of them "
        "8,192 tokens do not fit"
    )
    caplog.clear()
    speed.report(AUTO, small, True, 1000, 100, 2)
    assert caplog.records[2].message == (
        "learner.head_chunk_tokens: auto takes 1024: with 4096 8,192 tokens per microbatch do not fit"
    )
    caplog.clear()
    speed.report(none, none, True, 1000, 100, 2)
    assert caplog.records == []


@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({}, None),
        ({"compile": True, "activation_checkpointing": "none"}, None),
        ({"activation_checkpointing": "selective"}, None),
        ({"activation_checkpointing": 1}, None),
        ({"activation_checkpointing": 2}, "learner.activation_checkpointing: 2 (auto: none) is kept"),
        ({"activation_checkpointing": 9}, "auto would be about 1.3 times faster"),
        ({"activation_checkpointing": "block"}, "learner.activation_checkpointing: block (auto: none) is kept"),
        ({"compile": False}, "learner.compile: false (auto: true) is kept; auto would be about 1.3 times faster"),
        ({"compile": False, "activation_checkpointing": "block"}, "auto would be about 1.7 times faster"),
    ],
)
def test_a_written_key_that_costs_a_fifth_is_named(written: dict, words: str | None, caplog) -> None:
    learner = LearnerConfig.model_validate(written)
    taken, best = (speed.fastest_first(each, True, 1000, 2)[0] for each in (learner, AUTO))
    speed.report_slower(learner, taken, best, 2)
    assert (caplog.text == "") if words is None else (words in caplog.text)


def test_a_small_gpu_gets_small_chunks_of_the_head(tmp_path: Path) -> None:
    """0.5B on a GPU of 16 GB: with chunks of 4096 not even one token fits, with 1024 all do."""
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14}
    Qwen2Config(vocab_size=151936, num_key_value_heads=2, tie_word_embeddings=True, **shape).save_pretrained(tmp_path)
    model, memory = ModelConfig(path=str(tmp_path)), int(14.7 * GIB)
    ways = speed.fastest_first(AUTO, True, 1000, 24)
    chosen = ways[speed.choose(model, ways, RankRoom(1, memory, 2048, sends=1))]
    assert (chosen.activation_checkpointing, chosen.head_chunk_tokens) == ("block", 1024)
    assert estimate(model, chosen, 1, sends=True).fit(int(SHARE * memory)) > speed.ENOUGH_TOKENS
    assert estimate(model, ways[-2], 1, sends=True).fit(int(SHARE * memory)) <= 0


@pytest.mark.xdist_group("ranks")
def test_ranks_with_different_gpus_decide_alike(tmp_path: Path) -> None:
    """All take what fits the fullest GPU, whichever rank has it, and what is written."""
    wide_model(tmp_path)
    large, small = 80 * GIB, 2 * GIB
    eager = {"compile": False}
    cases = [({}, [large, large]), ({}, [large, small]), ({}, [small, large]), (eager, [large, small])]
    written = {"activation_checkpointing": "selective", "head_chunk_tokens": 7}
    world.together("speeds", 2, tmp_path, cases=[*cases, (written, [small, large])])
    fast = (True, "none", 4096)
    assert torch.load(tmp_path / "speeds.pt") == [
        [fast] * 2,
        [(True, 3, 4096)] * 2,
        [(True, 4, 4096)] * 2,  # rank 0 holds the copies for the servers too
        [(False, "block", 4096)] * 2,
        [(True, "selective", 7)] * 2,
    ]
