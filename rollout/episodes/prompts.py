"""From a row of the data set to the tokens of its prompt, and from tokens to text. Built by `setup.py`.

Reads the columns of TinyZero and verl (`prompt`: chat messages) and of EasyR1 (`problem`: text); waits for nothing.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from configs.load import ConfigError
from configs.schema import Config
from rollout.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts:
    """The run's templates around each problem. Raises ConfigError for a template or stops that cannot be used."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: Config) -> None:
        self.tokenizer, self.system, self.longest = tokenizer, config.data.system_prompt, config.data.max_prompt_tokens
        problems: list[str] = []
        given = config.data.chat_template
        self.plain = given == "none"
        """Whether prompts are plain text, without a chat template."""
        self.chat_template = given.read_text(encoding="utf-8") if isinstance(given, Path) else None
        if given is None and not tokenizer.chat_template:
            remedy = "set data.chat_template: none for plain text, or name a Jinja file"
            problems.append(f"model.path: the tokenizer in {config.model.path} has no chat template; {remedy}")
        self.template: jinja2.Template | None = None
        if config.data.format_prompt:
            source = config.data.format_prompt.read_text(encoding="utf-8").strip()
            self.template = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(source)
        self.ends = sorted(end_tokens(config.model.path, tokenizer))
        try:
            self.stops = self.stop_tokens(config.sampling.stop, "sampling.stop")
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems)

    def tokens(self, row: dict[str, Any]) -> list[int]:
        """The prompt's tokens, with the chat template's header of an answer. Raises PromptError."""
        tokens = self.encode(row)
        if len(tokens) > self.longest:
            raise PromptError(f"prompt of {len(tokens)} tokens; data.max_prompt_tokens is {self.longest}")
        return tokens

    def encode(self, row: dict[str, Any]) -> list[int]:
        """`tokens` of any number. Raises PromptError."""
        try:
            messages = self.messages(row)
            if self.plain:  # the special tokens are those that the tokenizer puts before any text
                plain: list[int] = self.tokenizer.encode("\n\n".join(message["content"] for message in messages))
                return plain
            text = self.tokenizer.apply_chat_template(
                messages, chat_template=self.chat_template, add_generation_prompt=True, tokenize=False
            )
        except jinja2.TemplateError as error:
            raise PromptError(f"the chat template refuses the row: {error}") from None
        except (LookupError, TypeError, ValueError) as error:
            raise PromptError(f"the row cannot be made a chat: {type(error).__name__}: {error}") from error
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def text(self, tokens: list[int]) -> str:
        """The text of these tokens, without the special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The chat of a row: its `prompt`, or one message with its `problem`; template and system prompt applied."""
        if row.get("images") or row.get("videos"):
            raise PromptError("the row has images or videos; only text is sampled")
        prompt = row.get("prompt") or row.get("problem")
        if not prompt:
            raise PromptError(f"the row has neither prompt nor problem, but {', '.join(row)}")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        chat = [dict(message) for message in messages]
        if self.template and chat and chat[-1]["role"] == "user":
            chat[-1]["content"] = self.template.render(content=chat[-1]["content"])
        if self.system is not None and not any(message["role"] == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self.system})
        return chat

    def stop_tokens(self, texts: Sequence[str], name: str) -> list[int]:
        """The tokens that end an answer: these texts, and the model's own ends. Raises ConfigError naming `name`."""
        found = {text: self.tokenizer.encode(text, add_special_tokens=False) for text in texts}
        remedy = "a stop is a single one; name another text, or leave it out"
        problems = [
            f"{name}: {text!r} is {len(tokens)} tokens of this tokenizer; {remedy}"
            for text, tokens in found.items()
            if len(tokens) != 1
        ]
        if problems:
            raise ConfigError(problems)
        return [tokens[0] for tokens in found.values()] + self.ends


def end_tokens(model: str, tokenizer: "PreTrainedTokenizerBase") -> set[int]:
    """Tokens that end an answer: the tokenizer's and those of the model's generation config."""
    from transformers import GenerationConfig

    ends = {tokenizer.eos_token_id}
    with suppress(OSError):  # many models have no generation_config.json
        more = GenerationConfig.from_pretrained(model).eos_token_id
        ends |= set(more if isinstance(more, list) else [more])
    return ends - {None}


def load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """The model's tokenizer. Raises ValueError naming the folder."""
    from transformers import AutoTokenizer  # takes seconds to import: errors in the run file are reported before

    try:
        return AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path: no tokenizer can be loaded from {config.model.path}: {reason}") from None
