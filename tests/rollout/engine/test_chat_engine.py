"""Chat on the real vLLM: what was recorded of a conversation is what an independent forward pass computes, a policy
loaded between two turns changes the versions, not the history in the prefix cache, and an agent by URL gets tool calls.
"""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from configs.schema import Config
from rollout.cage.user_task import UserTask
from rollout.chat.session import ChatLimits, Session, Sessions, TextParser
from rollout.chat.template import ChatTemplate
from rollout.episodes.episode import Failure, Group
from rollout.episodes.prompts import Prompts
from rollout.episodes.sampler import Sampler
from rollout.episodes.setup import RolloutSetup, open_sessions
from rollout.tasks import Problem
from rollout.tasks.trajectory import Trajectory
from tests.harness.engines import DENSE_VOCABULARY, SharedEngine
from tests.rollout.chat.chat_templates import chat_tokenizer
from tests.rollout.chat.scripted import segments
from tests.rollout.engine import adding

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.xdist_group("vllm-dense")]


def make_model(folder: Any) -> Any:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=DENSE_VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, initializer_range=0.2, bos_token_id=None,
        eos_token_id=None,
    )  # fmt: skip
    model = Qwen2ForCausalLM(config).float()
    model.save_pretrained(folder)
    chat_tokenizer("chatml").save_pretrained(folder)
    return model.eval()


def make_config(folder: Any, **rollout: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"train": "train.parquet", "max_prompt_tokens": 100},
            "reward": {"function": "task"} if rollout else {"function": "countdown"},
            "sampling": {"max_tokens": 80 if rollout else 40},
            "rollout": {"device": "cpu", "max_sample_tokens": 900} | rollout,
        }
    )


@torch.no_grad()
def scores(model: Any, tokens: list[int]) -> list[float]:
    """Log-probabilities of `tokens[1:]` by transformers."""
    logits = model(torch.tensor([tokens])).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()


async def talk(session: Session, turns: int, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    for turn in range(turns):
        asked = [*messages, user(turn)]
        messages = [*asked, (await session.chat(asked)).message]
    return messages


def user(turn: int) -> dict[str, Any]:
    return {"role": "user", "content": f"{turn} What is 12 times {turn}? " * 3}


async def cached(engine: Any, tokens: list[int], salt: str) -> int:
    """How many of these tokens vLLM has in its prefix cache under this salt."""
    from vllm import SamplingParams

    found = 0
    parameters = SamplingParams(max_tokens=1, detokenize=False)
    async for output in engine._llm.generate({"prompt_token_ids": tokens, "cache_salt": salt}, parameters, f"c{salt}"):
        found = output.num_cached_tokens
    return found


async def play(engine: Any, folder: Any) -> SimpleNamespace:
    """The scenario; returns what happened."""
    seen, config, model = SimpleNamespace(), make_config(folder), make_model(folder)
    await load(engine, folder, 3)
    prompts = Prompts(chat_tokenizer("chatml"), config)
    template = ChatTemplate(prompts)
    sampler = Sampler(engine, prompts, 1.0, 40, 900)
    sessions = Sessions(template, TextParser(template), ChatLimits(900, 40, 64, 4000))
    problem = Problem({}, [], prompts.tokenizer, 900)
    salt = engine.salt

    session = sessions.open(sampler.generate_for(problem, salt), problem)
    messages = await talk(session, 4, [])
    await asyncio.gather(*(session.chat([*messages[:2], user(9)]) for _ in range(2)))  # branches
    seen.still = session.recorded(None).trajectory
    seen.scores = [scores(model, [seen.still.tokens[at] for at in segment]) for segment in segments(seen.still)]

    session = sessions.open(sampler.generate_for(problem, salt), problem)
    messages = await talk(session, 2, [])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * parameter.std() * torch.randn(parameter.shape))
    model.save_pretrained(folder / "next")
    await load(engine, folder / "next", 4)
    held = session.recorded(None).trajectory.tokens
    await talk(session, 1, messages)
    seen.swapped = session.recorded(None).trajectory
    seen.cached = await cached(engine, held, salt), await cached(engine, held, engine.salt)
    seen.held = len(held)

    session = sessions.open(sampler.generate_for(problem, engine.salt), problem)
    await talk(session, 2, [])
    seen.anew = session.recorded(None).trajectory
    seen.anew_scores = scores(model, seen.anew.tokens)
    seen.called = await call_tools(engine, model.config, folder / "adding")
    return seen


