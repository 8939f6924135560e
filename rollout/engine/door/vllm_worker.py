"""Imports of Headrace's part of a vLLM worker."""

from vllm.config.vllm import set_current_vllm_config as set_current_vllm_config
from vllm.lora.lora_model import LoRAModel as LoRAModel
from vllm.lora.peft_helper import PEFTHelper as PEFTHelper
from vllm.model_executor.layers.activation import XIELU as XIELU
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts as RoutedExperts
from vllm.model_executor.layers.linear import LinearBase as LinearBase
from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload as finalize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info as get_layerwise_info
from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload as initialize_layerwise_reload
from vllm.v1.outputs import AsyncModelRunnerOutput as AsyncModelRunnerOutput
from vllm.v1.outputs import ModelRunnerOutput as ModelRunnerOutput
