"""What the reader of tool calls imports of vLLM (`leant_on.py` has the reasons). Takes ten seconds to import."""

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.parser import ParserManager as ParserManager