async def call_tools(engine: Any, like: Any, folder: Any) -> list[Group | Failure]:
    """A group for each of the rows by the agent of adding.py, whose model calls a tool: two greedy samples each."""
    tokenizer = chat_tokenizer("qwen2.5")
    adding.teach(Qwen2Config(**like.to_dict() | {"initializer_range": 0.05}), tokenizer, folder)
    await load(engine, folder, 5)
    config = make_config(folder, task=f"{adding.__file__}:solve", chat={"tool_parser": "hermes"}, task_workers=1)
    prompts = Prompts(tokenizer, config)
    setup = RolloutSetup(prompts, UserTask(config, open_sessions(config, prompts)), None)
    async with setup:
        episodes = setup.episodes(config, engine, 0.0, 2)
        return list(await asyncio.gather(*(episodes.attempt(row) for row in adding.ROWS)))


async def load(engine: Any, folder: Any, version: int) -> None:
    """A policy from a folder, as the weights wire would load it."""
    await engine.load_folder(folder)
    await engine.collective("rl_stamp", version, timeout_s=60)
    engine.version = version


@pytest.fixture(scope="module")
def seen(dense_engine: SharedEngine, tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    folder = tmp_path_factory.mktemp("model")
    return dense_engine.play(lambda engine: play(engine, folder))


def largest_difference(trajectory: Trajectory, segment: range, theirs: list[float]) -> float:
    """Largest difference of the sampled tokens' log-probabilities."""
    pairs = [(trajectory.logprobs[at], theirs[at - segment.start - 1]) for at in segment if trajectory.sampled[at]]
    return max(abs(ours - other) for ours, other in pairs)


def test_recorded_log_probabilities_are_those_of_a_forward_pass_over_each_segment(seen: SimpleNamespace):
    places = segments(seen.still)
    assert len(places) == 3 and sum(seen.still.sampled) >= 4 + 2
    for segment, theirs in zip(places, seen.scores, strict=True):
        assert largest_difference(seen.still, segment, theirs) < 1e-3
    assert {version for version in seen.still.versions if version >= 0} == {3}


def test_a_policy_loaded_between_two_turns_samples_the_next_one_on_the_cached_history(seen: SimpleNamespace):
    versions = [version for version in seen.swapped.versions if version >= 0]
    assert set(versions) == {3, 4} and versions == sorted(versions) and len(seen.swapped.starts) == 1
    under_the_group_s_salt, under_the_new_one = seen.cached
    assert under_the_group_s_salt >= seen.held // 2 and under_the_new_one == 0


def test_a_new_group_uses_nothing_that_the_old_policy_computed(seen: SimpleNamespace):
    assert {version for version in seen.anew.versions if version >= 0} == {4}
    assert largest_difference(seen.anew, range(len(seen.anew.tokens)), seen.anew_scores) < 1e-3


def test_an_agent_by_url_gets_the_tool_calls_that_the_model_makes(seen: SimpleNamespace):
    """Sampled by vLLM, read by its parser, sent through the door, made by the agent and answered: one segment."""
    tokenizer = chat_tokenizer("qwen2.5")
    for row, group in zip(adding.ROWS, seen.called, strict=True):
        assert isinstance(group, Group), group
        for sample in group.samples:
            tokens, own = sample.tokens.numpy().tolist(), sample.sampled.numpy().nonzero()[0].tolist()
            assert tokenizer.decode(tokens) == adding.text_of(tokenizer, row)
            assert own == adding.sampled(tokenizer, tokens)
            assert {int(sample.versions.numpy()[place]) for place in own} == {5} and sample.reward == 1.0
            counted = {name: sample.metrics[name] for name in ("calls", "turns", "segments", "bad_tool_calls")}
            assert counted == {"calls": 1.0, "turns": 2.0, "segments": 1.0, "bad_tool_calls": 0.0}
