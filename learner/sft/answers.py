"""Turns a row into tokens, and marks those that a server would have sampled: an answer, encoded apart, and the token at
which it would stop. Placeholders of images are never among these."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from buffer.data.image_rows import IMAGES, num_slots
from buffer.data.images import ImageFormat, Picture
from configs.load import ConfigError
from configs.schema import Config
from learner.sft.row_images import ReadImage, ReadPicture
from rollout.episodes.prompts import Prompts, flattened, load_tokenizer
from rollout.episodes.row_messages import left_out, whole
from rollout.errors import PromptError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Chat = list[dict[str, Any]]
FLAG = "train"
NO_TOKEN = -1
FOREIGN = {"weight": "write it as train: true or train: false", "training": "write it as train"}
"""Other tools' keys for `train`, and the remedy."""
SAID = ("tool_calls", "reasoning_content", "reasoning", "thinking")
"""Keys of a message, beside its content, for what the model says. Templates read one of the last three."""
UNREAD = {
    "videos": "only text and still images are trained",
    "tools": "write them into the system message, as the chat template would",
}


class TrainedText(NamedTuple):
    """A text and its trained tokens."""

    tokens: np.ndarray
    """int32 [tokens]"""
    trained: np.ndarray
    """bool [tokens]; never true for the first token."""
    images: Sequence[ReadImage] = ()
    """In order of `start`."""


@dataclass
class Draft:
    """A text in the making, until the template rewrites its beginning."""

    text: str = ""
    pieces: list[tuple[list[int], bool]] = field(default_factory=list)
    messages: int = 0
    """Messages of the chat that it has."""
    closed: bool = False
    """The last answer ends with a token that the template did not write: nothing can follow."""

    def finish(self) -> TrainedText:
        tokens = np.array([token for ids, _ in self.pieces for token in ids], np.int32)
        trained = np.array([flag for ids, flag in self.pieces for _ in ids], np.bool_)
        trained[:1] = False
        return TrainedText(tokens, trained)


def reader_of(config: Config, section: str = "sft", began: int | None = None) -> "AnswerReader":
    """A reader with the model's tokenizer. Raises ConfigError."""
    try:
        tokenizer = load_tokenizer(config)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    return AnswerReader(tokenizer, config, section, ImageFormat.of_run(config), began)


