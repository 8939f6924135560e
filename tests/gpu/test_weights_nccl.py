"""The scenes of the weights wire over NCCL, on two or more NVIDIA GPUs: the learner on the first, a server on each
other."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.scenes import SCENES
from tests.harness.server_process import Cluster

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
TIMEOUT_S = 10.0


@pytest.fixture(scope="module", autouse=True)
def ready() -> Iterator[None]:
    torch.zeros(1, device="cuda:0")  # takes seconds the first time
    yield
    for thread in threading.enumerate():  # a thread inside torch when Python exits would crash the process
        if thread.name.startswith("weights"):
            thread.join(TIMEOUT_S + 5)


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, tmp_path: Path) -> None:
    servers = [f"cuda:{number}" for number in range(1, min(torch.cuda.device_count(), 4))]
    SCENES[scene](Cluster("cuda:0", servers, timeout_s=TIMEOUT_S), tmp_path)
