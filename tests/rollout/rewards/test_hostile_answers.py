"""An answer is judged even if it breaks the code that reads it; an unreadable ground truth is an error."""

import itertools
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from configs.schema import RewardConfig
from rollout.cage.failure_text import describe_error
from rollout.cage.frames import encode
from rollout.errors import RewardError, TruthError
from rollout.rewards import answer_judge, load_reward
from rollout.rewards.answer_judge import LIMITS, AnswerJudge, GaveUpError, JudgeLimits
from rollout.rewards.convention import Answer, Score
from rollout.rewards.math import _judge, compute_score, digits_of_power, hopeless
from rollout.rewards.math import start as math_start
from rollout.rewards.workers import RewardPool
from tests.harness.lanes import long_but

GIVEN_UP = {"score": 0.0, "solved": 0.0, "formed": 0.0, "gave_up": 1.0}
RIGHT = {"score": 1.0, "solved": 1.0, "formed": 1.0, "gave_up": 0.0}


@pytest.fixture(autouse=True)
def short_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    math_start()
    monkeypatch.setattr(LIMITS, "processor_s", 0.3)
    monkeypatch.setattr(LIMITS, "clock_s", 120.0)
    monkeypatch.setattr(LIMITS, "memory_bytes", 2**30)


@pytest.mark.parametrize(
    "text",
    [
        r"\boxed{5^{5^{5^{5^5}}}}",
        r"first $\boxed{7}$, then $\boxed{9 ^ { 9 ^ {9^{9}}}}$",
        r"\boxed{10^{1000000000000}}",
        r"\boxed{" + r"\frac{1}{1+" * 5000 + "1" + "}" * 5000 + "}",
        r"\boxed{" + "(" * 20000 + "1" + ")" * 20000 + "}",
    ],
    ids=range(5),
)
def test_math_gives_up_at_once_on_hopeless_answers(text: str):
    began = time.thread_time()
    assert compute_score(text, "7") == GIVEN_UP
    assert time.thread_time() - began < 0.2


@pytest.mark.parametrize(
    "text",
    long_but(
        [
            "the answer is 9^9^9",
            r"\boxed{99999999999!}",
            r"\boxed{((9!)!)!}",
            "$9$" + r"\[" * 20000,
            r"\boxed{" * 10**5,
        ],
        0,
        4,
    ),
    ids=range(5),
)
def test_math_gives_up_on_an_answer_that_takes_long(text: str):
    assert compute_score(text, "7") == GIVEN_UP
    assert compute_score(r"\boxed{7}", "7") == RIGHT


