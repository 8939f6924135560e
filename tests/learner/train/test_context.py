"""Ranks that share each row train as one rank does: log-probabilities, metrics, gradients, weights.

Beside each comparison stands its control, one rank that packs the same batch into other rows.
"""

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
    "window": {"model": "window", "budget": 97},
    "softcap": {"model": "softcap", "budget": 97},
    "sinks": {"model": "sinks", "budget": 97},
    "experts": {"model": "experts", "budget": 97, "replay": True},
    "latent": {"model": "latent", "budget": 97},
    "adapter": {"model": "qwen3", "budget": 97, "lora": True},
}  # fmt: skip
TEN_MORE = 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    shared_rows.write_models(folder)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, list[Found]]:
    """Each case by one rank: as it is, and with rows of another length."""
    others = [case | {"budget": case["budget"] + TEN_MORE} for case in CASES.values()]
    with world.alone():
        found = shared_rows.compute(folder, [*CASES.values(), *others], 1)
    return {name: [found[i], found[i + len(CASES)]] for i, name in enumerate(CASES)}


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Found]]:
    """Each case by two ranks that share every row, as each of them finds it."""
    world.together("share_rows", 2, folder, cases=list(CASES.values()), size=2)
    return [dict(zip(CASES, torch.load(folder / f"shared_rows-{rank}.pt"), strict=True)) for rank in range(2)]


def check(ours: Found, theirs: Found, control: Found) -> None:
    for what in ("gradients", "weights"):
        print(what, largest_difference(ours[what], theirs[what]), largest_difference(control[what], theirs[what]))
    for what in ("logprobs", "probe"):
        assert ours[what].shape == theirs[what].shape
        torch.testing.assert_close(ours[what], theirs[what], rtol=0, atol=TOLERANCE)
    assert ours["metrics"].keys() == theirs["metrics"].keys()
    for name, value in theirs["metrics"].items():
        assert ours["metrics"][name] == pytest.approx(value, rel=1e-4, abs=TOLERANCE, nan_ok=True), name


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_that_share_rows_train_as_one(name: str, alone: dict, two: list) -> None:
    theirs, control = alone[name]
    for found in two:
        check(found[name], theirs, control)
    assert two[0][name]["crossed"] > 0, "no document lies on both ranks"
