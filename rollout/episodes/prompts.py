"""From a row of the data set to the tokens of its prompt, and from tokens to text. Built by `rollout/__main__.py`.

Reads the columns of TinyZero and verl (`prompt`: chat messages) and of EasyR1 (`problem`: text); waits for nothing.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jinja2

from configs.schema import Config
from rollout.episodes.episode import EpisodeError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Prompts:
    """The run's templates around each problem. Raises ValueError, in one line, for one that cannot be used."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", config: Config) -> None:
        self.tokenizer, self.system, self.longest = tokenizer, config.data.system_prompt, config.data.max_prompt_tokens
        if not tokenizer.chat_template:
            raise ValueError(f"model.path: the tokenizer in {config.model.path} has no chat template; save one with it")
        self.template = load_template(config.data.format_prompt) if config.data.format_prompt else None
        self.stops = [self._stop(text) for text in config.sampling.stop]
        if tokenizer.eos_token_id is not None:
            self.stops.append(tokenizer.eos_token_id)

    def tokens(self, row: dict[str, Any]) -> list[int]:
        """The prompt's tokens, ready to be continued. Raises EpisodeError for a row that no attempt can sample."""
        try:
            text = self.tokenizer.apply_chat_template(self.messages(row), add_generation_prompt=True, tokenize=False)
        except jinja2.TemplateError as error:
            raise EpisodeError(f"the chat template refuses the row: {error}", permanent=True) from None
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) > self.longest:
            raise EpisodeError(
                f"prompt of {len(tokens)} tokens; data.max_prompt_tokens is {self.longest}", permanent=True
            )
        return tokens

    def text(self, tokens: list[int]) -> str:
        """What these tokens say, without the special ones."""
        return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

    def messages(self, row: dict[str, Any]) -> list[dict[str, Any]]:
        """The chat of a row: its `prompt`, or one message of its `problem`; template and system prompt applied."""
        if row.get("images") or row.get("videos"):
            raise EpisodeError("the row has images or videos; only text is sampled", permanent=True)
        prompt = row.get("prompt") or row.get("problem")
        if not prompt:
            raise EpisodeError(f"the row has neither prompt nor problem, but {', '.join(row)}", permanent=True)
        chat = (
            [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(message) for message in prompt]
        )
        if self.template and chat and chat[-1]["role"] == "user":
            chat[-1]["content"] = self.template.render(content=chat[-1]["content"])
        if self.system is not None and not any(message["role"] == "system" for message in chat):
            chat.insert(0, {"role": "system", "content": self.system})
        return chat

    def _stop(self, text: str) -> int:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) != 1:
            raise ValueError(
                f"sampling.stop: {text!r} is {len(tokens)} tokens of this tokenizer; a stop is a single one"
            )
        return tokens[0]


def load_template(path: Path) -> jinja2.Template:
    """EasyR1's `format_prompt` file. Raises ValueError naming the file."""
    try:
        return jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(path.read_text().strip())
    except OSError as error:
        raise ValueError(f"data.format_prompt: {path}: {error.strerror}") from None
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(f"data.format_prompt: {path}:{error.lineno}: {error.message}") from None


def load_tokenizer(config: Config) -> "PreTrainedTokenizerBase":
    """The model's tokenizer. Raises ValueError naming the folder."""
    from transformers import AutoTokenizer  # takes seconds to import: what is wrong in the run file is told before

    try:
        return AutoTokenizer.from_pretrained(config.model.path, trust_remote_code=config.model.trust_remote_code)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"model.path: no tokenizer can be loaded from {config.model.path}: {reason}") from None
