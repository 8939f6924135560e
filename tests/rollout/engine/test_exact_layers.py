"""Layers of vLLM that Headrace corrects."""

import pytest
import torch


@pytest.mark.vllm
@pytest.mark.usefixtures("distributed")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_apertus_activation_has_the_type_of_the_weights(dtype: torch.dtype) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.utils.torch_utils import set_default_torch_dtype

    import rollout.engine.exact_layers  # noqa: F401 - as a worker does
    from rollout.engine.door.vllm_worker import XIELU

    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(dtype):
        layer = XIELU()
    assert {each.dtype for each in (*layer.parameters(), *layer.buffers())} == {dtype}
