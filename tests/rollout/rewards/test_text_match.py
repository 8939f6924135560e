"""exact_match, regex and length: what they reward, and what they refuse at the start."""

import pytest

from configs.schema import RewardConfig
from rollout.rewards import load_reward
from rollout.rewards.convention import Answer, Score


def score(function: str, text: str, truth: object = "42", tokens: int = 1, **kwargs: object) -> Score:
    reward = load_reward(RewardConfig(function=function, kwargs=kwargs))
    return reward.score([Answer(text, tokens, {"problem": "?", "answer": truth})])[0]


@pytest.mark.parametrize(
    ("text", "truth", "kwargs", "reward", "formed"),
    [
        (" 42\n", "42", {}, 1.0, 1.0),
        (" 42\n", "42", {"strip": False}, 0.0, 1.0),
        ("Paris", "paris", {}, 1.0, 1.0),
        ("Paris", "paris", {"case": True}, 0.0, 1.0),
        ("42", 42, {}, 1.0, 1.0),
        ("B", ["a", "b"], {}, 1.0, 1.0),
        ("it is #### 41 or #### 42", "42", {"pattern": r"####\s*(\S+)"}, 1.0, 1.0),
        ("it is #### 42 or #### 41", "42", {"pattern": r"####\s*(\S+)", "format_score": 0.25}, 0.25, 1.0),
        ("it is 42", "42", {"pattern": r"####\s*(\S+)", "format_score": 0.25}, 0.0, 0.0),
        ("7 and 42", "42", {"pattern": r"\d+", "score": 2.0}, 2.0, 1.0),
    ],
)
def test_exact_match(text: str, truth: object, kwargs: dict, reward: float, formed: float):
    assert score("exact_match", text, truth, **kwargs) == Score(
        reward, {"solved": float(reward >= 1), "formed": formed, "gave_up": 0.0}
    )


@pytest.mark.parametrize(
    ("text", "kwargs", "reward"),
    [
        ("<think>a</think>b", {"pattern": "<think>.*</think>"}, 1.0),
        ("<think>a</think>b", {"pattern": "<think>.*</think>", "match": "full"}, 0.0),
        ("<think>a\n</think>", {"pattern": "(?s)<think>.*</think>", "match": "full", "score": 0.1}, 0.1),
        ("", {"pattern": "x", "otherwise": -1}, -1.0),
    ],
)
def test_regex(text: str, kwargs: dict, reward: float):
    assert score("regex", text, **kwargs) == Score(reward, {"gave_up": 0.0})


@pytest.mark.parametrize(("tokens", "reward"), [(0, 0.0), (100, 0.0), (150, -0.25), (200, -0.5), (900, -0.5)])
def test_length(tokens: int, reward: float):
    assert score("length", "", tokens=tokens, free=100, cap=200, penalty=0.5) == Score(reward)


@pytest.mark.parametrize(
    ("function", "kwargs", "line"),
    [
        ("regex", {}, "reward.function regex: it needs pattern; add reward.kwargs.pattern"),
        ("regex", {"pattern": "("}, "reward.kwargs.pattern: '(': Input should be a valid regular expression"),
        ("regex", {"pattern": "a", "match": "all"}, "reward.kwargs.match: 'all': Input should be 'search' or 'full'"),
        (
            "length",
            {"free": 9, "cap": 9},
            "reward.kwargs: cap 9 is not above free 9; raise it",
        ),
        (
            "exact_match",
            {"patern": "x"},
            "reward.kwargs.patern: exact_match takes no such argument; it takes pattern, strip, case, score,",
        ),
        ("judge", {}, "reward.function judge: it needs url; add reward.kwargs.url"),
        (
            "judge",
            {"url": "localhost:8000", "model": "m", "template": "{{ answer }}", "pattern": ""},
            "reward.kwargs.url: 'localhost:8000' is no address; write it as http://HOST:PORT",
        ),
        *(
            (
                "judge",
                {"url": url, "model": "m", "template": "{{ answer }}", "pattern": ""},
                f"reward.kwargs.url: {url!r} is no address; write it as http://HOST:PORT",
            )
            for url in ("http://", "http:///v1", "http://h:99999", "http://h:0", "http://[::1")
        ),
        (
            "judge",
            {"url": "http://x", "model": "m", "template": "{{ a", "pattern": "x"},
            "reward.kwargs: template, line 1: unexpected end of template, expected 'end of print statement'.",
        ),
        (
            "judge",
            {"url": "http://x", "model": "m", "template": "Is {{ ground_truth }} right?", "pattern": "x"},
            "reward.kwargs: template: it does not name answer, so the model would not see it; write {{ answer }}",
        ),
        (
            "judge",
            {
                "url": "http://x",
                "model": "m",
                "template": "{{ answer }}",
                "pattern": "x",
                "scores": {"A": 1, "a": 0},
            },
            "reward.kwargs: scores has A and a, and case does not matter; keep one of them",
        ),
        (
            "judge",
            {"url": "http://x", "model": "m", "template": "nowhere.jinja", "pattern": "x"},
            "reward.kwargs: template nowhere.jinja cannot be read: [Errno 2] No such file",
        ),
        (
            "judge",
            {"url": "http://x", "model": "m", "template": "{{ answer }}", "pattern": "x", "api_key_env": "NO_SUCH_KEY"},
            "reward.kwargs.api_key_env: there is no environment variable NO_SUCH_KEY; export it",
        ),
        (
            "judge",
            {"url": "http://x", "model": "m", "template": "{{ answer }}", "pattern": "x", "timeout_s": 60},
            "reward.kwargs.timeout_s: 60 is more than reward.timeout_s 10, which is of the whole call; raise that",
        ),
        (
            "reward_model",
            {"url": "http://x"},
            "reward.kwargs: nothing says how its texts are made; set model, whose chat template does, or template",
        ),
        (
            "reward_model",
            {"url": "http://x", "model": "./nowhere"},
            "reward.kwargs: no tokenizer can be loaded from model ./nowhere: ",
        ),
    ],
)
def test_settings_that_are_missing_or_wrong_are_refused_by_name(function: str, kwargs: dict, line: str):
    with pytest.raises(ValueError, match="reward") as caught:
        load_reward(RewardConfig(function=function, kwargs=kwargs))
    assert str(caught.value).startswith(line) and "\n" not in str(caught.value)


def test_of_several_the_entry_is_named():
    config = RewardConfig(function=[{"function": "math"}, {"function": "regex", "kwargs": {"pattern": 5}}])
    with pytest.raises(ValueError, match=r"^reward.function\.1.kwargs.pattern: 5: Input should be a valid pattern$"):
        load_reward(config, 1)
    assert load_reward(config, 0).name == "math"


def test_math_verify_is_math():
    assert score("math_verify", r"$\boxed{\frac{1}{2}}$", "0.5") == score("math", r"$\boxed{\frac{1}{2}}$", "0.5")
    assert score("math_verify", "7", "5").reward == 0.0
