"""The scenes of the weights wire over gloo: servers are processes that die, hang, join and leave."""

from pathlib import Path

import pytest

from tests.harness.pace import paced
from tests.harness.scenes import SCENES
from tests.harness.server_process import Cluster

CASES: list[tuple[int, tuple[str, ...]]] = [(1, ()), (3, ()), (3, ("embed", "layer.1", "norm"))]
"""Servers, and weights that are never trained."""
FAST = {scene: CASES[2 if scene in ("a_newcomer_in_mid_run", "through_files", "bucket_by_bucket") else 1]
        for scene in SCENES}  # fmt: skip
"""The case of each scene in the fast tests."""
EXPIRES = ("a_broadcast_that_stalls", "checksums_that_get_lost")
"""Scenes that wait for the timeout."""
PATIENT_S = 30.0
"""As long as the servers of the scenes wait themselves."""


@pytest.mark.xdist_group("ranks")
@pytest.mark.parametrize(
    ("scene", "servers", "frozen"),
    [
        pytest.param(
            scene,
            *case,
            id=f"{scene}-{case[0]}-frozen{number}",
            marks=() if case == FAST[scene] else pytest.mark.long,
        )
        for scene in SCENES
        for number, case in enumerate(CASES)
    ],
)
def test_scene(scene: str, servers: int, frozen: tuple[str, ...], tmp_path: Path) -> None:
    timeout_s = paced(4.0) if scene in EXPIRES else PATIENT_S
    SCENES[scene](Cluster("cpu", ["cpu"] * servers, timeout_s=timeout_s, frozen=frozen), tmp_path)
