"""Imports of vLLM's engine process before it has work."""

from vllm.model_executor.model_loader import get_model_loader as get_model_loader
from vllm.v1.engine.core import EngineCoreProc as EngineCoreProc
from vllm.v1.executor.uniproc_executor import UniProcExecutor as UniProcExecutor
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker as Worker
