"""Reward functions, their calling conventions, and the pool that may kill them."""

import asyncio
import functools
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from configs.schema import RewardConfig
from rollout.errors import RewardError
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Reward, Score, Turn
from rollout.rewards.countdown import LONGEST, compute_score, evaluate
from rollout.rewards.math import compute_score as math_score
from rollout.rewards.workers import RewardPool

TRUTH = {"target": 24, "numbers": [4, 6, 1]}
ROW = {
    "data_source": "countdown",
    "reward_model": {"style": "rule", "ground_truth": TRUTH},
    "extra_info": {"split": "train", "index": 3},
}


def countdown(text: str) -> float:
    return compute_score(text, TRUTH)["score"]


@pytest.mark.parametrize(
    ("text", "reward"),
    [
        ("<answer>4*6*1</answer>", 1.0),
        ("<think>hm</think> <answer> (4 * 6) / 1 </answer> done", 1.0),
        ("<answer>4×6÷1 = 24</answer>", 1.0),
        ("<answer>4*6</answer>", 0.1),  # 1 is missing
        ("<answer>4*6*1*1</answer>", 0.1),  # 1 is used twice
        ("<answer>4+6+1</answer>", 0.1),
        ("<answer>24</answer>", 0.1),
        ("<answer>4/0+6*1</answer>", 0.1),
        ("4*6*1", 0.0),
        ("<answer>4*6*1", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer>4*6*</answer>", 0.0),
        ("<answer>4 6 1</answer>", 0.0),
        ("<answer>(4*6*1</answer>", 0.0),
        ("<answer>4**6</answer>", 0.0),
        ("<answer>4//6*1</answer>", 0.0),
        ("<answer>4(6)*1</answer>", 0.0),
        ("<answer>4*6*+1</answer>", 0.0),
        ("<answer>4*6*1.0</answer>", 0.0),
        ("<answer>(4,6)*1</answer>", 0.0),
        ("<answer>1_4*6</answer>", 0.0),
        ("<answer>4)*(6*1</answer>", 0.0),
        ("<answer>04\n*06 * --1</answer>", 1.0),
        ("<answer>__import__('os')</answer>", 0.0),
        ("<answer>4*6*1</answer><answer>no</answer>", 0.0),  # the last one counts
        ("<answer>no</answer><answer>4*6*1</answer>", 1.0),
        ("<answer>1<answer>4*6*1</answer>", 1.0),
        ("", 0.0),
    ],
)
def test_countdown(text: str, reward: float):
    assert countdown(text) == reward


def test_countdown_divides_exactly():
    assert compute_score("<answer>1/3*3</answer>", {"target": 1, "numbers": [3, 3, 1]})["score"] == 1.0
    assert compute_score("<answer>8/(3-8/3)</answer>", {"target": 24, "numbers": [8, 8, 3, 3]})["score"] == 1.0


def test_countdown_takes_bounded_time():
    began = time.thread_time()
    for text in ("9*" * 99 + "9", "(" * 10**6, "9" * 10**6, "<answer>" * 10**5, "-" * LONGEST + "1", "((((" * 40):
        countdown(f"<answer>{text}</answer>")
    assert time.thread_time() - began < 5


TREES = st.recursive(
    st.integers(1, 30).map(str),
    lambda inner: st.tuples(inner, st.sampled_from("+-*/"), inner).map(lambda parts: f"({''.join(parts)})"),
    max_leaves=8,
)


@given(TREES)
def test_arithmetic_is_python_s_over_fractions(text: str):
    numbers = [int(word) for word in text.translate(str.maketrans("()+-*/", "      ")).split()]
    exact = "".join(f"Fraction({word})" if word.isdigit() else word for word in _words(text))
    try:
        expected = eval(exact, {"Fraction": Fraction})  # our own text
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            evaluate(text)
        return
    assert evaluate(text).value == expected and evaluate(text).numbers == numbers


def _words(text: str) -> list[str]:
    for sign in "()+-*/":
        text = text.replace(sign, f" {sign} ")
    return text.split()


@pytest.mark.parametrize(
    ("text", "truth", "reward"),
    [
        (r"so the answer is $\boxed{\frac{1}{2}}$", "0.5", 1.0),
        (r"$\boxed{x^2+1}$", r"$1+x^2$", 1.0),
        ("the answer is 4", "5", 0.0),
        ("I do not know", "5", 0.0),
        ("12", 12, 1.0),
    ],
)
def test_math(text: str, truth: object, reward: float):
    assert math_score(text, truth)["score"] == reward


ANSWERS = [Answer("one", 3, ROW), Answer("two", 4, {"problem": "?", "answer": "42"})]


@pytest.mark.parametrize("model", ["rm", {"style": "rule"}, None, 7])
def test_the_answer_is_the_truth_beside_a_reward_model_of_another_meaning(model: object):
    """Loading accepts such rows."""
    answer = Answer("7", 1, {"problem": "?", "answer": "7", "reward_model": model})
    assert (answer.truth(), answer.shown_truth()) == ("7", "'7'")


def test_verl_functions_get_the_arguments_they_name():
    def whole(data_source, solution_str, ground_truth, extra_info=None):
        return len(solution_str) + (data_source == "countdown") + extra_info.get("index", 0)

    def some(solution_str, ground_truth, bonus=0.0):
        return bonus if ground_truth == "42" else 0

    def anything(**kwargs):
        assert set(kwargs) == {"data_source", "solution_str", "ground_truth", "extra_info", "bonus"}
        return kwargs["bonus"]

    assert Reward("whole", whole, {}).score(ANSWERS) == [Score(7.0), Score(3.0)]
    assert Reward("some", some, {"bonus": 0.5}).score(ANSWERS) == [Score(0.0), Score(0.5)]
    assert Reward("anything", anything, {"bonus": 2}).score(ANSWERS) == [Score(2.0), Score(2.0)]


def test_easyr1_functions_get_their_dict_and_batch_functions_the_group():
    def single(reward_input):
        assert set(reward_input) == {"response", "response_length", "ground_truth", "turns"}
        return {"overall": reward_input["response_length"], "format": True, "note": "text", "accuracy": 0.5}

    def batch(reward_inputs, weight=1.0):
        return [{"overall": weight * len(reward_inputs), "format": 0} for _ in reward_inputs]

    def verl_batch(data_sources, solution_strs, ground_truths, extra_infos):
        return [float(truth == "42") for truth in ground_truths]

    assert Reward("single", single, {}).score(ANSWERS)[1] == Score(4.0, {"format": 1.0, "accuracy": 0.5})
    assert Reward("batch", batch, {"weight": 2.0}).score(ANSWERS) == [Score(4.0, {"format": 0.0})] * 2
    assert Reward("verl_batch", verl_batch, {}).score(ANSWERS) == [Score(0.0), Score(1.0)]


GIVEN = Answer("7 + 5 is 12.", 5, ROW, [{"text": "7 + 5 is", "sampled": True}, {"text": " 12.", "sampled": False}])


def sampled_chars(turns: list[Turn]) -> int:
    return sum(len(turn["text"]) for turn in turns if turn["sampled"])


def test_a_function_that_asks_is_told_which_text_was_sampled():
    def verl(solution_str, turns):
        return sampled_chars(turns)

    def verl_batch(solution_strs, turns):
        return [sampled_chars(of_one) for of_one in turns]

    def easyr1(reward_input):
        return {"overall": sampled_chars(reward_input["turns"])}

    def easyr1_batch(reward_inputs):
        return [{"overall": sampled_chars(one["turns"])} for one in reward_inputs]

    for function in (verl, verl_batch, easyr1, easyr1_batch):
        assert Reward("mine", function, {}).score([GIVEN, ANSWERS[0]]) == [Score(8.0), Score(3.0)]
    with pytest.raises(ValueError, match=r"reward.kwargs.turns: this argument comes from the data; remove the key"):
        Reward("mine", verl, {"turns": 2})


def test_a_function_that_asks_gets_the_text_with_special_tokens_and_the_prompt():
    def verl(solution_str, raw_str, prompt_str=""):
        return len(solution_str) + 10 * len(raw_str) + 100 * len(prompt_str)

    def verl_batch(solution_strs, raw_strs, prompt_strs):
        return [verl(*of_one) for of_one in zip(solution_strs, raw_strs, prompt_strs, strict=True)]

    def anything(**kwargs):
        return float("raw_str" in kwargs or "prompt_str" in kwargs)

    answers = [Answer("one", 3, ROW, None, "<one>", "?"), Answer("one", 3, ROW)]  # the trial has none
    for function in (verl, verl_batch):
        reward = Reward("mine", function, {})
        assert reward.asks == ["raw", "prompt"] and reward.score(answers) == [Score(153.0), Score(33.0)]
    assert (
        Reward("anything", anything, {}).asks == []
        and Reward("anything", anything, {}).score(answers[:1])[0].reward == 0
    )
    assert Reward("own", lambda solution_str, raw_str: raw_str, {"raw_str": 2}).score(answers)[0].reward == 2


async def test_what_no_function_asks_for_is_not_sent(tmp_path: Path):
    (tmp_path / "asks.py").write_text(
        "def raw(solution_str, raw_str): return float(raw_str == '<a>')\n"
        "def prompt(solution_str, prompt_str): return float(prompt_str == '?')\n"
        "def none(solution_str): return 1.0\n"
    )
    parts = [{"function": f"{tmp_path}/asks.py:{name}"} for name in ("raw", "prompt", "none")]
    async with RewardPool(RewardConfig(function=parts)) as pool:
        assert pool.asks == {"raw", "prompt"}
        assert [score.reward for score in await pool.score([Answer("a", 1, ROW, None, "<a>", "?")])] == [3.0]


@pytest.mark.parametrize(
    "result",
    [
        *(None, "1.0", {"accuracy": 1.0}, float("nan"), {"score": float("inf")}, [1.0], np.ones(2), torch.ones(2)),
        *(10**400, Decimal("sNaN"), np.complex64(1 + 1j), torch.ones((), device="meta")),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_results_that_are_no_rewards_are_refused(result: object):
    def returns(solution_str):
        return result

    with pytest.raises(RewardError, match=r"returned .*; a finite number, or a dict"):
        Reward("returns", returns, {}).score(ANSWERS[:1])


@pytest.mark.parametrize(
    ("metrics", "words"),
    [
        (dict.fromkeys(range(300), 1.0), "returned 300 metrics, and an answer may have 256; leave some out"),
        ({"": 1.0}, "returned a metric named ''; a name has 1 to 200 characters"),
        ({"x" * 201: 1.0}, "returned a metric named 'xxx"),
    ],
    ids=["many", "unnamed", "long"],
)
def test_metrics_without_bound_are_refused(metrics: dict, words: str):
    def returns(solution_str):
        return {"score": 1.0, **metrics}

    with pytest.raises(RewardError, match=re.escape(words)):
        Reward("returns", returns, {}).score(ANSWERS[:1])


def test_entries_of_a_result_that_are_no_numbers_are_left_out_and_names_become_text():
    extras = {"tokens": np.arange(3), "ids": torch.arange(3), "huge": 10**400, "z": np.complex128(1j)}
    extras |= {7: 2, (1, "a"): 3}

    def returns(solution_str):
        return {"score": np.float32(0.5), **extras}

    assert Reward("returns", returns, {}).score(ANSWERS[:1]) == [Score(0.5, {"7": 2.0, "(1, 'a')": 3.0})]


def test_keyword_arguments_are_the_same_in_every_call():
    def takes(solution_str, weights):
        return weights.pop("a")

    reward = Reward("takes", takes, {"weights": {"a": 0.5}})
    assert [score.reward for score in reward.score(ANSWERS) + reward.score(ANSWERS)] == [0.5] * 4


def test_what_a_function_returns_may_be_of_a_class_without_a_text():
    class Mute:
        def __repr__(self):
            raise OSError

    def returns(solution_str):
        return Mute()

    with pytest.raises(RewardError, match=r"^returns returned a Mute, whose repr raises OSError; a finite number"):
        Reward("returns", returns, {}).score(ANSWERS[:1])


class Waits:
    async def __call__(self, solution_str, weight):
        return weight


def test_an_object_that_is_called_asynchronously_is_awaited_in_a_partial_too():
    made = functools.partial(functools.partial(Waits()), weight=0.5)
    reward = Reward("waits", made, {})
    assert reward.is_async and asyncio.run(reward.score_async(ANSWERS[:1]))[0].reward == 0.5


def test_a_function_that_returns_a_coroutine_is_told_to_be_async():
    def wrapper(solution_str):
        return Waits()(solution_str, 1.0)

    with pytest.raises(RewardError, match=r"returned <coroutine .*; nothing awaits it; make .* an `async def`$"):
        Reward("wrapper", wrapper, {}).score(ANSWERS[:1])


async def yields_later(solution_str):
    yield 1.0


class Yields:
    def __call__(self, solution_str):
        yield 1.0


@pytest.mark.parametrize(
    "made", [yields_later, Yields(), functools.partial(Yields())], ids=["async", "object", "partial"]
)
def test_a_function_that_yields_is_refused(made: object):
    line = r"^reward.function mine: it yields; let it return a number, or a dict with score$"
    with pytest.raises(ValueError, match=line):
        Reward("mine", made, {})  # type: ignore[arg-type]


def test_a_batch_function_may_yield_its_rewards():
    def mine(solution_strs):
        yield from map(float, range(len(solution_strs)))

    assert [score.reward for score in Reward("mine", mine, {}).score(ANSWERS)] == [0.0, 1.0]


def test_a_function_without_known_parameters_is_refused_with_its_key():
    line = r"^reward.function max: its parameters are unknown: no signature found .*; call it in a `def`$"
    with pytest.raises(ValueError, match=line):
        Reward("max", max, {})


@pytest.mark.parametrize(
    "result", [None, 1.0, "11", {"score": [1, 2]}, {0.0, 1.0}, np.array(1.0), torch.tensor(1.0)], ids=repr
)
def test_a_batch_function_that_returns_no_list_is_named(result: object):
    def returns(reward_inputs):
        return result

    with pytest.raises(RewardError, match=r"returns returned .*; a list with a number or dict for each of the 2"):
        Reward("returns", returns, {}).score(ANSWERS)


@pytest.mark.parametrize("result", [(1, 0), np.array([1, 0]), torch.tensor([1, 0])], ids=repr)
def test_a_batch_function_may_return_any_ordered_collection(result: object):
    def returns(reward_inputs):
        return result

    assert [score.reward for score in Reward("returns", returns, {}).score(ANSWERS)] == [1.0, 0.0]


def test_a_batch_function_must_return_one_reward_per_answer():
    def short(reward_inputs):
        return [1.0]

    with pytest.raises(RewardError, match=r"1 rewards for 2 answers"):
        Reward("short", short, {}).score(ANSWERS)


@pytest.mark.parametrize(
    ("function", "kwargs", "words"),
    [
        ("nowhere/file.py:score", {}, "nowhere/file.py cannot be imported: FileNotFoundError"),
        ("FILE:absent", {}, "has no function 'absent'"),
        ("FILE:odd", {}, "takes none of solution_str"),
        ("FILE:needs", {}, "nothing gives its argument weight; add reward.kwargs.weight"),
        ("FILE:good", {"wait": 1}, "reward.kwargs.wait: FILE:good takes no such argument; it takes solution_str"),
        ("FILE:good", {"ground_truth": 1}, "comes from the data"),
        ("BROKEN:good", {}, "cannot be imported: ZeroDivisionError"),
    ],
)
def test_a_reward_that_cannot_be_used_is_refused_in_one_line(tmp_path: Path, function, kwargs, words):
    good, broken = tmp_path / "good.py", tmp_path / "broken.py"
    good.write_text(
        "def good(solution_str, ground_truth): return 1\n"
        "def odd(x): return 1\n"
        "def needs(solution_str, weight): return weight\n"
    )
    broken.write_text("1 / 0\n")
    name = function.replace("FILE", str(good)).replace("BROKEN", str(broken))
    with pytest.raises(ValueError, match=r"reward") as caught:
        load_reward(RewardConfig(function=name, kwargs=kwargs))
    assert words.replace("FILE", str(good)) in str(caught.value) and "\n" not in str(caught.value)


def user_file(folder: Path) -> Path:
    path = folder / "mine.py"
    path.write_text(
        textwrap.dedent("""
        import os, sys, time

        def score(solution_str, ground_truth):
            if solution_str == "hang":
                time.sleep(60)
            if solution_str == "crash":
                os._exit(3)
            if solution_str == "raise":
                raise KeyError("target")
            if solution_str == "modules":
                return {"score": 0.0, "heavy": sum(name in sys.modules for name in ("torch", "vllm", "transformers"))}
            return {"score": 1.0, "pid": os.getpid()}
        """)
    )
    return path


def answers(*texts: str) -> list[Answer]:
    return [Answer(text, 1, ROW) for text in texts]


async def test_the_pool_scores_and_outlives_hangs_crashes_and_errors(tmp_path: Path):
    config = RewardConfig(function=f"{user_file(tmp_path)}:score", timeout_s=2.0, workers=1)
    async with RewardPool(config) as pool:
        fine = await pool.score(answers("a", "b", "c"))
        assert [score.reward for score in fine] == [1.0, 1.0, 1.0]
        assert fine[0].metrics["pid"] != os.getpid()
        assert (await pool.score(answers("modules")))[0].metrics == {"heavy": 0.0}
        with pytest.raises(RewardError, match=r"longer than reward.timeout_s \(2 s\); its process was killed"):
            await asyncio.wait_for(pool.score(answers("a", "hang", "b")), 120)
        with pytest.raises(RewardError, match=r"ended its process \(exit code 3\)"):
            await pool.score(answers("crash"))
        with pytest.raises(RewardError, match=r"raised KeyError: 'target'") as caught:
            await pool.score(answers("a", "raise"))
        assert caught.value.origin == "KeyError" and 'raise KeyError("target")' in caught.value.__notes__[0]
        assert [score.reward for score in await pool.score(answers("again"))] == [1.0]


async def test_a_cancelled_call_frees_its_worker(tmp_path: Path):
    config = RewardConfig(function=f"{user_file(tmp_path)}:score", timeout_s=600, workers=1)
    async with RewardPool(config) as pool:
        hanging = asyncio.create_task(pool.score(answers("hang")))
        await asyncio.sleep(1.0)
        hanging.cancel()
        assert (await asyncio.wait_for(pool.score(answers("a")), 120))[0].reward == 1.0


def test_workers_die_with_their_server(tmp_path: Path):
    """Killed outright, a server leaves no worker behind, not even one that hangs."""
    script = tmp_path / "server.py"
    script.write_text(
        textwrap.dedent(f"""
        import asyncio
        from configs.schema import RewardConfig
        from rollout.rewards.convention import Answer
        from rollout.rewards.workers import RewardPool

        async def main():
            async with RewardPool(RewardConfig(function="{user_file(tmp_path)}:score", timeout_s=50)) as pool:
                (score,) = await pool.score([Answer("a", 1, {{}})])
                print(int(score.metrics["pid"]), flush=True)
                await pool.score([Answer("hang", 1, {{}})])

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    )
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": os.getcwd()}
    ) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        os.kill(worker, 0)
        server.send_signal(signal.SIGKILL)
        server.wait()
    deadline = time.monotonic() + 40  # a minute is the sleep of its own
    while time.monotonic() < deadline and Path(f"/proc/{worker}").exists():
        time.sleep(0.05)
    assert not Path(f"/proc/{worker}").exists()
