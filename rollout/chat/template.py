"""From messages to tokens by the run's chat template, and from a held answer to the next prompt.

Held tokens are never encoded again. Tokenizers are not re-entrant: `aside` runs in one thread with a tokenizer of its
own.
"""

import asyncio
import copy
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from rollout.chat.messages import Message
from rollout.episodes.prompts import Prompts
from rollout.errors import ChatRefused
from rollout.templates.renderer import ChatTexts, Renderer, RenderError

R = TypeVar("R")
MARK = "Zq7AnswerStoodHereZq7"
"""Shows what a template writes after an answer."""
Tools = list[Any] | None


class ChatTemplate:
    """The run's chat template. Methods raise ChatRefused for messages that the template refuses.

    `keep`: go on after an answer even if the template would rewrite what is before it.
    """

    def __init__(self, prompts: Prompts, keep: bool = False, kwargs: Mapping[str, Any] | None = None) -> None:
        self.tokenizer, self.keep = copy.deepcopy(prompts.tokenizer), keep
        self.ends = frozenset(prompts.ends)
        self._plain, self._system, self._place = prompts.plain, prompts.system, prompts.template_place
        self._renderer = Renderer()
        self._texts = ChatTexts(self.tokenizer, self._renderer, prompts.chat_template)
        self._kwargs, self._thread = dict(kwargs or {}), ThreadPoolExecutor(1, "chat")
        added = self.tokenizer.added_tokens_decoder.values()
        self._special = [token.content for token in added if token.special]

    def close(self) -> None:
        self._renderer.close()

    async def aside(self, function: Callable[..., R], *args: Any) -> R:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def opening(self, messages: Sequence[Message], tools: Tools) -> list[int]:
        text = self.text(messages, tools, header=True)
        return list(self.tokenizer.encode(text, add_special_tokens=self._plain))

    def continuation(
        self, held: Sequence[Message], tokens: list[int], new: Sequence[Message], tools: Tools
    ) -> list[int] | None:
        """Return what follows `tokens`, which end with an answer: its closing, `new`, the next answer's header. None if
        the template rewrites `held` before `new`, as without its thinking."""
        suffix = self._suffix(held, new, tools)
        if suffix is None or not (self.keep or self._stays(held, tokens, new, tools)):
            return None
        given = list(self.tokenizer.encode(suffix, add_special_tokens=False))
        closed = tokens[-1] in self.ends and given[:1] == tokens[-1:]
        return given[1:] if closed else given

    def text(self, messages: Sequence[Message], tools: Tools, header: bool) -> str:
        """`header`: add the next answer's beginning."""
        chat = list(messages)
        if self._system is not None and all(message["role"] != "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self._system})
        if self._plain:
            return "\n\n".join(message["content"] for message in chat)
        try:
            text = self._texts.render(chat, header, tools, self._kwargs)
            text.encode()  # refuses lone surrogates
            return text
        except RenderError as error:
            raise ChatRefused(f"messages: {error.about('them', 'the chat template', self._place)}") from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise ChatRefused(f"messages: they cannot be made into a chat: {type(error).__name__}: {error}") from error

    def _stays(self, held: Sequence[Message], tokens: list[int], new: Sequence[Message], tools: Tools) -> bool:
        """Whether the template keeps `held`, or the tokens' text: Qwen3's adds empty thinking."""
        before, after = self.text(held, tools, header=False), self.text([*held, *new], tools, header=True)
        said = [held[-1].get("reasoning_content", ""), *re.split("</?think>", held[-1]["content"])]
        if after.startswith(before) and all(text.strip() in before for text in said):
            return True
        return after.startswith(str(self.tokenizer.decode(tokens)))

    def _suffix(self, held: Sequence[Message], new: Sequence[Message], tools: Tools) -> str | None:
        marked = [*held[:-1], self._marked(held[-1])]
        _, found, end = self.text(marked, tools, header=False).partition(MARK)
        _, _, rest = self.text([*marked, *new], tools, header=True).partition(MARK)
        if not found or not rest.startswith(end):
            return None
        closing = self._after_calls(end) if held[-1].get("tool_calls") else 0
        return end[closing:] + rest[len(end) :]

    def _marked(self, answer: Message) -> Message:
        if not (calls := answer.get("tool_calls")):
            return answer | {"content": MARK}
        last = calls[-1] | {"function": calls[-1]["function"] | {"name": MARK}}
        return answer | {"tool_calls": [*calls[:-1], last]}

    def _after_calls(self, end: str) -> int:
        """An answer closes at the last special token after the name of its last call."""
        at = max((end.rfind(token) for token in self._special), default=-1)
        return at if at >= 0 else len(end.rstrip())
