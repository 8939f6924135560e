"""Imports for reading tool calls, which take ten seconds."""

from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest as ChatCompletionRequest
from vllm.parser import ParserManager as ParserManager
