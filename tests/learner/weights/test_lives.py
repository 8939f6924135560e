"""The weights wire's scenes over gloo: servers are processes that die, hang, join and leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.lives import Field, Nursery
from tests.harness.scenes import SCENES


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, servers: int, nursery: Nursery, tmp_path: Path) -> None:
    SCENES[scene](Field(nursery, "cpu", ["cpu"] * servers, timeout_s=4.0), tmp_path)
