"""One episode as chat: the sender sees only messages; tokens, log-probabilities and versions stay here."""

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Protocol

from rollout.chat.conversation import Conversation, RecordedTurn
from rollout.chat.messages import ChatRequest, Message, extended, read_message
from rollout.chat.template import ChatTemplate, Tools
from rollout.errors import ChatRefused, EngineDead, EpisodeError
from rollout.tasks.trajectory import Generate, Problem, Recorded

CALLS_PER_TURN = 4
"""Calls that an episode may begin for each answer."""
Answered = tuple[RecordedTurn, dict[str, Any], int]
"""Turn, message, number of malformed tool calls."""


@dataclass(frozen=True)
class ChatLimits:
    """Beyond them `chat` raises ChatRefused and the episode is truncated."""

    context: int
    """Tokens that one call sees and samples."""
    answer: int
    turns: int
    tokens: int
    timeout_s: float | None = None


@dataclass(frozen=True)
class Reply:
    """An answer. `message` has `reasoning`, the same as `reasoning_content`, and OpenAI's `tool_calls` if any."""

    message: dict[str, Any]
    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    turn: RecordedTurn


class AnswerParser(Protocol):
    """Reads sampled tokens in the template's thread."""

    def check(self, tools: Tools) -> None:
        """Raises ChatRefused for tools that `message` cannot take."""

    def message(self, tokens: list[int], tools: Tools) -> tuple[dict[str, Any], int]:
        """Return the message, without its end token, and the number of malformed tool calls."""


class TextParser:
    """Takes the answer as its text."""

    def __init__(self, template: ChatTemplate) -> None:
        self._tokenizer = template.tokenizer

    def check(self, tools: Tools) -> None: ...

    def message(self, tokens: list[int], tools: Tools) -> tuple[dict[str, Any], int]:
        return {"role": "assistant", "content": self._tokenizer.decode(tokens, skip_special_tokens=True)}, 0


