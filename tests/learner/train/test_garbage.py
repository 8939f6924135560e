"""The first update exempts what lives as long as the process from the garbage collector."""

import gc
from pathlib import Path

import pytest

from learner.train.garbage import exempt_long_lived
from tests.harness.world import algorithm_of, alone, policy_of, tiny_model


def test_first_update_exempts_what_lives_long(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    gc.unfreeze()
    request.addfinalizer(gc.unfreeze)
    exempt_long_lived.cache_clear()
    with alone() as mesh:
        algorithm = algorithm_of(policy_of(tiny_model(tmp_path), mesh), 64)
        assert gc.get_freeze_count() == 0
        algorithm.optimizer.update(0)
        exempt = gc.get_freeze_count()
        assert exempt > 10_000
        algorithm.optimizer.update(1)
        assert gc.get_freeze_count() <= exempt
