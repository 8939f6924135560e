"""What a task may ask of the engine, and what it may return."""

from collections.abc import Callable

import numpy as np
import pytest

from rollout.errors import EpisodeError
from rollout.rewards.convention import Score
from rollout.tasks import Completion, Problem, Trajectory
from rollout.tasks.trajectory import COLUMNS
from tests.harness.fakes import VOCABULARY, FakeEngine, fake_sampler

ROW = {"problem": "1+1=", "answer": "2."}
LONGER = (
    "raise rollout.max_sample_tokens (and rollout.engine.max_model_len), or end the sample while problem.left allows"
)


def babbling() -> FakeEngine:
    return FakeEngine(lambda prompt: [ord(character) for character in "ab!cd." * 10])


def text(completion: Completion) -> str:
    return "".join(map(chr, completion.tokens))


async def test_a_turn_has_a_length_and_stops_of_its_own():
    sampler = fake_sampler(engine := babbling(), max_tokens=8, longest=40)
    assert text(await sampler.generate([1, 2])) == "ab!cd."
    assert text(await sampler.generate([1, 2], max_tokens=2)) == "ab"
    assert text(await sampler.generate([1, 2], stop=["!"])) == "ab!"
    assert text(await sampler.generate([1, 2], stop=[])) == "ab!cd."  # the model's own end always counts
    assert (await sampler.generate([1, 2], max_tokens=2)).finish == "length"
    assert engine.asked_tokens == [8, 2, 8, 8, 2]


async def test_a_turn_is_clipped_to_what_is_left_of_the_sample():
    sampler = fake_sampler(engine := babbling(), max_tokens=8, longest=40)
    await sampler.generate([1] * 37)
    await sampler.generate([1] * 2, max_tokens=1000)
    assert engine.asked_tokens == [3, 38]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (([1] * 40,), f"40 tokens leave no room in a sample of at most 40; {LONGER}"),
        (([],), "tokens must be a list of token ids, one at least; is of float64(0,)"),
        (("text",), "tokens must be a list of token ids, one at least; is of <U4()"),
        (([1, [2]],), "ValueError: "),
        (([1, -2],), f"tokens hold -2, which is no token of the model; its ids are 0 to {VOCABULARY - 1}"),
        (([VOCABULARY],), f"tokens hold {VOCABULARY}, which is no token of the model"),
        (([1], 0), "max_tokens is 0; ask for a whole number of tokens, 1 or more"),
        (([1], 1.5), "max_tokens is 1.5; ask"),
        (([1], None, "!"), "stop is '!'; a list of strings is needed"),
        (([1], None, ["ab"]), "stop: 'ab' is 2 tokens of this tokenizer; a stop is a single one"),
    ],
)
async def test_what_the_engine_cannot_do_is_refused_before_it_is_asked(arguments, words: str):
    sampler = fake_sampler(engine := babbling(), longest=40)
    with pytest.raises(EpisodeError) as caught:
        await sampler.generate(*arguments)
    assert str(caught.value).startswith(f"generate: {words}") and caught.value.kind == "task"
    assert not engine.asked_tokens


async def test_numbers_that_only_python_takes_for_tokens_become_plain_ones(monkeypatch):
    sampler, asked = fake_sampler(engine := babbling()), []
    generate = engine.generate

    def noted(prompt, max_tokens, *rest):
        asked.append([prompt, max_tokens])
        return generate(prompt, max_tokens, *rest)

    monkeypatch.setattr(engine, "generate", noted)
    await sampler.generate([5, True, np.int64(7)], True)
    assert asked == [[[5, 1, 7], 1]] and {type(number) for number in [*asked[0][0], asked[0][1]]} == {int}


def test_a_problem_knows_what_is_left_of_its_budget():
    problem = fake_sampler(babbling(), longest=40).problem(ROW)
    assert (problem.row, problem.prompt, problem.max_tokens) == (ROW, [ord(c) for c in "1+1="], 36)
    assert problem.left(problem.prompt) == 36 and problem.left([0] * 50) == -10
    assert problem.tokenizer.decode([ord("2")]) == "2"


def made(problem: Problem) -> Trajectory:
    trajectory = Trajectory(problem.prompt)
    trajectory.take(Completion([50, 46], [-0.5, -0.5], [0, 1], "stop"))
    trajectory.give([7])
    trajectory.metrics["turns"] = 1
    return trajectory


def test_a_trajectory_that_is_right_is_passed_on():
    sampler = fake_sampler(babbling())
    problem = sampler.problem(ROW)
    trajectory = made(problem)
    assert sampler.check(problem, trajectory).trajectory is trajectory


def test_what_was_checked_is_what_is_sent():
    sampler = fake_sampler(babbling())
    problem = sampler.problem(ROW)
    before, trajectory = made(problem).sample(Score(1.0), "text"), made(problem)
    checked = sampler.check(problem, trajectory).trajectory
    for name in COLUMNS:  # as a task could that keeps what it returned
        getattr(trajectory, name)[0] = VOCABULARY
    assert checked.sample(Score(1.0), "text") == before


