"""Fixtures of the learner's tests."""

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from transformers.utils import logging

from tests.harness.world import alone

logging.disable_progress_bar()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """The mesh of a process group of one rank."""
    torch.set_num_threads(1)
    with alone() as mesh:
        yield mesh
