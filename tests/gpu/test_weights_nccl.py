"""The weights wire's scenes over NCCL, on two NVIDIA GPUs or more: the learner on the first, a server on each other."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.harness.lives import Field, Nursery
from tests.harness.scenes import SCENES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two NVIDIA GPUs"),
]
DEADLINE_S = 10.0


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    torch.zeros(1, device="cuda:0")  # which takes seconds the first time
    nursery = Nursery()
    yield nursery
    nursery.close()
    for thread in threading.enumerate():  # one that is in torch when Python ends would take the process with it
        if thread.name.startswith("weights"):
            thread.join(DEADLINE_S + 5)


@pytest.mark.parametrize("scene", SCENES)
def test_scene(scene: str, nursery: Nursery, tmp_path: Path) -> None:
    servers = [f"cuda:{number}" for number in range(1, min(torch.cuda.device_count(), 4))]
    SCENES[scene](Field(nursery, "cuda:0", servers, timeout_s=DEADLINE_S), tmp_path)