class Session:
    """One episode as chat."""

    def __init__(self, generate: Generate, template: ChatTemplate, parser: AnswerParser, limits: ChatLimits) -> None:
        self._generate, self._template, self._parser, self._limits = generate, template, parser, limits
        self._conversation, self._began = Conversation(), time.monotonic()
        self._calls: dict[asyncio.Task[Answered], tuple[RecordedTurn | None, int]] = {}
        """The turn that each call continues, and the tokens that it may add."""
        self._bad_calls = self._begun = 0
        self._closed, self._limit = False, ""
        self.truncated = False
        self.error: EpisodeError | EngineDead | None = None
        """A failure of the infrastructure, which fails the episode, whatever it returns."""

    async def chat(
        self, messages: Any, tools: Any = None, *, max_tokens: int | None = None, repeated: bool = False
    ) -> Reply:
        """Sample the answer to `messages`.

        `repeated`: the client lost the earlier answer, which is not trained on. Raises ChatRefused for malformed
        messages and used-up limits; EpisodeError, EngineDead for failures of the infrastructure.
        """
        self._check_open()
        self._begun += 1
        if self._begun > CALLS_PER_TURN * self._limits.turns:
            most = f"{CALLS_PER_TURN * self._limits.turns} calls ({CALLS_PER_TURN} times rollout.chat.max_turns)"
            self._exhausted(f"this episode has used its {most}, with those that were refused or given up", "turns")
        if max_tokens is not None and (type(max_tokens) is not int or max_tokens < 1):
            raise ChatRefused(f"max_tokens: {max_tokens!r:.40} is not a whole number >= 1")
        request = await self._template.aside(ChatRequest.read, messages, tools)
        if repeated:
            self._conversation.repeat(request.prefixes[-1])
        self._check_open()
        if len(self._conversation.turns) + len(self._calls) >= self._limits.turns:
            self._exhausted(f"this episode has used its {self._limits.turns} turns (rollout.chat.max_turns)", "turns")
        try:
            turn, message, bad_calls = await self._in_time(self._answer(request, max_tokens))
        except BaseException as error:
            if isinstance(error, EpisodeError | EngineDead):
                self.error = self.error or error
            self._conversation.lose(request.prefixes[-1])
            raise
        self._conversation.add(turn)
        self._bad_calls += bad_calls
        finish = "tool_calls" if message.get("tool_calls") else turn.completion.finish
        sampled = len(turn.completion.tokens)
        return Reply(message, finish, turn.length - sampled, sampled, turn)

    def withdraw(self, turn: RecordedTurn) -> None:
        self._conversation.withdraw(turn)

    def close(self) -> None:
        self._closed = True
        for call in self._calls:
            call.cancel()

    def recorded(self, result: Any) -> Recorded:
        """Score the episode by `result` (see `Recorded.of`). Raises EpisodeError, EngineDead."""
        if self.error:
            raise self.error
        turns = self._conversation.turns
        if not turns:
            why = f": {self._limit}" if self._limit else "; call chat at least once"
            raise EpisodeError(f"the episode ended without an answer of the model{why}")
        trajectory = self._conversation.trajectory()
        if self.truncated:
            trajectory.finish = "length"
        given = result.get("turn_rewards") if isinstance(result, dict) else None
        if isinstance(given, list | tuple) and len(given) == len(turns):  # given by answers, kept by segments
            by_turn = dict(zip(turns, given, strict=True))
            result = result | {"turn_rewards": [by_turn[turn] for turn in self._conversation.trained()]}
        recorded = Recorded.of(trajectory, result)
        trajectory.metrics |= {
            "turns": float(len(turns)),
            "segments": float(len(trajectory.starts)),
            "bad_tool_calls": float(self._bad_calls),
            "truncated": float(trajectory.finish == "length"),
        }
        return recorded

    def _check_open(self) -> None:
        if self.error:
            raise self.error
        if self._closed:
            raise ChatRefused("this episode has ended", "episode_ended")
        if self._left_s() is not None and self._left_s() == 0:
            self._out_of_time()

    def _left_s(self) -> float | None:
        limit = self._limits.timeout_s
        return None if limit is None else max(0.0, self._began + limit - time.monotonic())

    def _out_of_time(self) -> NoReturn:
        self._exhausted(f"this episode has used its {self._limits.timeout_s:g} s (rollout.chat.timeout_s)", "time")

    def _exhausted(self, reason: str, what: str) -> NoReturn:
        self.truncated, self._limit = True, reason
        code = "context_length_exceeded" if what == "context_length" else f"{what}_exceeded"
        raise ChatRefused(reason, code)

    async def _answer(self, request: ChatRequest, max_tokens: int | None) -> Answered:
        held, number = self._conversation.held(request.prefixes)
        parent, given, messages = await self._template.aside(self._prompt, request, held, number)
        prompt = [*(parent.tokens() if parent else ()), *given]
        others = [parent for parent, _ in self._calls.values()]
        branches = parent and (parent in others or parent not in self._conversation.leaves())
        added = len(prompt) if branches else len(given)
        taken = self._conversation.num_tokens() + sum(tokens for _, tokens in self._calls.values())
        room = min(self._limits.context - len(prompt), self._limits.tokens - taken - added)
        if room < 1:
            limits = f"a call has {self._limits.context} (rollout.max_sample_tokens), an episode {self._limits.tokens}"
            reason = f"this prompt of {len(prompt)} tokens leaves no room: {limits} (rollout.chat.max_tokens)"
            self._exhausted(reason, "context_length")
        wanted = min(max_tokens or self._limits.answer, self._limits.answer, room)
        call = asyncio.current_task()
        assert call in self._calls
        self._calls[call] = parent, added + wanted
        completion = await self._generate(prompt, max_tokens=wanted)
        ended = completion.finish == "stop" and completion.tokens[-1] in self._template.ends
        said = completion.tokens[:-1] if ended else completion.tokens
        message, bad_calls = await self._template.aside(self._parser.message, said, request.tools)
        answer, asked = read_message("answer", message), request.prefixes[-1]
        cut = completion.finish == "length" and len(completion.tokens) != max_tokens
        turn = RecordedTurn(parent, given, completion, [*messages, answer], asked, extended(asked, answer), cut)
        return turn, message, bad_calls

    def _prompt(
        self, request: ChatRequest, held: RecordedTurn | None, number: int
    ) -> tuple[RecordedTurn | None, list[int], list[Message]]:
        """Return the turn to continue, `held` if possible, whose messages are the first `number`; tokens to give;
        messages with our reasoning. Runs in the template's thread."""
        self._parser.check(request.tools)
        if held is None:
            return None, self._template.opening(request.messages, request.tools), request.messages
        new = request.messages[number:]
        messages = [*held.messages, *new]
        given = self._template.continuation(held.messages, held.tokens(), new, request.tools)
        if given is None:
            return None, self._template.opening(messages, request.tools), messages
        return held, given, messages

    async def _in_time(self, call: Coroutine[Any, Any, Answered]) -> Answered:
        calling = asyncio.create_task(call)
        self._calls[calling] = None, 0
        try:
            await asyncio.wait({calling}, timeout=self._left_s())
            if not calling.done():
                self._out_of_time()
            if calling.cancelled():
                raise ChatRefused("this episode has ended", "episode_ended")
            return calling.result()
        finally:
            calling.cancel()
            del self._calls[calling]


@dataclass(frozen=True)
class Sessions:
    """Opens a session for each sample."""

    template: ChatTemplate
    parser: AnswerParser
    limits: ChatLimits

    def open(self, generate: Generate, problem: Problem) -> Session:
        """A problem's set may have longer lengths than the run."""
        limits, context = self.limits, problem.left([])
        answer, tokens = problem.answer or limits.answer, limits.tokens + max(0, context - limits.context)
        limits = replace(limits, context=context, answer=answer, tokens=tokens)
        return Session(generate, self.template, self.parser, limits)
