"""What vLLM's engine process needs on a GPU, to be imported before it has work."""

from vllm.compilation.backends import VllmBackend as VllmBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as FlashAttentionBackend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunner
