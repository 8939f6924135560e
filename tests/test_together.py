"""Cases on several ranks: a failing case fails its test with the rank's error, and the next case works."""

from pathlib import Path

import pytest
import torch

from tests.harness import world


@pytest.mark.xdist_group("ranks")
def test_a_case_that_fails_fails_its_own_test_only(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="ValueError: rank 1 of this case fails"):
        world.together("failing", 2, tmp_path)
    world.together("wholes", 2, tmp_path, shapes={"a": [3, 2]}, on=2, limits=[1 << 20])
    (found,), _ = torch.load(tmp_path / "wholes.pt")
    assert torch.equal(found[0]["a"], world.random_weights({"a": [3, 2]})["a"].bfloat16())
