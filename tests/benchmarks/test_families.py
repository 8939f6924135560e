"""Every family of models is trained exactly, or refused by name before anything starts: none wrongly, and none
with a traceback. One process, and two ranks beside it, for all families of a lane."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.models.__main__ import kept
from benchmarks.models.families import config_of, families
from configs.model_sizes import oversized
from configs.schema import ModelConfig
from learner.certify.certifier import OPTIONS, certify_config, write_copy
from learner.certify.numbers import coefficients, expected, gradients_of, placed
from learner.certify.ranks import Pair
from learner.certify.rows import cases
from learner.model import loading
from learner.model.policy import Policy
from tests.harness.certified import two_ranks
from tests.harness.world import alone

FAST = (
    "llama 3.1 (llama3 rope)",
    "mistral 0.1 (window)",
    "qwen3_moe",
    "granite 3 (multipliers)",
    "internvl",
    "ernie4_5_moe",
)


@pytest.fixture(scope="module")
def pair() -> Iterator[Pair]:
    with two_ranks() as pair:
        yield pair


def judge(name: str, pair: Pair) -> None:
    """Fail unless the family is exact or refused by name."""
    with alone() as mesh:
        found = certify_config(config_of(name), ModelConfig(path=name), True, mesh, pair)
    if found.refused:
        assert "Traceback" not in found.refused and "\n" not in found.refused
        return
    assert found.faults == []
    compared = [check for check in found.checks if check.verdict == "holds"]
    assert {"two ranks = one", "two ranks = one, gradient"} <= {check.what for check in compared}
    assert len(compared) >= 11, [check.cells() for check in found.checks]
    assert all(check.limit <= 1e-3 for check in compared)


@pytest.mark.parametrize("name", FAST)
def test_a_family_is_exact_or_refused(name: str, pair: Pair) -> None:
    judge(name, pair)


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(families().keys() - FAST))
def test_every_family_is_exact_or_refused(name: str, pair: Pair) -> None:
    judge(name, pair)


TRAINED = sorted(name for name, found in kept().items() if not found.refused)
HALVED = ("llama", "nemotron_h without experts")


@pytest.mark.parametrize(
    "name", [*HALVED, *(pytest.param(x, marks=pytest.mark.long) for x in TRAINED if x not in HALVED)]
)
def test_a_family_is_trained_in_bfloat16_too(name: str, tmp_path: Path) -> None:
    """Certificates are in float32. Rounding may take a policy no further from that than it takes transformers."""
    model, case = write_copy(config_of(name), ModelConfig(path=name), tmp_path), list(cases(64))[2]
    with alone() as mesh:
        policy = Policy(model.model_copy(update={"dtype": "bfloat16"}), OPTIONS, mesh)
        ours = policy(placed(policy, case.row), 1.0)[0][case.row.scored]
        (ours * coefficients(case)).sum().backward()
        assert all(bool(grad.isfinite().all()) for grad in gradients_of(policy).values())
    config = loading.read_config(model)
    with torch.no_grad():
        exact, rounded = (
            expected(
                loading.auto_class(config).from_pretrained(model.path, dtype=dtype, attn_implementation="eager").eval(),
                case,
            )  # PaliGemma's sdpa sees later tokens without a mask
            for dtype in (torch.float32, torch.bfloat16)
        )
    off, theirs = (float((x.detach() - exact).abs().mean()) for x in (ours, rounded))
    assert off < 2 * theirs + 0.05  # experts that a token flips to decide the rest


@pytest.mark.long
def test_no_family_is_refused_for_its_sizes() -> None:
    for name in families():
        written = json.loads(config_of(name).to_json_string(use_diff=False))
        assert not list(oversized(written)), name


def test_the_table_has_enough_families() -> None:
    assert len(families()) >= 80


def test_qwen_and_llama_are_exact(pair: Pair) -> None:
    """So that a table in which everything is refused does not pass."""
    for name in ("qwen2.5, tied", "llama with biases"):
        with alone() as mesh:
            found: Any = certify_config(config_of(name), ModelConfig(path=name), True, mesh, pair)
        assert found.holds and sum(check.verdict == "holds" for check in found.checks) == 19
