"""vLLM's view of this machine's GPUs (`leant_on.py` has the reasons). Takes seconds to import."""

from vllm.platforms import current_platform as current_platform
