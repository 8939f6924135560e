"""vLLM's view of this machine's GPUs, which takes seconds to import."""

from vllm.platforms import current_platform as current_platform
