"""An engine that follows a script and keeps its own log of what it was given and gave, and a parser of tags."""

import asyncio
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from configs.load import load
from rollout.chat.session import ChatLimits, Session, Sessions
from rollout.chat.template import ChatTemplate
from rollout.episodes.prompts import Prompts
from rollout.tasks import ChatRefused, Completion, Problem, Trajectory
from tests.rollout.chat.chat_templates import chat_tokenizer

RUN = Path(__file__).parents[3] / "examples/countdown/quickstart.yaml"
LIMITS = ChatLimits(context=4000, answer=200, turns=100, tokens=100_000)


@dataclass
class Call:
    """One call of the engine: what it saw and what it sampled."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass
class ScriptedEngine:
    """Answers with `script(text of the prompt)`, a text, or with its tokens; every log-probability is another one, and
    so names its token. The version rises within an answer at each place of `swaps`."""

    tokenizer: Any
    script: Callable[[str], "str | list[int]"]
    log: list[Call] = field(default_factory=list)
    version: int = 5
    swaps: tuple[int, ...] = ()
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()
        self.sampled = self.begun = 0

    async def generate(self, tokens: list[int], max_tokens: int | None = None, **options: Any) -> Completion:
        """Stands for `generate` of a task."""
        assert max_tokens is not None and not options
        self.begun += 1
        given = list(tokens)
        await self.gate.wait()
        said = self.script(self.tokenizer.decode(given))
        if isinstance(said, str):
            said = [token for part in re.split(r"(<[^>]+>)", said) for token in self._apart(part)]
            said = [*said, self.tokenizer.eos_token_id]
        stops = {self.tokenizer.eos_token_id, self.tokenizer.convert_tokens_to_ids("</answer>")}
        ended = next((place + 1 for place, token in enumerate(said) if token in stops), len(said) + 1)
        said, finish = said[: min(ended, max_tokens)], "stop" if ended <= max_tokens else "length"
        versions = []
        for place in range(len(said)):
            self.version += place in self.swaps
            versions.append(self.version)
        logprobs = [-(self.sampled + place + 1) / 1024 for place in range(len(said))]
        self.sampled += len(said)
        self.log.append(Call(given, said, logprobs, versions))
        return Completion(list(said), list(logprobs), list(versions), finish)  # type: ignore[arg-type]

    def _apart(self, text: str) -> list[int]:
        """Tokens that no encoder would choose: one a character."""
        if text.startswith("<") and self.tokenizer.convert_tokens_to_ids(text) is not None:
            return list(self.tokenizer.encode(text, add_special_tokens=False))
        return [token for letter in text for token in self.tokenizer.encode(letter, add_special_tokens=False)]


class TagParser:
    """Reads `<think>` and Hermes' `<tool_call>`, as vLLM's parsers do."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.calls = tokenizer, 0

    def check(self, tools: Any) -> None:
        if any("function" not in tool for tool in tools or ()):
            raise ChatRefused("tools.0.function: Field required")

    def message(self, tokens: list[int], tools: Any) -> tuple[dict[str, Any], int]:
        text = self.tokenizer.decode(tokens, skip_special_tokens=False)
        thought, found, said = text.partition("</think>")
        message: dict[str, Any] = {"role": "assistant", "content": (said if found else text).strip("\n")}
        if found:
            thought = thought.removeprefix("<think>").strip("\n")
            message |= {"reasoning": thought, "reasoning_content": thought}
        calls, bad = [], 0
        for body in re.findall(r"<tool_call>(.*?)</tool_call>", message["content"], re.DOTALL) if tools else []:
            try:
                call = json.loads(body)
                function = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            except ValueError:
                bad += 1
                continue
            self.calls += 1
            calls.append({"id": f"{self.calls:09}", "type": "function", "function": function})
        if calls:
            rest = re.sub(r"<tool_call>.*?</tool_call>", "", message["content"], flags=re.DOTALL)
            message |= {"tool_calls": calls, "content": rest.strip()}
        return message, bad


@dataclass
class Scene:
    """A session on a scripted engine."""

    engine: ScriptedEngine
    session: Session
    template: ChatTemplate


def scene(
    name: str,
    script: Callable[[str], "str | list[int]"],
    limits: ChatLimits = LIMITS,
    keep: bool = False,
    kwargs: dict[str, Any] | None = None,
    *overrides: str,
) -> Scene:
    """A session with the template `name`, on an engine that follows `script`."""
    tokenizer = chat_tokenizer(name)
    template = ChatTemplate(Prompts(tokenizer, load([str(RUN), *overrides])), keep, kwargs)
    engine = ScriptedEngine(tokenizer, script)
    sessions = Sessions(template, TagParser(template.tokenizer), limits)
    return Scene(engine, sessions.open(engine.generate, Problem({}, [], template.tokenizer, limits.context)), template)


def segments(trajectory: Trajectory) -> list[range]:
    """The places of each segment's tokens."""
    bounds = [*trajectory.starts, len(trajectory.tokens)]
    return [range(begin, end) for begin, end in pairwise(bounds)]


def check_against_log(trajectory: Trajectory, log: list[Call], kept: set[int]) -> None:
    """Each token that the calls `kept` of the log sampled is trained exactly once, with the context that the engine
    saw, its log-probability and its version; nothing else is trained."""
    named = {value: (number, place) for number, call in enumerate(log) for place, value in enumerate(call.logprobs)}
    seen: list[tuple[int, int]] = []
    for segment in segments(trajectory):
        assert not trajectory.sampled[segment.start] and any(trajectory.sampled[segment.start : segment.stop])
        for at in segment:
            if not trajectory.sampled[at]:
                assert (trajectory.logprobs[at], trajectory.versions[at]) == (0.0, -1)
                continue
            number, place = named[trajectory.logprobs[at]]
            call = log[number]
            assert trajectory.tokens[segment.start : at] == call.prompt + call.tokens[:place]
            assert (trajectory.tokens[at], trajectory.versions[at]) == (call.tokens[place], call.versions[place])
            seen.append((number, place))
    assert len(seen) == len(set(seen))
    assert set(seen) == {(number, place) for number in kept for place in range(len(log[number].tokens))}
    assert trajectory.sampled.index(1) == trajectory.start
