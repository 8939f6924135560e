"""What the reader of tool calls imports of vLLM, which takes ten seconds."""

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.parser import ParserManager as ParserManager