@pytest.mark.parametrize(
    ("text", "truth", "right"),
    long_but(
        [
            (r"\boxed{\infty!}", "0", 0.0),
            (r"\boxed{\infty^{-\infty}}", "0", 0.0),
            (r"\boxed{\infty^{7}}", "7", 0.0),
            (r"\boxed{\{7, \infty\}}", "7", 0.0),
            (r"\boxed{\sum_{n=1}^{\infty} \frac{1}{2^n}}", "1", 1.0),
            (r"\boxed{\int_0^{\infty} e^{-x} dx}", "1", 1.0),
            (r"\boxed{\infty}", r"\infty", 1.0),
            (r"\boxed{[0, \infty)}", r"[0, \infty)", 1.0),
            (r"\boxed{-\infty}", r"\infty", 0.0),
        ],
        0,
        1,
        2,
        3,
        6,
        7,
        8,
    ),
)
def test_an_infinite_answer_is_right_only_where_the_truth_is_infinite(
    text: str, truth: str, right: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the limit of a run: a slow machine takes more than 0.3 s for a sum or an integral."""
    monkeypatch.setattr(LIMITS, "processor_s", 2.0)
    assert compute_score(text, truth)["score"] == right


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\x00",
        r"\boxed{}",
        r"\boxed{" + "9" * 5000 + "}",
        "the answer is " + "9" * 5000,
        r"\boxed{" * 500,
        r"\boxed{\frac{1}{0}}",
        r"\boxed{\infty^{\infty}}",
        "the answer is 1e999999999",
        "__import__('os').system('x')",
        "$" * 5000,
    ],
    ids=range(11),
)
def test_math_judges_odd_texts_wrong(text: str):
    assert compute_score(text, "7")["score"] == 0.0


@pytest.mark.parametrize(
    ("text", "truth"),
    [
        (r"\boxed{(10^{10})^{10}}", "10^{100}"),
        (r"\boxed{2^{2^{2^2}}}", "65536"),
        (r"it is not $5^{5^{5^{5^5}}}$ but $\boxed{7}$", "7"),
        (r"\boxed{2^{2023}}", "2^{2023}"),
        (" ".join(["so $x = 3$ and $y = 4$"] * 2000) + r" \boxed{7}", "7"),
    ],
)
def test_limits_cost_no_right_answer_its_reward(text: str, truth: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LIMITS, "processor_s", 2.0)
    assert not hopeless(text)
    assert compute_score(text, truth) == RIGHT


def test_the_digits_of_a_power_of_powers():
    assert digits_of_power([10, 5]) == digits_of_power([1, 9, 10, 5]) + 5 == 5
    assert digits_of_power([2, 3, 4]) == pytest.approx(81 * 0.30103)
    assert digits_of_power([1, 9, 9, 9]) == digits_of_power([5, 5, 5, 5, 5]) == math.inf  # the inner one is computed


@pytest.mark.parametrize(
    ("truth", "right", "wrong"),
    long_but(
        [
            (r"3\sqrt{2}", r"3\sqrt{2}", "3"),
            (r"2\pi", r"2\pi", "2"),
            ("10^{-3}", r"\frac{1}{1000}", "10"),
            ("x^2 + 1", "1 + x^2", "1"),
            ("2x+3y", "3y+2x", "2"),
            (r"\frac{3}{4}\pi", r"\frac{3\pi}{4}", r"\frac{3}{4}"),
            ("1, 2", "1, 2", "2"),
            ("5!", "120", "5"),
            ("(1,2)", "(1,2)", "(2,1)"),
            (r"12\text{ units}", "12", "1"),
            ("5 dollars", "5", "dollars"),
            ("The answer is 72", "72", "7"),
            ("Natalia sold 48/2 = <<48/2=24>>24 clips.\n#### 72", "72", "24"),
            ("$x^2$", "x^2", "2"),
            (r"\boxed{4}", "4", "5"),
            (0.5, r"\frac{1}{2}", "5"),
        ],
        0,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        12,
        13,
        14,
        15,
    ),
)
def test_a_truth_is_read_whole(truth: object, right: str, wrong: str, monkeypatch: pytest.MonkeyPatch):
    """LaTeX without a dollar sign was once read as a text with a number: right answers got 0."""
    monkeypatch.setattr(LIMITS, "processor_s", 2.0)
    assert compute_score(rf"\boxed{{{right}}}", truth) == RIGHT
    assert compute_score(rf"\boxed{{{wrong}}}", truth)["score"] == 0.0


def test_an_answer_that_is_given_up_gets_the_lowest_score_even_below_0():
    assert compute_score(r"\boxed{9^{9^{9^9}}}", "7", format_score=-0.5) == GIVEN_UP | {"score": -0.5}


def test_a_judge_that_is_killed_from_outside_costs_no_reward():
    compute_score("$7$", "7")
    os.kill(_judge()._process, signal.SIGKILL)
    assert compute_score("$7$", "7") == RIGHT


@pytest.fixture
def judge() -> Iterator[AnswerJudge]:
    """A judge that evaluates Python expressions."""
    made = AnswerJudge(lambda text: eval(text, {"os": os}))
    yield made
    made.close()


def test_the_garbage_of_the_worker_is_none_of_the_judge_s(judge: AnswerJudge):
    """A walk through all objects of a large worker took most of the 2 s of an answer."""
    assert judge("__import__('gc').get_freeze_count()") > 0


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("9**9**9**9", "more than 0.3 s of processor time"),
        ("os.kill(os.getpid(), 9)", "it crashes the process that reads it"),
        ("[0] * 10**12", "MemoryError"),
        ("(lambda f: f(f))(lambda f: f(f))", "RecursionError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_judge_says_why_it_gave_up_and_goes_on(judge: AnswerJudge, text: str, why: str):
    with pytest.raises(GaveUpError, match=why):
        judge(text)
    assert judge("1 + 1") == 2


def test_a_reply_to_another_call_is_no_answer(judge: AnswerJudge):
    assert judge("1 + 1") == 2
    judge._socket.sendall(encode([-1, 2.0, 2**30, ["'stale'"]]))
    assert judge("2 + 2") == 4


def test_a_busy_machine_is_an_error_not_a_wrong_answer(judge: AnswerJudge, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LIMITS, "clock_s", 0.05)
    with pytest.raises(RewardError, match=r"an answer is not judged: it got .* s of processor time in 0.05 s"):
        judge("__import__('time').sleep(5)")


def test_a_stop_of_the_container_costs_no_answer_its_judgement(
    judge: AnswerJudge, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The caller's wait ends late, and its process has had no time either."""
    monkeypatch.setattr(LIMITS, "clock_s", 3.0)
    moments = itertools.chain([0.0, 60.0], itertools.repeat(0.0))
    clock = SimpleNamespace(monotonic=lambda: next(moments), clock_gettime=time.clock_gettime)
    monkeypatch.setattr(answer_judge, "time", clock)
    file = str(tmp_path / "stopped")
    first = f"(open({file!r}, 'w').close(), __import__('time').sleep(60))"
    assert judge(f"__import__('os').path.exists({file!r}) or {first}") is True
    moments = itertools.cycle([0.0, 60.0])
    monkeypatch.setattr(LIMITS, "clock_s", 0.05)
    with pytest.raises(RewardError, match="an answer is not judged"):
        judge("__import__('time').sleep(60)")


def test_a_pattern_that_backtracks_for_ever_gives_the_lower_reward():
    text = "a" * 50 + "b"
    kwargs = {"pattern": "(a+)+$", "score": -1.0, "match": "full"}
    reward = load_reward(RewardConfig(function="regex", kwargs=kwargs, timeout_s=1.5, memory_gib=1))
    assert JudgeLimits(0.75, 1.5 * 0.7, 2**28) == LIMITS
    LIMITS.clock_s = 120.0
    assert reward.score([Answer(text, 1, {}), Answer("a", 1, {})]) == [
        Score(-1.0, {"gave_up": 1.0}),
        Score(-1.0, {"gave_up": 0.0}),
    ]
    reward = load_reward(RewardConfig(function="exact_match", kwargs={"pattern": "(a+)+$"}, timeout_s=1.5))
    LIMITS.clock_s = 120.0
    first, second = reward.score([Answer(text, 1, {"answer": "a"}), Answer("a", 1, {"answer": "a"})])
    assert (first.reward, first.metrics["gave_up"]) == (0.0, 1.0) and second.reward == 1.0


def test_reasoning_gym_gives_up_on_an_answer_that_takes_long():
    pytest.importorskip("reasoning_gym")
    from buffer.data.entry_maker import GeneratedRows, entry_maker
    from configs.data.sources import GeneratedSet
    from rollout.rewards.reasoning import compute_score as reasoning_score

    row = GeneratedRows(GeneratedSet("countdown", {"size": 2, "seed": 1}))(0)
    for text, gave_up in (("<answer>9**9**9**9</answer>", 1.0), ("<answer>1</answer>", 0.0)):
        score = reasoning_score(text, row["extra_info"])
        assert score["gave_up"] == gave_up and score["score"] < 1
    entry_maker().close()
    with pytest.raises(TruthError, match="the row does not come from reasoning-gym"):
        reasoning_score("", json.loads('{"split": "train"}'))


UNREADABLE = [None, "", "  ", [], ["7"], {}, {"value": 7}, True, float("nan"), float("inf"), "$$", r"9^{9^{9^9}}"]


@pytest.mark.parametrize("truth", UNREADABLE, ids=repr)
def test_a_truth_that_math_cannot_read_is_an_error_of_its_row(truth: object):
    reward = load_reward(RewardConfig(function="math_verify", timeout_s=120))
    with pytest.raises(TruthError, match="ground truth") as caught:
        reward.score([Answer(r"\boxed{7}", 1, {"answer": truth})])
    assert caught.value.permanent and describe_error("math_verify", caught.value)[1].startswith("ground truth")


@pytest.mark.parametrize(
    ("function", "truth"),
    [
        *(("exact_match", truth) for truth in (None, {}, [], [None], "", ["a", {}])),
        *(("countdown", truth) for truth in (None, "24", [24], {"target": 24}, {"numbers": [1], "target": None})),
    ],
)
def test_a_truth_that_another_built_in_reward_cannot_use_is_an_error(function: str, truth: object):
    with pytest.raises(TruthError, match=r"ground truth is .* needs"):
        load_reward(RewardConfig(function=function)).score([Answer("a", 1, {"answer": truth})])


@pytest.mark.parametrize("model", [None, [], {}, "7"])
def test_a_row_of_verl_without_a_truth_is_an_error(model: object):
    with pytest.raises(TruthError, match=r"the row's reward_model is .*, without a ground_truth"):
        load_reward(RewardConfig(function="math_verify")).score([Answer("7", 1, {"reward_model": model})])


async def test_right_answers_beside_one_that_cannot_be_judged_keep_their_reward():
    texts = [r"\boxed{7}", r"\boxed{5^{5^{5^{5^5}}}}", "so it is 9^9^9", "$7$"]
    async with RewardPool(RewardConfig(function="math_verify", workers=1, timeout_s=10)) as pool:
        scores = await pool.score([Answer(text, 1, {"answer": "7"}) for text in texts])
        assert [score.reward for score in scores] == [1.0, 0.0, 0.0, 1.0]
        assert [score.metrics["gave_up"] for score in scores] == [0.0, 1.0, 1.0, 0.0]
        with pytest.raises(
            RewardError, match=r"ground truth is of type list: .*; math_verify needs one text"
        ) as caught:
            await pool.score([Answer("7", 1, {"answer": ["7"]})])
        assert caught.value.permanent
