"""Ranks that share each row train as one rank does: log-probabilities, gradients, metrics.

Beside each comparison stands its control, one rank that packs the same batch into other rows.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.harness import shared_rows, world
from tests.harness.shared_rows import Case, Found, largest_difference

TOLERANCE = 2e-5
CASES: dict[str, Case] = {
    "whole samples": {"model": "qwen3", "algorithm": {"loss": "gspo"}, "budget": 97},
    "one key head": {
        "model": "one_key_head", "algorithm": {"loss": "ppo", "entropy_bonus": 0.01}, "budget": 61,
        "learner": {"activation_checkpointing": "selective"},
    },
    "joined prompts": {"model": "qwen3", "batch": "groups", "budget": 161, "copied": 0.0},
    "copied prompts": {
        "model": "qwen3", "batch": "groups", "budget": 161, "copied": float("inf"), "algorithm": {"loss": "m2po"},
    },
    "episodes": {
        "model": "qwen3", "batch": "episodes", "budget": 81, "algorithm": {"loss": "gspo", "turn_discount": 0.9},
    },
    "window": {"model": "window", "budget": 97, "learner": {"gather": "batch"}},
    "softcap": {"model": "softcap", "budget": 97, "learner": {"activation_checkpointing": "none"}},
    "sinks": {"model": "sinks", "budget": 97},
    "experts": {"model": "experts", "budget": 97, "replay": True},
    "latent": {"model": "latent", "budget": 97},
    "adapter": {"model": "qwen3", "budget": 97, "lora": True},
}  # fmt: skip
FAST = ("one key head", "copied prompts", "episodes", "sinks")
"""The others are in the long lane, on four ranks."""
OTHER_ROWS = 60
"""Tokens that a row of the control has more: half as many rows, or fewer."""
OF_ROWS = ("microbatches", "tokens_microbatch_max", "tokens_computed", "flops", "flops_saved")
"""Metrics that depend on how samples are packed."""
Alone = Callable[[str], list[Found]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shared_rows.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> Callable[[str], list[Found]]:
    """A case by one rank: as it is, and with rows of another length."""

    @cache
    def computed(name: str) -> list[Found]:
        case = CASES[name]
        with world.alone():
            return shared_rows.compute(folder, [case, case | {"budget": case["budget"] + OTHER_ROWS}], 1)

    return computed


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Found]]:
    """Each of the cases FAST by two ranks that share every row, as each of them finds it."""
    world.together("share_rows", 2, folder, cases=[CASES[name] for name in FAST], size=2)
    return [dict(zip(FAST, torch.load(folder / f"shared_rows-{rank}.pt"), strict=True)) for rank in range(2)]


def check(ours: Found, theirs: Found, control: Found) -> None:
    for found in (ours, control):
        difference, name = largest_difference(found["gradients"], theirs["gradients"])
        assert difference < TOLERANCE, name
    for what in ("logprobs", "probe"):
        assert ours[what].shape == theirs[what].shape
        torch.testing.assert_close(ours[what], theirs[what], rtol=0, atol=TOLERANCE)
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    for name, value in theirs["metrics"].items():
        assert ours["metrics"][name] == pytest.approx(value, rel=1e-4, abs=TOLERANCE, nan_ok=True), name


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", FAST)
def test_two_ranks_that_share_rows_train_as_one(name: str, alone: Alone, two: list) -> None:
    theirs, control = alone(name)
    for found in two:
        check(found[name], theirs, control)
    assert two[0][name]["crossed"] > 0, "no document lies on both ranks"


@pytest.mark.xdist_group("ranks")
def test_ranks_with_other_samples_are_refused(two: list, folder: Path) -> None:
    line = "the 2 ranks that share rows (learner.context_parallel) have other samples each"
    assert [(folder / f"refused-{rank}.txt").read_text() for rank in range(2)] == [line] * 2


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_two_groups_of_two_ranks_and_one_of_four_train_as_one(folder: Path, alone: Alone) -> None:
    """Each pair gets half of the samples, or all four share every row, with up to four ranks to a head of keys. Each
    of the pairs has a copy of the model too."""
    for size, shards in ((2, 4), (2, 2), (4, 4)):
        world.together("share_rows", 4, folder, cases=list(CASES.values()), size=size, shards=shards)
        for rank in range(4):
            found = torch.load(folder / f"shared_rows-{rank}.pt")
            for ours, name in zip(found, CASES, strict=True):
                theirs, control = alone(name)
                if size == 2:  # a pair has rows of its own half
                    metrics = {**ours["metrics"], **{key: theirs["metrics"][key] for key in OF_ROWS}}
                    ours = {**ours, "logprobs": theirs["logprobs"], "metrics": metrics}
                check(ours, theirs, control)


@pytest.mark.long
@pytest.mark.xdist_group("ranks")
def test_compiled_blocks_are_one_graph(folder: Path, alone: Alone) -> None:
    """With the exchange in it, recomputed and not. Inductor takes most of the time and compiles one case: what makes
    one graph of a block and differentiates it comes before inductor."""
    names = ("whole samples", "one key head", "joined prompts")
    ways = (("none", "aot_eager"), ("block", "inductor"), ("none", "aot_eager"))
    cases = [
        CASES[name] | {"learner": {"compile": True, "activation_checkpointing": saved}, "backend": backend}
        for name, (saved, backend) in zip(names, ways, strict=True)
    ]
    world.together("share_rows", 2, folder, cases=cases, size=2)
    for rank in range(2):
        for name, found in zip(names, torch.load(folder / f"shared_rows-{rank}.pt"), strict=True):
            check(found, *alone(name))
            assert all("aten.nonzero" in why for why in found["graph breaks"]), "sdpa's selection of real tokens alone"
