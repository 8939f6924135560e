"""Random conversations on a scripted engine: every sampled token is trained exactly once, with the context, version and
log-probability that the engine's own log has of it.
"""

import asyncio
import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollout.chat.session import Reply
from tests.rollout.chat.scripted import Scene, check_against_log, scene

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add",  "arguments": {"b": 12, "a": "th"}}</tool_call>'
SAID = ["ok", "abc ok 12", "", " a \n\nth ", "12 </answer> more", "ok" * 150, "über ✓"]
Messages = list[dict[str, Any]]


class Client:
    """One that does what clients do: goes on, calls tools, edits, asks again, gives up, loses answers."""

    def __init__(self, made: Scene, source: random.Random, calls: int) -> None:
        self.made, self.source, self.most_calls = made, source, calls
        self.histories: list[Messages] = []
        self.withdrawn: set[int] = set()

    def script(self, prompt: str) -> str:
        """What the policy says."""
        choose = self.source.random
        said = self.source.choice(SAID)
        calls = CALL * self.source.randint(1, self.most_calls) if choose() < 0.3 else ""
        thought = f"<think>\n{self.source.choice(['th', 'abc 12'])}\n</think>\n\n" if choose() < 0.5 else ""
        self.made.engine.swaps = tuple(self.source.sample(range(8), self.source.randint(0, 2)))
        return thought + ("" if calls and self.most_calls == 1 else said) + calls

    async def ask(self, messages: Messages, repeated: bool = False) -> Reply:
        """One request; the history with its answer can be gone on with."""
        length = self.source.choice([None, None, 3, 40])
        reply = await self.made.session.chat(self.rewritten(messages), [TOOL], max_tokens=length, repeated=repeated)
        self.histories.append([*messages, reply.message])
        return reply

    def call_of(self, reply: Reply) -> int:
        """Which call of the engine's log it was."""
        first = reply.turn.completion.logprobs[0]
        return next(number for number, call in enumerate(self.made.engine.log) if call.logprobs[0] == first)

    def rewritten(self, messages: Messages) -> Messages:
        """The same messages in the words of another client."""
        how, found = self.source.randint(0, 3), []
        for message in messages:
            drop = ("reasoning", "reasoning_content") if how else ()
            one = {name: value for name, value in message.items() if name not in drop}
            if how == 1:
                one["content"] = [{"type": "text", "text": one["content"]}]
            if how == 2 and not one["content"]:
                one["content"] = None
            if how == 3 and "tool_calls" in one:
                one["tool_calls"] = [
                    call | {"function": call["function"] | {"arguments": json.dumps(
                        json.loads(call["function"]["arguments"]), indent=2, sort_keys=True
                    )}}
                    for call in one["tool_calls"]
                ]  # fmt: skip
            found.append(one)
        return found

    def followed(self, history: Messages) -> Messages:
        """The history with what comes after its last answer."""
        if calls := history[-1].get("tool_calls"):
            answers = [{"role": "tool", "tool_call_id": call["id"], "content": self.text()} for call in calls]
            return [*history, *answers]
        return [*history, {"role": "user", "content": self.text()}]

    def text(self) -> str:
        return self.source.choice(["ab", "12 ok", "more\n\nabc", "<think>"])

    async def step(self, what: str) -> None:
        engine = self.made.engine
        engine.version += self.source.randint(0, 1)
        begun = [{"role": "user", "content": self.text()}]
        messages = self.followed(self.source.choice(self.histories)) if self.histories and what != "begin" else begun
        if what == "several":
            await asyncio.gather(*(self.ask(messages) for _ in range(3)))
        elif what == "side by side":
            await asyncio.gather(self.ask(messages), self.ask(begun), self.ask([*begun, *messages[1:]]))
        elif what == "edited":
            await self.ask([{"role": "user", "content": "edited"}, *messages[1:]])
        elif what == "cancelled":
            engine.gate.clear()
            asking, before = asyncio.create_task(self.ask(messages)), engine.begun
            while engine.begun == before:
                await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            engine.gate.set()
            await self.ask(messages, repeated=True)
        elif what == "lost":
            reply = await self.ask(messages)
            self.histories.pop()
            self.withdrawn.add(self.call_of(reply))
            if self.source.random() < 0.5:
                self.made.session.withdraw(reply.turn)
            await self.ask(messages, repeated=True)
        else:
            await self.ask(messages)


FAST = {("qwen3", False), ("llama3", False)}
"""The templates of the fast lane: one that drops reasoning, and one with a single call."""


@pytest.mark.parametrize(
    ("name", "calls", "keep"),
    [
        pytest.param(name, 1 if name == "llama3" else 3, keep, marks=() if (name, keep) in FAST else pytest.mark.long)
        for name in ("chatml", "qwen2.5", "qwen3", "llama3", "mistral", "base", "r1", "turns")
        for keep in (False, True)
    ],
)
@settings(max_examples=12)
@given(
    steps=st.lists(
        st.sampled_from(["begin", "go on", "go on", "go on", "several", "side by side", "edited", "cancelled", "lost"]),
        min_size=1,
        max_size=8,
    ),
    seed=st.integers(0, 2**32),
)
def test_each_sampled_token_is_trained_once_as_the_engine_sampled_it(
    name: str, calls: int, keep: bool, steps: list[str], seed: int
) -> None:
    async def play() -> None:
        made = scene(name, lambda prompt: client.script(prompt), keep=keep)
        client = Client(made, random.Random(seed), calls)
        for what in steps:
            await client.step(what)
        made.session.close()
        recorded = made.session.recorded(1.0)
        kept = set(range(len(made.engine.log))) - client.withdrawn
        check_against_log(recorded.trajectory, made.engine.log, kept)
        assert recorded.trajectory.metrics["turns"] == len(kept)

    asyncio.run(play())
