"""A sample as people read it: segment by segment what was given and what was sampled.

A text that names its speakers as ChatML, Llama 3 or Gemma do is split into messages.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.text import Text

from buffer.wire.sample import Sample
from configs.plain_text import visible

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPEAKER = re.compile(r"(?:<\|im_start\|>|<start_of_turn>)(\w+)\n|<\|start_header_id\|>(\w+)<\|end_header_id\|>\n*")
STARTS = ("<|im_start|>", "<start_of_turn>", "<|start_header_id|>")
END = re.compile(r"(?:<\|im_end\|>|<end_of_turn>|<\|eot_id\|>)?\s*$")
CALL = re.compile(r"(<tool_call>.*?(?:</tool_call>|$)|<function=.*?(?:</function>|$)|\[TOOL_CALLS\].*)", re.DOTALL)
CALLED = re.compile(r'"name"\s*:\s*"([^"]+)"|<function=([^>\s]+)>')
SHOWN_CHARS = 2000


class Stretch(NamedTuple):
    text: str
    is_call: bool


@dataclass(frozen=True)
class Passage:
    speaker: str
    """As the text names it; "" where it does not."""
    text: str
    """"" without a tokenizer."""
    tokens: int
    turn: int | None = None
    """From 1; None: given, not trained."""
    versions: tuple[int, int] = (-1, -1)
    logprob: float = 0.0
    reward: float | None = None

    @property
    def title(self) -> str:
        if self.turn is None:
            return f"{self.speaker}: {self.tokens} tokens, given" if self.speaker else f"given: {self.tokens} tokens"
        oldest, newest = self.versions
        under = f"version {oldest}" if oldest == newest else f"versions {oldest} to {newest}"
        known = [f"turn {self.turn}: {self.tokens} tokens, trained", under, f"mean log-probability {self.logprob:.2f}"]
        known += [] if self.reward is None else [f"reward {self.reward:g}"]
        known += [f"calls {', '.join(self.called)}"] if self.called else []
        return ", ".join([f"{self.speaker} {known[0]}".strip(), *known[1:]])

    @property
    def called(self) -> list[str]:
        calls = "".join(piece.text for piece in self.pieces if piece.is_call) if self.turn else ""
        return [name or other for name, other in CALLED.findall(calls)]

    @property
    def pieces(self) -> list[Stretch]:
        parts = enumerate(CALL.split(self.text) if self.turn else [self.text])
        return [Stretch(text, number % 2 == 1) for number, text in parts if text]

    def folded(self, most: int = SHOWN_CHARS) -> "Passage":
        if len(self.text) <= most:
            return self
        left_out = f"\n[... {len(self.text) - most:,} characters ...]\n"
        return replace(self, text=self.text[: most * 2 // 3] + left_out + self.text[-(most - most * 2 // 3) :])


@dataclass(frozen=True)
class Chapter:
    """`repeated` says how the segment begins as an earlier one; that is not in `passages`."""

    title: str
    repeated: str
    passages: list[Passage]


def chapters(sample: Sample, tokenizer: "Tokenizer | None") -> list[Chapter]:
    found, whole, turn = list[Chapter](), list[list[Passage]](), 0
    for number, (start, stop) in enumerate(sample.bounds, 1):
        passages = list(_passages(sample, start, stop, tokenizer, turn))
        turn = max((passage.turn for passage in passages if passage.turn), default=turn)
        same, before = max(((_common(passages, other), -k) for k, other in enumerate(whole, 1)), default=(0, 0))
        whole.append(passages)
        tokens = sum(passage.tokens for passage in passages[:same])
        repeated = f"begins as segment {-before} does: {same} messages, {tokens} tokens, given" if same else ""
        title = f"segment {number} of {len(sample.starts)}: {stop - start} tokens" if len(sample.starts) > 1 else ""
        found.append(Chapter(title, repeated, passages[same:]))
    return found


def lines(read: Sequence[Chapter], full: bool = False) -> Iterator[Text]:
    """`full`: fold no passage."""
    for chapter in read:
        if chapter.title:
            yield Text(f"  {chapter.title}", "bold underline")
        if chapter.repeated:
            yield Text(f"  {chapter.repeated}", "dim italic")
        for passage in chapter.passages:
            shown = passage if full else passage.folded()
            yield Text(f"  {passage.title}", "bold green" if passage.turn else "bold")
            body = Text.assemble(*((piece.text, "cyan" if piece.is_call else "") for piece in shown.pieces))
            yield from (Text("    ").append_text(line) for line in body.split("\n") if shown.text)


def _passages(sample: Sample, start: int, stop: int, tokenizer: "Tokenizer | None", turns: int) -> Iterator[Passage]:
    tokens, sampled, versions, logprobs = (
        array.numpy()[start:stop]
        for array in (sample.tokens, sample.sampled, sample.versions, sample.behaviour_logprobs)
    )
    place, speaker = 0, ""
    for own, run in groupby((sampled != 0).tolist()):
        part = slice(place, place := place + len(list(run)))
        if own:
            turns += 1
            under = versions[part]
            reward = sample.turn_rewards[turns - 1] if sample.turn_rewards else None
            text = _text(tokens[part], tokenizer)
            known = turns, (int(under.min()), int(under.max())), float(logprobs[part].mean()), reward
            yield Passage(speaker or "assistant", text, len(under), *known)
            speaker = ""
        else:
            for piece in _messages(tokens[part], tokenizer):
                text = _text(piece, tokenizer)
                if named := SPEAKER.match(text):
                    speaker, text = named[1] or named[2], text[named.end() :]
                text = END.sub("", text)
                if text or tokenizer is None:
                    yield Passage(speaker, text, len(piece))


def _messages(tokens: np.ndarray, tokenizer: "Tokenizer | None") -> list[np.ndarray]:
    starts = [tokenizer.token_to_id(start) for start in STARTS] if tokenizer else []
    cuts = np.flatnonzero(np.isin(tokens, [start for start in starts if start is not None]))
    return [piece for piece in np.split(tokens, cuts) if piece.size]


def _text(tokens: np.ndarray, tokenizer: "Tokenizer | None") -> str:
    known = tokens[tokens >= 0].tolist()  # a group in quarantine may have others
    text = tokenizer.decode(known, skip_special_tokens=False) if tokenizer else ""
    return visible(text, 16 * len(text) + 1)  # the caller shortens it


def _common(passages: Sequence[Passage], others: Sequence[Passage]) -> int:
    """`others` may have been sampled."""
    number = 0
    for ours, theirs in zip(passages, others, strict=False):
        if ours.turn or not ours.text or (ours.speaker, ours.text) != (theirs.speaker, END.sub("", theirs.text)):
            break
        number += 1
    return number
