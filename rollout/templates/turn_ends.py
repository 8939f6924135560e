"""Finds the tokens that end an answer, from the model's files and chat template."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from buffer.data.images import read_model_file
from configs.load import ConfigError
from rollout.templates.renderer import ChatTexts, RenderError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ANSWER, NEXT = "Zq7AnswerZq7", "Zq7NextZq7"
CHAT = [{"role": "user", "content": "1"}, {"role": "assistant", "content": ANSWER}]
UNUSABLE = (RenderError, LookupError, TypeError, ValueError, AttributeError)
"""Errors of templates and tokenizers for a chat that they refuse."""
CHAT_TEMPLATE = "chat template"


def named_ends(model: str, tokenizer: "PreTrainedTokenizerBase") -> dict[int, str]:
    """Return tokens that end an answer, with the file that names each. Raises ConfigError.

    `config.json` counts only without a `generation_config.json`, and only its added tokens do: its defaults may be any
    token.

    Example: `{128001: "tokenizer", 128009: "generation_config.json"}`
    """
    found: dict[int, str] = {}
    if tokenizer.eos_token_id is not None:
        found[int(tokenizer.eos_token_id)] = "tokenizer"
    generation = _model_file(model, "generation_config.json")
    if generation is not None:
        return dict.fromkeys(_ends(generation), "generation_config.json") | found
    config = _model_file(model, "config.json") or {}
    every = [*_ends(config), *_ends(config.get("text_config") or {})]
    added = tokenizer.added_tokens_decoder
    return {token: "config.json" for token in every if token in added} | found


def _model_file(model: str, name: str) -> dict[str, Any] | None:
    """None without the file, or if the hub cannot be asked."""
    try:
        return read_model_file(model, name)
    except ConfigError:
        if Path(model).is_dir():
            raise
        return None


def _ends(config: Mapping[str, Any]) -> list[int]:
    given = config.get("eos_token_id")
    return [token for token in (given if isinstance(given, list) else [given]) if isinstance(token, int)]


def turn_end(texts: ChatTexts, tokenizer: "PreTrainedTokenizerBase", kwargs: Mapping[str, Any]) -> int | None:
    """Return the added token with which the chat template ends an assistant's turn, or None.

    It is the last added token after an answer both at a chat's end and before another message: Phi 3 closes a chat with
    a further token. If the two differ (gpt-oss), a turn ends as a chat does; if a chat has no end (GLM), where the next
    message begins.
    """
    try:
        last = _behind(texts.render(CHAT, False, kwargs=kwargs))
        header = _behind(texts.render(CHAT, True, kwargs=kwargs))
        followed = _behind(texts.render([*CHAT, {"role": "user", "content": NEXT}], False, kwargs=kwargs))
    except UNUSABLE:
        return None
    closing = last[: common(last, followed)]
    both = _added(closing, tokenizer)
    if both and last == header and closing.strip() != last.strip():  # it always writes the header of the next answer
        return both[0]
    if both:
        return both[-1]
    return next(iter([*reversed(_added(last, tokenizer)), *_added(followed, tokenizer)]), None)


def common(one: str, other: str) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _behind(text: str) -> str:
    return text.partition(ANSWER)[2].partition(NEXT)[0]


def _added(text: str, tokenizer: "PreTrainedTokenizerBase") -> Sequence[int]:
    known = tokenizer.added_tokens_decoder
    return [token for token in tokenizer.encode(text, add_special_tokens=False) if token in known]
