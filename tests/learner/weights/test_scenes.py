"""The scenes of the weights wire over gloo: servers are processes that die, hang, join and leave."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness.fork_server import Cluster, ForkServer
from tests.harness.scenes import SCENES


@pytest.fixture(scope="module")
def fork_server() -> Iterator[ForkServer]:
    fork_server = ForkServer()
    yield fork_server
    fork_server.close()


@pytest.mark.parametrize(("servers", "frozen"), [(1, ()), (3, ()), (3, ("embed", "layer.1", "norm"))])
@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, servers: int, frozen: tuple[str, ...], fork_server: ForkServer, tmp_path: Path) -> None:
    SCENES[scene](Cluster(fork_server, "cpu", ["cpu"] * servers, timeout_s=4.0, frozen=frozen), tmp_path)
