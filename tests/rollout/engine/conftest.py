"""Real vLLM engines that tests share (`tests/harness/engines.py`), and vLLM's models without an engine around them."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.harness.engines import DENSE_VOCABULARY, SharedEngine, dense_config, vision_config

FAMILIES = [
    pytest.param("qwen2_5_vl", marks=pytest.mark.xdist_group("vllm-vision")),
    pytest.param("qwen3_vl", marks=[pytest.mark.long, pytest.mark.xdist_group("vllm-qwen3-vl")]),
]
"""Families of vision-language models; one is in the fast lane."""


@pytest.fixture(scope="session")
def dense_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """A Qwen2 whose embedding and head are two matrices. For tests of the group `vllm-dense`."""
    from tests.harness.published import tiny_qwen2

    tiny_qwen2(vocabulary=DENSE_VOCABULARY).save_pretrained(folder := tmp_path_factory.mktemp("dense"))
    with closing(SharedEngine(dense_config(folder), "dense")) as engine:
        yield engine


@pytest.fixture(scope="session", params=FAMILIES)
def vision_engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedEngine]:
    """A vision-language model, with no part frozen. Tests with it get their group and lane from its family."""
    from tests.harness.tiny_vlm import tiny_vlm

    tiny_vlm(folder := tmp_path_factory.mktemp(request.param), request.param)
    with closing(SharedEngine(vision_config(folder, request.param), request.param)) as engine:
        yield engine


@pytest.fixture(scope="module")
def distributed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """vLLM's process groups, of this process alone."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import (
        cleanup_dist_env_and_memory,
        ensure_model_parallel_initialized,
        init_distributed_environment,
    )

    os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, f"file://{tmp_path_factory.mktemp('store') / 'store'}", 0, "gloo")
        ensure_model_parallel_initialized(1, 1)
    yield
    cleanup_dist_env_and_memory()
