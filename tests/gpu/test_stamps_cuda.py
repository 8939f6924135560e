"""Stamps on GPUs: asynchronous scheduling, CUDA graphs, vLLM's own choice of model runner; one GPU and two per server.

With two, the tokens of a step are taken by a thread of the first rank's process and travel to vLLM's scheduler.
"""

import pytest
import torch

from tests.rollout.engine.test_stamps import judge, play

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_every_token_arrives_once_with_its_version_and_log_probability(tensor_parallel, tmp_path):
    if torch.cuda.device_count() < tensor_parallel:
        pytest.skip(f"needs {tensor_parallel} NVIDIA GPUs")
    found = play("cuda", tmp_path, tensor_parallel)
    assert found["asynchronous"]
    judge(found)
