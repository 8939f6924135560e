"""Further imports of vLLM's engine process on a GPU."""

from vllm.compilation.backends import VllmBackend as VllmBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend as FlashAttentionBackend
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunner
