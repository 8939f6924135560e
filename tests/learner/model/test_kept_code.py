"""Compiled code that torch keeps between starts is taken only with the operators that it was made for."""

from pathlib import Path

import torch

from tests.harness.world import LEARNER, policy_of, tiny_model


def test_the_key_of_compiled_code_has_the_schemas_of_all_operators(tmp_path: Path, mesh) -> None:
    """A release that gave `attend` one more argument crashed with the code of the release before."""
    with torch.compiler.config.patch(cache_key_tag="a user's own"):
        policy_of(tiny_model(tmp_path), mesh, LEARNER.model_copy(update={"compile": True}))
        tag = torch.compiler.config.cache_key_tag
    for operator in ("attend", "attend_backward", "to_heads", "to_tokens"):
        assert f"headrace::{operator}(Tensor " in tag
    assert "float? softcap=None" in tag and tag.startswith("a user's own ")