def test_the_outcome_is_added_to_the_reward_of_the_last_turn():
    sampler = fake_sampler(babbling())
    problem = sampler.problem(ROW)
    trajectory = made(problem)
    trajectory.take(Completion([50], [-0.5], [2], "stop"))
    plain = sampler.check(problem, trajectory).trajectory.sample(Score(1.0), "text")
    assert (plain.reward, plain.turn_rewards, plain.starts) == (1.0, [], [0])
    trajectory.turn_rewards = [np.float32(0.5), 1]
    sample = sampler.check(problem, trajectory).trajectory.sample(Score(0.25), "text")
    assert (sample.reward, sample.turn_rewards) == (1.75, [0.5, 1.25])
    trajectory.starts = [0, 6]
    assert trajectory.sample(Score(0.25), "text").starts == [0, 6]


BREAK: dict[str, tuple[Callable[[Trajectory], object], str]] = {
    "columns": (lambda t: t.tokens.append(1), "its columns differ in length (tokens 8, sampled 7, logprobs 7, versi"),
    "ids": (lambda t: t.give([VOCABULARY]), f"its tokens hold {VOCABULARY}, which is no token of the model"),
    "floats": (lambda t: setattr(t, "tokens", [1.5] * 7), "its tokens must be a list of token ids"),
    "prompt": (lambda t: t.tokens.__setitem__(0, 7), "it does not begin with problem.prompt"),
    "start": (lambda t: setattr(t, "start", 3), "it does not begin with problem.prompt"),
    "long": (lambda t: t.give([1] * 40), f"it has 47 tokens, and a sample at most 40; {LONGER}"),
    "trained prompt": (lambda t: t.sampled.__setitem__(0, 1), "`sampled` is not 0 for the prompt and 0 or 1 for each"),
    "half sampled": (lambda t: t.sampled.__setitem__(-1, 2), "`sampled` is not 0 for the prompt and 0 or 1 for each"),
    "none sampled": (
        lambda t: setattr(t, "sampled", [*t.sampled[:-1], None]),
        "`sampled` is not 0 for the prompt and 0 or 1 for each",
    ),
    "starts": (lambda t: setattr(t, "starts", [False]), "starts are [False]: segments begin at 0, in order, each with"),
    "nothing": (lambda t: setattr(t, "sampled", [0] * 7), "no token of it was sampled; take() at least one completion"),
    "nan": (lambda t: t.logprobs.__setitem__(4, float("nan")), "a log-probability is not finite"),
    "words": (lambda t: setattr(t, "logprobs", ["no"] * 7), "ValueError: could not convert string to float: 'no'"),
    "version": (lambda t: t.versions.__setitem__(4, -1), "`versions` is not -1 for what was given, and the policy ver"),
    "finish": (lambda t: setattr(t, "finish", "done"), "its finish is 'done', neither stop nor length"),
    "many metrics": (
        lambda t: setattr(t, "metrics", dict.fromkeys(map(str, range(300)), 1.0)),
        "it has 300 metrics, and an answer may have 256; leave some out",
    ),
    "metric without a name": (
        lambda t: setattr(t, "metrics", {"": 1.0}),
        "it has a metric named ''; a name has 1 to 200 characters",
    ),
    "metric": (
        lambda t: setattr(t, "metrics", {"turns": "two"}),
        "its metric 'turns' is 'two'; a finite number is needed",
    ),
    "turn": (lambda t: setattr(t, "turn_rewards", [1.0, 0.0]), "its turn_rewards are 2 for 1 turns; one for each run"),
    "turn reward": (lambda t: setattr(t, "turn_rewards", ["1"]), "its reward of turn 0 is '1'; a number of at most 1e"),
    "turn nan": (lambda t: setattr(t, "turn_rewards", [float("nan")]), "its reward of turn 0 is nan; a number of at"),
    "turn inf": (lambda t: setattr(t, "turn_rewards", [-1e308]), "its reward of turn 0 is -1e+308; a number of at mo"),
    "turn number": (lambda t: setattr(t, "turn_rewards", 3), "TypeError: "),
    "removed": (lambda t: delattr(t, "versions"), "AttributeError: "),
}


@pytest.mark.parametrize("name", BREAK)
def test_a_trajectory_that_cannot_be_trained_on_is_refused_in_a_sentence(name: str):
    sampler, (break_, words) = fake_sampler(babbling(), longest=40), BREAK[name]
    problem = sampler.problem(ROW)
    break_(trajectory := made(problem))
    with pytest.raises(EpisodeError) as caught:
        sampler.check(problem, trajectory)
    assert str(caught.value).startswith(f"the task returned a trajectory that cannot be trained on: {words}")


@pytest.mark.parametrize("returned", [None, "text", [1, 2]])
def test_something_else_than_a_trajectory_is_refused(returned: object):
    sampler = fake_sampler(babbling())
    with pytest.raises(EpisodeError, match=r"the task returned (NoneType|str|list); a Trajectory is needed"):
        sampler.check(sampler.problem(ROW), returned)
