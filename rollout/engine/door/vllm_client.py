"""Imports of a rollout server's own process."""

from vllm.engine.arg_utils import AsyncEngineArgs as AsyncEngineArgs
from vllm.exceptions import VLLMValidationError as VLLMValidationError
from vllm.inputs.engine import mm_input as mm_input
from vllm.inputs.engine import tokens_input as tokens_input
from vllm.lora.request import LoRARequest as LoRARequest
from vllm.multimodal.inputs import MultiModalFieldConfig as MultiModalFieldConfig
from vllm.multimodal.inputs import MultiModalKwargsItem as MultiModalKwargsItem
from vllm.multimodal.inputs import MultiModalKwargsItems as MultiModalKwargsItems
from vllm.multimodal.inputs import PlaceholderRange as PlaceholderRange
from vllm.sampling_params import RequestOutputKind as RequestOutputKind
from vllm.sampling_params import SamplingParams as SamplingParams
from vllm.v1.engine import EngineCoreOutput as EngineCoreOutput
from vllm.v1.engine import EngineCoreRequest as EngineCoreRequest
from vllm.v1.engine import FinishReason as FinishReason
from vllm.v1.engine.async_llm import AsyncLLM as AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.metrics.loggers import PrometheusStatLogger as PrometheusStatLogger
