"""The routes of a trajectory: of each sampled token, those of the call that sampled it."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollout.chat.conversation import Conversation, RecordedTurn
from rollout.episodes.recorded_routes import Continued, RecordedRoutes
from rollout.errors import EpisodeError
from rollout.rewards.convention import Score
from rollout.tasks import Completion, Trajectory
from tests.harness.fakes import FakeEngine, fake_sampler

PROMPT = [1, 2, 3]
TURNS = st.lists(st.tuples(st.lists(st.integers(0, 2), max_size=3), st.lists(st.integers(0, 2), min_size=1, max_size=3),
                           st.integers(0, 9)), min_size=1, max_size=8)  # fmt: skip


class Calls:
    """An engine whose rows are [[number of the call, digest of the tokens up to this one]]."""

    def __init__(self) -> None:
        self.routes, self.number = RecordedRoutes(), 0

    def generate(self, prompt: list[int], sampled: list[int]) -> Completion:
        at, tokens = self.routes.continued(prompt), prompt + sampled
        rows = [[[self.number + 1, digest(tokens[: place + 1])]] for place in range(at.routed, len(tokens) - 1)]
        self.number += 1
        logprobs = [-self.number / 1024] * len(sampled)
        made = Completion(sampled, logprobs, [self.number] * len(sampled), "stop", np.array(rows, np.uint16))
        self.routes.add(at, made)
        return made


def digest(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 65521


@given(TURNS)
def test_each_sampled_token_has_the_routes_of_the_call_that_sampled_it(turns):
    """Turns that continue any earlier one, as of a chat that forks: also the same given and sampled twice."""
    calls, conversation = Calls(), Conversation()
    for given_tokens, sampled, choice in turns:
        parent = [None, *conversation.turns][choice % (len(conversation.turns) + 1)]
        new = given_tokens if parent else [*PROMPT, *given_tokens]
        prompt = (parent.tokens() if parent else []) + new
        made = calls.generate(prompt, sampled)
        conversation.add(RecordedTurn(parent, new, made, [], b"", b""))
    trajectory = conversation.trajectory()
    routes = calls.routes.of(trajectory)
    assert routes is not None and routes.shape == (len(trajectory.tokens), 1, 2)
    for start, stop in pairwise([*trajectory.starts, len(trajectory.tokens)]):
        for place in range(start, stop):
            read = routes[place, 0, 1] == digest(trajectory.tokens[start : place + 1])
            assert read or (place == stop - 1 and not routes[place].any())
            if place < stop - 1 and trajectory.sampled[place + 1]:
                assert routes[place, 0, 0] == trajectory.versions[place + 1]


def test_rows_that_are_known_are_not_asked_for_again():
    calls = Calls()
    calls.generate([1, 2], [3])
    calls.generate([1, 2, 3, 4], [5, 6])
    assert calls.routes.continued([1, 2, 3, 4, 5, 6, 7]).routed == 5  # that of 6 is not known yet
    assert calls.routes.continued([1, 2, 3]).routed == 2
    assert calls.routes.continued([1, 2, 4]).routed == 0 and calls.routes.continued([1, 2]).routed == 0


def test_what_follows_the_last_answer_has_zeros_and_an_answer_may_be_cut():
    calls, trajectory = Calls(), Trajectory([1, 2])
    whole = calls.generate([1, 2], [3, 4, 5])
    trajectory.take(Completion(whole.tokens[:2], whole.logprobs[:2], [0] * 2, "stop"))
    trajectory.give([6])
    trajectory.take(calls.generate(trajectory.tokens, [7]))
    trajectory.give([8, 9])
    routes = calls.routes.of(trajectory)
    assert routes[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 0, 0, 0] and not routes[5:].any()
    assert routes[:5, 0, 1].tolist() == [digest([1, 2, 3, 4, 6][: n + 1]) for n in range(5)]


def test_a_token_that_no_answer_has_is_an_error_of_the_task():
    calls, trajectory = Calls(), Trajectory([1, 2])
    trajectory.take(calls.generate([1, 2], [3, 4]))
    trajectory.tokens[3] = 9
    with pytest.raises(EpisodeError, match="token 3 of the trajectory is sampled, and no answer of generate has it"):
        calls.routes.of(trajectory)
    assert RecordedRoutes().of(trajectory) is None


class CountedLooks(RecordedRoutes):
    looks = 0

    def continued(self, prompt: Sequence[int]) -> Continued:
        self.looks += 1
        return super().continued(prompt)


@pytest.mark.parametrize("returned", [False, True])
async def test_prompts_are_hashed_only_where_routes_are_returned(returned):
    sampler = fake_sampler(engine := FakeEngine(lambda prompt: [ord(".")]), longest=40)
    engine.routes = returned
    routes = CountedLooks()
    generate = sampler.generate_for(sampler.problem({"problem": "1+", "answer": "2."}), None, routes)
    for _ in range(2):
        await generate([1, 2, 3])
    assert routes.looks == 2 * returned


async def test_a_task_gets_no_routes_and_its_sample_has_them():
    sampler = fake_sampler(engine := FakeEngine(lambda prompt: [ord(character) for character in "ab."]), longest=40)
    engine.routes = True
    problem = sampler.problem({"problem": "1+", "answer": "2."})
    routes, trajectory = RecordedRoutes(), Trajectory(problem.prompt)
    generate = sampler.generate_for(problem, None, routes)
    for given_tokens in ([7], []):
        completion = await generate(trajectory.tokens)
        assert completion.routes is None
        trajectory.take(completion)
        trajectory.give(given_tokens)
    recorded = sampler.check(problem, trajectory)
    recorded.trajectory.routes = routes.of(recorded.trajectory)
    sent = recorded.trajectory.sample(Score(1.0), "ab.ab.").routes.numpy()
    assert sent.dtype == np.uint8 and sent[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2, 2, 2, 0]
    assert sent[:-1, 0, 1].tolist() == trajectory.tokens[:-1]
    assert "routes" not in vars(Trajectory([])), "it does not travel between a task and the server"
