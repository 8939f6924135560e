"""From a row of the data set to its prompt's tokens, and from tokens to text.

Reads `prompt` of TinyZero and verl, `problem` of EasyR1, and `images`, marked by `<image>` in a text.
"""

import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from buffer.data.image_rows import IMAGES, MARK
from buffer.data.images import ImageError, ImageFormat, Picture, counted, decode
from configs.load import ConfigError
from configs.schema import Config
from rollout.episodes.row_messages import left_out, messages_of, with_arguments
from rollout.errors import PromptError
from rollout.templates.renderer import CHANGED, ChatTexts, Renderer, RenderError
from rollout.templates.thinking import thinking_arguments
from rollout.templates.turn_ends import CHAT_TEMPLATE, UNUSABLE, named_ends, turn_end

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ARGUMENTS = '{"Zq7": 1}'


class Prompts:
    """The run's templates around each problem. `form`: None for a text model. `now`: as in `Renderer`. Raises
    ConfigError."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: Config,
        form: ImageFormat | None = None,
        now: int | None = None,
    ) -> None:
        self.form = form
        self.tokenizer, self.system, self.longest = tokenizer, config.data.system_prompt, config.data.max_prompt_tokens
        problems: list[str] = []
        given = config.data.chat_template
        self.plain = given == "none"
        self.chat_template = given.read_text(encoding="utf-8-sig") if isinstance(given, Path) else None
        if given is None and not tokenizer.chat_template:
            remedy = "set data.chat_template: none for plain text, or name a Jinja file"
            problems.append(f"model.path: the tokenizer in {config.model.path} has no chat template; {remedy}")
        self.template_text = self.chat_template or str(tokenizer.chat_template or "")
        self.template_place = f"data.chat_template {given}" if self.chat_template else f"model.path {config.model.path}"
        self._renderer = Renderer(now=now)
        self._texts = ChatTexts(tokenizer, self._renderer, self.chat_template)
        self._format, self._format_name = "", f"data.format_prompt {config.data.format_prompt}"
        if config.data.format_prompt:
            self._format = config.data.format_prompt.read_text(encoding="utf-8-sig").strip()
            try:
                self._renderer.check("file", self._format)
            except RenderError as error:
                problems.append(f"{self._format_name}: {error}")
        self.template_kwargs: dict[str, Any] = dict(config.rollout.chat.template_kwargs)
        try:
            self.named_ends = named_ends(config.model.path, tokenizer)
            self._stops = self._single_tokens(config.sampling.stop, "sampling.stop")
            self.template_kwargs |= self._thinking(config.rollout.chat.thinking)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def close(self) -> None:
        self._renderer.close()

    @cached_property
    def end_sources(self) -> dict[int, str]:
        """Tokens that end an answer, and what names each. A base model's files name only the end of a text.

        Example: `{151643: "tokenizer", 151645: "chat template"}`
        """
        found = turn_end(self._texts, self.tokenizer, self.template_kwargs) if not self.plain else None
        added = {} if found is None or found in self.named_ends else {found: CHAT_TEMPLATE}
        return dict(sorted({**self.named_ends, **added}.items()))

    @property
    def ends(self) -> list[int]:
        return list(self.end_sources)

    @property
    def stops(self) -> list[int]:
        return list(dict.fromkeys([*self._stops, *self.ends]))

    @cached_property
    def _writes_texts(self) -> bool:
        """Whether the chat template writes arguments that are a text as they are. Most write JSON of a text."""
        call = {"id": "Zq7Zq7Zq7", "type": "function", "function": {"name": "f", "arguments": ARGUMENTS}}
        asked, calling = {"role": "user", "content": "1"}, {"role": "assistant", "content": "", "tool_calls": [call]}
        try:
            return ARGUMENTS in self._texts.render([asked, calling], False, kwargs=self.template_kwargs)
        except UNUSABLE:
            return False

    def _thinking(self, wanted: bool | Literal["auto"]) -> dict[str, Any]:
        if wanted == "auto":
            return {}
        try:
            if self.plain:
                raise ValueError("data.chat_template: none has no switch for thinking; remove one of them")
            return thinking_arguments(wanted, self._texts, self.template_kwargs, self.system, self.template_text)
        except ValueError as error:
            raise ConfigError([f"rollout.chat.thinking: {'on' if wanted else 'off'}: {error}"]) from None

    def with_pictures(self, row: dict[str, Any]) -> tuple[dict[str, Any], list[Picture]]:
        """Return the row with its image files, and the pictures, decoded in tens of milliseconds. Raises
        PromptError."""
        files, pictures = list[bytes](), list[Picture]()
        try:
            for data in row[IMAGES]:
                files.append(data)
                pictures += [decode(data, self.form)] if self.form else []
        except ImageError as error:
            raise PromptError(f"image {len(pictures)} of the row: {error}") from None
        return row | {IMAGES: files}, pictures

    def tokens(self, row: dict[str, Any], pictures: Sequence[Picture] = ()) -> list[int]:
        """Encode the prompt with the answer's header. Raises PromptError."""
        tokens = self.encode(row, pictures)
        if len(tokens) > self.longest:
            long = PromptError(f"prompt longer than data.max_prompt_tokens {self.longest}")
            long.add_note(f"the prompt has {len(tokens)} tokens")
            raise long
        return tokens

    def encode(self, row: dict[str, Any], pictures: Sequence[Picture] = ()) -> list[int]:
        """As `tokens`, of any length. Raises PromptError."""
        try:
            messages = self.messages(row)
            if self.plain:
                return self._expanded(self.plain_tokens(messages), pictures)
            text = self._rendered(messages)
            tokens = self.tokenizer.encode(self.marked(text), add_special_tokens=False)
        except RenderError as error:
            raise PromptError(error.about("the row", "the chat template", self.template_place)) from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"the row cannot be made into a chat: {type(error).__name__}: {error}") from error
        tokens = self._expanded(tokens, pictures)
        if problem := left_out(flattened(messages), text):
            raise PromptError(problem)
        return tokens

    def _rendered(self, messages: list[dict[str, Any]]) -> str:
        """The answer continues a last assistant message."""
        last = messages[-1]
        continued = last["role"] == "assistant"
        if continued and last.get("tool_calls"):
            raise PromptError("its last message calls a tool; the tool's result must follow")
        if continued and not last["content"].strip():
            messages, continued = messages[:-1], False
        try:
            return self._texts.render(messages, not continued, kwargs=self.template_kwargs, continued=continued)
        except ValueError as error:
            if continued and ("continue_final_message" in str(error) or CHANGED in str(error)):
                raise PromptError(CHANGED) from None
            raise

    def chat_text(self, messages: list[dict[str, Any]], header: bool) -> str:
        """`header` adds the beginning of an answer. Raises PromptError."""
        try:
            return self._texts.render(messages, header, kwargs=self.template_kwargs)
        except RenderError as error:
            raise PromptError(error.about("the row", "the chat template", self.template_place)) from None
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            raise PromptError(f"the row cannot be made into a chat: {type(error).__name__}: {error}") from error

    def plain_tokens(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.without_end(self.tokenizer.encode(self._joined(messages)))

    def without_end(self, tokens: list[int]) -> list[int]:
        """Drop the end that some tokenizers add: an answer follows."""
        return tokens[:-1] if tokens and tokens[-1] in self.ends else tokens

    def _joined(self, messages: list[dict[str, Any]]) -> str:
        if self.form is None:
            return "\n\n".join(message["content"] for message in messages)
        return "\n\n".join(flat(message["content"]).replace(MARK, self._image_text()) for message in messages)

    def _image_text(self) -> str:
        assert self.form is not None
        marks = (self.form.vision_start, self.form.image_token, self.form.vision_end)
        image = "".join(map(str, self.tokenizer.convert_ids_to_tokens(list(marks))))
        return f"{self.form.padding}{image}{self.form.padding}"

    def marked(self, text: str) -> str:
        """Gemma 3's template writes only the first token of an image, its processor all."""
        if self.form is None or not self.form.padding:
            return text
        return text.replace(str(self.tokenizer.convert_ids_to_tokens(self.form.vision_start)), self._image_text())

    def _expanded(self, tokens: list[int], pictures: Sequence[Picture]) -> list[int]:
        if self.form is None:
            return tokens
        token, found, left = self.form.image_token, list[int](), iter(pictures)
        self.check_placeholders(tokens.count(token), len(pictures))
        for each in tokens:
            found += [token] * next(left).num_tokens if each == token else [each]
        return found

    def check_placeholders(self, placeholders: int, images: int) -> None:
        """Raise PromptError unless each image has one."""
        if self.form is not None and placeholders != images:
            name = self.tokenizer.convert_ids_to_tokens(self.form.image_token)
            problem = f"the prompt has {placeholders} placeholders {name} for {counted(images, 'image')}"
            raise PromptError(f"{problem}; mark each image by {MARK} and never write {name} in a text")

    def text(self, tokens: Sequence[int] | np.ndarray, special: bool = False) -> str:
        numbers = np.array(tokens, np.int64)  # decode walks through a list
        return str(self.tokenizer.decode(numbers, skip_special_tokens=not special))

    def shown(self, tokens: list[int]) -> str:
        text = str(self.tokenizer.decode(tokens))
        if self.form is None:
            return text
        name = str(self.tokenizer.convert_ids_to_tokens(self.form.image_token))
        return re.sub(f"({re.escape(name)})+", lambda run: f"{name} x {len(run[0]) // len(name)}", text)

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """Apply template and system prompt to the row's chat."""
        if row.get("videos"):
            raise PromptError("the row has videos; only text and images are shown to the model")
        images = row.get(IMAGES)
        if images and not self.form:
            raise PromptError("the row has images, and the model of model.path sees none")
        if "unmade" in row and not row.keys() & {"prompt", "problem"}:  # a file may have such a column too
            raise PromptError(str(row["unmade"]))
        chat = messages_of(row, self.template_text, self.form is not None)
        if any("tool_calls" in message for message in chat):
            chat = [with_arguments(message, self._writes_texts) for message in chat]
        if self._format and chat and chat[-1]["role"] == "user":
            chat[-1]["content"] = self._formatted(chat[-1]["content"])
        if self.system is not None and not any(message["role"] == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self.system})
        if images:
            chat = [message | {"content": parts(message["content"])} for message in chat]
        return chat

    def _formatted(self, content: str) -> str:
        try:
            return self._renderer.render("file", self._format, {"content": content})
        except RenderError as error:
            raise PromptError(error.about("the row", self._format_name)) from None

    def stop_tokens(self, texts: Sequence[str], name: str) -> list[int]:
        """Raises ConfigError naming `name`."""
        return list(dict.fromkeys([*self._single_tokens(texts, name), *self.ends]))

    def _single_tokens(self, texts: Sequence[str], name: str) -> list[int]:
        found = {text: self.tokenizer.encode(text, add_special_tokens=False) for text in texts}
        remedy = "a stop is a single one; name another text, or leave it out"
        problems = [
            f"{name}: {text!r} is {len(tokens)} tokens of this tokenizer; {remedy}"
            for text, tokens in found.items()
            if len(tokens) != 1
        ]
        if problems:
            raise ConfigError(problems)
        return [tokens[0] for tokens in found.values()]