class AnswerReader:
    """Renders rows by the run's templates. `form`: None for a text model. `began`: the time that templates write, as in
    `DataPosition`. Raises ConfigError for a template or tokenizer that cannot be used."""

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        config: Config,
        section: str = "sft",
        form: ImageFormat | None = None,
        began: int | None = None,
    ) -> None:
        self.began = began
        self.tokenizer, self.turns, self.formats = tokenizer, config.sft.turns, config.data.format_prompt is not None
        self.section = section
        if tokenizer.eos_token_id is None:
            problem = f"the tokenizer in {config.model.path} has no token that ends a text"
            raise ConfigError([f"model.path: {problem}; set eos_token in its tokenizer_config.json"])
        self.end = int(tokenizer.eos_token_id)
        self.placeholder = form.image_token if form else NO_TOKEN
        self.prompts = Prompts(tokenizer, config, form, began)
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.stops = {*self.prompts.stops}
        self.ends = self.stops | special
        self.marked: list[int] = []
        """Rows without images in which a model that sees reads MARK as text."""

    def close(self) -> None:
        self.prompts.close()

    def texts(self, row: dict[str, Any], index: int = 0) -> list[TrainedText]:
        """One text, or more if the template rewrites earlier turns. `index`: of the row in its source. Raises
        PromptError."""
        for name, remedy in UNREAD.items():
            if row.get(name):
                raise PromptError(f"the row has {name}, which supervised fine-tuning does not read; {remedy}")
        given = row.get("messages") or row.get("prompt") or row.get("problem")
        if self.prompts.form and not row.get(IMAGES) and num_slots(given):
            self.marked.append(index)
        row, pictures = self.prompts.with_pictures(row) if row.get(IMAGES) else (row, [])
        chat, trained = self._chat(row) if "messages" in row else self._pair(row)
        if not trained:
            raise PromptError(f"no message is trained with {self.section}.turns: {self.turns}; correct it or the row")
        for number in trained:
            _require_text(number, chat[number])
        drafts = [self._plain(chat, trained)] if self.prompts.plain else self._rendered(chat, trained)
        texts = [self._finished(draft, chat, pictures, index) for draft in drafts]
        if not all(text.trained.any() for text in texts):
            raise PromptError("no token of it is trained: the tokenizer makes no tokens of what is before its answer")
        return texts

    def _pair(self, row: Mapping[str, Any]) -> tuple[Chat, list[int]]:
        answer = row["answer"]
        if not isinstance(answer, str):
            raise PromptError(f"the answer of the row is {answer!r:.40}; a text is needed")
        chat = self.prompts.messages(dict(row))
        if chat[-1]["role"] == "assistant":
            raise PromptError("its prompt ends with a message of the assistant; make that the beginning of the answer")
        return [*chat, {"role": "assistant", "content": whole("the answer of the row", answer)}], [len(chat)]

    def _chat(self, row: Mapping[str, Any]) -> tuple[Chat, list[int]]:
        given = row["messages"]
        if not isinstance(given, list) or not given:
            raise PromptError(f"the messages of the row are {given!r:.40}; a list of messages is needed")
        if self.formats:
            raise PromptError("the row has messages, and data.format_prompt is for rows of prompt and answer")
        flags: list[bool | None] = [_flag(number, message) for number, message in enumerate(given)]
        bare = [{k: v for k, v in one.items() if k != FLAG} if isinstance(one, Mapping) else one for one in given]
        chat = self.prompts.messages({"prompt": bare, IMAGES: row.get(IMAGES)})
        added: list[bool | None] = [None] * (len(chat) - len(flags))  # a system prompt of the run file
        return chat, self._chosen(chat, [*added, *flags])

    def _chosen(self, chat: Chat, flags: Sequence[bool | None]) -> list[int]:
        answers = [number for number, message in enumerate(chat) if message["role"] == "assistant"]
        flagged = [number for number, flag in enumerate(flags) if flag]
        if self.turns != "flagged":
            if (first := next((number for number, flag in enumerate(flags) if flag is not None), None)) is not None:
                problem = f"message {first} has the key {FLAG}, but {self.section}.turns is {self.turns}"
                raise PromptError(f"{problem}; set {self.section}.turns: flagged, or leave the key out")
            return answers if self.turns == "all" else answers[-1:]
        if foreign := [number for number in flagged if number not in answers]:
            role = chat[foreign[0]]["role"]
            raise PromptError(f"message {foreign[0]} has train: true and the role {role}; only answers are trained")
        return flagged

    def _finished(self, draft: Draft, chat: Chat, pictures: Sequence[Picture], row: int) -> TrainedText:
        """Repeat each placeholder, one for each picture, for every token of its picture."""
        text, shown = draft.finish(), pictures[: sum(map(_num_images, chat[: draft.messages]))]
        places, sizes = text.tokens == self.placeholder, np.ones(len(text.tokens), np.int64)
        self.prompts.check_placeholders(int(places.sum()), len(shown))
        if (places & text.trained).any():
            raise PromptError("an answer that is trained has the placeholder of an image; leave it out")
        sizes[places] = [picture.num_tokens for picture in shown]
        starts = (sizes.cumsum() - sizes)[places].tolist()
        read = (ReadPicture(picture.digest, picture.grid, row, number) for number, picture in enumerate(shown))
        return TrainedText(text.tokens.repeat(sizes), text.trained.repeat(sizes), tuple(map(ReadImage, starts, read)))

    def _plain(self, chat: Chat, trained: Sequence[int]) -> Draft:
        if [*trained] != [len(chat) - 1] or any(one["role"] == "assistant" for one in chat[:-1]):
            raise PromptError("data.chat_template: none knows no turns, so a row has one answer, its last message")
        if unwritten := next((name for name in SAID if chat[-1].get(name)), None):
            raise PromptError(f"data.chat_template: none writes no {unwritten}; write it into the answer")
        *asked, last = flattened(chat)
        prompt, answer = self.prompts.plain_tokens(chat[:-1]), self._encoded(last["content"])
        joined = "".join(one["content"] for one in (*asked[-1:], last))
        together = self.prompts.plain_tokens([*asked[:-1], {"content": joined}])
        self._require_same(self.prompts.without_end([*prompt, *answer]), together)
        sampled = answer[: self._stop(answer, len(chat) - 1)] or [*answer, self.end]
        pieces = [(prompt, False), (sampled, True)]
        return Draft("", pieces, len(chat))

    def _rendered(self, chat: Chat, trained: Sequence[int]) -> list[Draft]:
        drafts: list[Draft] = []
        for number in trained:
            if number == 0:
                raise PromptError("message 0 is an answer, and nothing before it asks for one; leave it untrained")
            before = self.prompts.chat_text(chat[:number], header=True)
            after = self.prompts.chat_text(chat[: number + 1], header=False)
            if not after.startswith(before):
                problem = f"the chat template writes what is before message {number} in another way once that follows"
                raise PromptError(f"{problem}, so no server would answer there; name another in data.chat_template")
            if not drafts or drafts[-1].closed or not before.startswith(drafts[-1].text):
                drafts.append(Draft())
            self._require_said(chat[: number + 1], after)
            self._add(drafts[-1], before, after, chat[number], number)
            if problem := left_out(flattened(chat[: number + 1]), after):
                raise PromptError(problem)
        for draft in drafts:
            self._require_joined(draft)
        return drafts

    def _add(self, draft: Draft, before: str, after: str, message: Mapping[str, Any], number: int) -> None:
        answer = after[len(before) :]
        if "".join(message["content"].split()) not in "".join(answer.split()):
            problem = f"the chat template leaves out or rewords a part of message {number}, which is trained"
            raise PromptError(f"{problem}; write it as the template does, or name another in data.chat_template")
        given, tokens = self._encoded(before[len(draft.text) :]), self._encoded(answer)
        stop = self._stop(tokens, number)
        end = stop or len(tokens)
        while end and tokens[end - 1] not in self.ends and not str(self.tokenizer.decode(tokens[end - 1])).strip():
            end -= 1
        draft.pieces.append((given, False))
        draft.messages = number + 1
        if end and tokens[end - 1] in self.ends:
            draft.pieces += [(tokens[:end], True), (tokens[end:], False)]  # no server samples what is behind its end
            draft.text = after
        else:
            ending = answer if answer.endswith(message["content"]) else answer.rstrip()
            draft.pieces.append(([*self._encoded(ending), self.end], True))
            draft.text, draft.closed = before + ending, True

    def _stop(self, tokens: Sequence[int], number: int) -> int:
        """How many of an answer's tokens a server samples before it stops; 0 if it stops at none of them."""
        end = next((place for place, token in enumerate(tokens, 1) if token in self.stops), 0)
        behind = [token for token in tokens[end:] if token not in self.ends] if end else []
        if str(self.tokenizer.decode(behind)).strip():
            name = self.tokenizer.convert_ids_to_tokens(tokens[end - 1])
            problem = f"message {number}, which is trained, goes on behind {name}, at which a server stops"
            raise PromptError(f"{problem}; leave it out, or make what is behind it messages of their own")
        return end

    def _require_said(self, chat: Chat, after: str) -> None:
        """Raise PromptError if the template ignores a key of the last message that is for what the model says."""
        last, number = chat[-1], len(chat) - 1
        for names in (SAID[:1], SAID[1:]):
            given = [name for name in names if last.get(name)]
            if given and self._is_written_as([*chat[:-1], {k: v for k, v in last.items() if k not in given}], after):
                problem = f"the chat template leaves out {given[0]} of message {number}, which is trained"
                raise PromptError(f"{problem}; write it into its content, or name another in data.chat_template")

    def _is_written_as(self, chat: Chat, text: str) -> bool:
        try:
            return self.prompts.chat_text(chat, header=False) == text
        except PromptError:
            return False

    def _encoded(self, text: str) -> list[int]:
        return list(self.tokenizer.encode(self.prompts.marked(text), add_special_tokens=False))

    def _require_joined(self, draft: Draft) -> None:
        """Raise PromptError for a tokenizer that writes pieces of a text in another way."""
        tokens = [token for ids, _ in draft.pieces for token in ids]
        self._require_same(tokens[:-1] if draft.closed else tokens, self._encoded(draft.text))

    def _require_same(self, apart: Sequence[int], whole: Sequence[int]) -> None:
        pieces, together = map(self.tokenizer.convert_ids_to_tokens, ([*apart], [*whole]))
        if "".join(pieces) != "".join(together):
            problem = "the tokenizer changes a text, as by a space before it, where an answer is encoded apart"
            raise PromptError(f"{problem} from its prompt; take a model with a byte-level tokenizer")


def _require_text(number: int, answer: Mapping[str, Any]) -> None:
    content = answer["content"]
    if not isinstance(content, str):
        problem = f"message {number} is an answer with an image, and only text is trained"
        raise PromptError(f"{problem}; leave the image out, or do not train the message")
    if not (content.strip() or answer.get("tool_calls")):
        raise PromptError(f"message {number} is an answer without text, so there is nothing to train in it")


def _num_images(message: Mapping[str, Any]) -> int:
    content = message["content"]
    return 0 if isinstance(content, str) else sum(part["type"] == "image" for part in content)


def _flag(number: int, message: Any) -> bool | None:
    if not isinstance(message, Mapping):
        return None
    for name, remedy in FOREIGN.items():
        if message.get(name) is not None:
            raise PromptError(f"message {number} has the key {name}; {remedy}")
    flag = message.get(FLAG)
    if flag is not None and not isinstance(flag, bool):
        raise PromptError(f"message {number} has {FLAG}: {flag!r:.20}; true or false is needed")
    return flag
