"""Certificates for tests: a pair of ranks that is forked from the tests' own fork server, and small models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from configs.certificate import Check
from configs.schema import ModelConfig
from learner.certify.certifier import OPTIONS, examine, read_reference, write_copy
from learner.certify.copies import compare_copies
from learner.certify.ranks import Pair
from learner.certify.rows import cases
from learner.model.policy import Policy
from tests.harness.world import FORKS

TINY: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 1,
}


def stay() -> None:
    """Called first by each rank. Its parent is the fork server, with which it need not end."""


@contextmanager
def two_ranks() -> Iterator[Pair]:
    """Two ranks, which end with the block."""
    with Pair(FORKS, stay) as pair:
        yield pair


def tiny_config(kind: str, **overrides: Any) -> Any:
    return AutoConfig.for_model(kind, **TINY | overrides)


def examined(config: Any, mesh: Any, pair: Any, folder: Path, splits: bool = False) -> dict[str, Check]:
    """Every comparison of a small copy of a model, by name, whether it would be refused or not. `splits`: rows that two
    ranks share too."""
    model = write_copy(config, ModelConfig(path="tiny"), folder)
    return {check.what: check for check in examine(model, True, mesh, pair, folder, splits)}


def copied(config: Any, mesh: Any, folder: Path) -> dict[str, Check]:
    """Only the comparisons of copies of its weights."""
    model = write_copy(config, ModelConfig(path="tiny"), folder)
    reference, policy = read_reference(model), Policy(model, OPTIONS, mesh)
    longest = next(case for case in cases(64) if len(case.texts) > 1 and not case.shares)
    return {check.what: check for check in compare_copies(policy, reference, model, longest, folder)}