def without_images(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name != IMAGES}


def flat(content: str | list[dict[str, Any]]) -> str:
    """The text of a message, with MARK for each image."""
    if isinstance(content, str):
        return content
    return "".join(MARK if part["type"] == "image" else part["text"] for part in content)


def flattened(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` with the text of each."""
    return [message | {"content": flat(message["content"])} for message in messages]


def parts(text: str) -> str | list[dict[str, Any]]:
    """`"<image> Red?"` -> `[{"type": "image"}, {"type": "text", "text": " Red?"}]`; no image: the text."""
    pieces = [{"type": "text", "text": piece} for piece in text.split(MARK)]
    marked = [part for piece in pieces for part in ({"type": "image"}, piece)][1:]
    return [part for part in marked if part.get("text", MARK)] if len(pieces) > 1 else text


def load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """Raises ValueError."""
    from transformers import AutoTokenizer  # takes seconds

    path, again = config.model.path, "correct its files or download the model again"
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.model.trust_remote_code)
    except Exception as error:  # a broken file raises any class
        reason = (str(error).strip() or "no reason given").splitlines()[0]
        named = reason if isinstance(error, OSError | ValueError) else f"{type(error).__name__}: {reason}"
        raise ValueError(f"model.path: no tokenizer can be loaded from {path}: {named}; {again}") from None
    if len(tokenizer) <= len(tokenizer.added_tokens_decoder):  # transformers makes an empty one without tokenizer.json
        raise ValueError(f"model.path: the tokenizer in {path} has added tokens and no others; {again}")
    return tokenizer
