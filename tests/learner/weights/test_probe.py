"""The probe: short enough for every server, digits if the tokenizer has them, a picture for models that see."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer, Gemma2ForCausalLM

from buffer.data.images import ImageFormat
from configs.checks import PROBE_LEAST
from configs.load import ConfigError
from configs.schema import Config, WeightsConfig
from examples.countdown.make_model import make_tokenizer
from learner.weights.probe import (
    AGAIN,
    DISTANCE,
    LEFT,
    LIKELY,
    PICTURE,
    PROBE_TOKENS,
    RANDOM,
    REPEATED,
    RIGHT,
    ROUNDING,
    PolicyText,
    ProbeRow,
    draw,
    images_of,
    known_tokens,
    placeholders,
    shown_tokens,
    texts_of,
    tokens_of,
)
from learner.weights.prober import FP8_ROUNDING, Prober, limits_of, rounding_of
from learner.weights.protocol import Probe, ProbeImage, ProbeText
from learner.weights.receiver.comparison import Comparison
from learner.weights.receiver.staged import WeightsError, confirm
from tests.harness.published import scores
from tests.harness.tiny_gemma import tiny_gemma
from tests.harness.tiny_vlm import tiny_tokenizer


class NoDigits:
    """A tokenizer without digits."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {7: "<image>"}

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3] * len(text)

    def __init__(self, words: int = 12) -> None:
        self.words = words

    def __len__(self) -> int:
        return self.words


def test_the_probe_leaves_room_for_the_token_that_a_server_samples_after_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokens_of(tokenizer, 10_000)) == PROBE_TOKENS
    assert tokens_of(tokenizer, 30) == tokens_of(tokenizer, 10_000)[:30]
    assert tokenizer.decode(tokens_of(tokenizer, 7)) == "1, 2, 3"


def test_a_tokenizer_without_digits_gets_the_same_random_tokens_on_every_rank() -> None:
    tokens = tokens_of(NoDigits(), 40)
    assert tokens == tokens_of(NoDigits(), 40) and len(tokens) == 40
    assert set(tokens) <= set(range(12)) - {7} and len(set(tokens)) > 6


FORM = ImageFormat("qwen2_5_vl", 14, 2, 2, (0.5,) * 3, (0.5,) * 3, 784, 784 * 64, 5, 3, 4)


def test_the_picture_is_the_same_everywhere_and_fills_more_than_a_window() -> None:
    """Another digest means that servers and learners of different releases would refuse each other."""
    picture = draw(FORM, 112, 168)
    assert picture.digest == "972851d20e2cc46179f8b09fb2f864568655fe26e97e26cb1f7b2b9b2f5898ee"
    assert picture.grid == (1, 8, 12) and picture.num_tokens == PICTURE[0] * PICTURE[1]
    left, right = picture.pixels[:, :84].mean((0, 1)), picture.pixels[:, 84:].mean((0, 1))
    assert np.abs(left - LEFT).max() < 1 and np.abs(right - RIGHT).max() < 1
    assert len(np.unique(picture.patches(), axis=0)) > 40, "patches differ, so that their places count"


@pytest.mark.parametrize("longest", [10_000, 50])
def test_a_shown_probe_has_its_picture_before_the_text(longest: int) -> None:
    tokenizer = tiny_tokenizer()
    tokens, image = shown_tokens(tokenizer, longest, FORM)
    first = image.start + image.picture.num_tokens
    assert tokens[: first + 1] == [3, *[5] * 24, 4] and len(tokens) <= longest
    assert tokenizer.decode(tokens[first + 1 :]).startswith("[UNK]he left half of the")
    assert not {3, 4, 5} & set(tokens[first + 1 :])


def test_random_tokens_of_a_shown_probe_stand_for_no_image() -> None:
    tokens, image = shown_tokens(NoDigits(), 10_000, FORM)
    assert set(tokens[image.start + image.picture.num_tokens + 1 :]) <= set(range(12)) - {3, 4, 5, 7}


def test_a_sample_too_short_for_the_picture_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: .* takes 34 tokens, .* at most 31; raise it"):
        shown_tokens(tiny_tokenizer(), 30, FORM)


def a_text(**changed: Any) -> ProbeText:
    image = {"start": 1, "height": 112, "width": 168, "digest": draw(FORM, 112, 168).digest} | changed
    given = ProbeImage.model_validate(image)
    return ProbeText(name=LIKELY, tokens=[3, 5, 4], image=given, logprobs=[-1.0], tolerance=0.1, shift=0.1)


def test_a_server_draws_the_learner_s_picture() -> None:
    ((start, picture),) = images_of(a_text(), FORM)
    assert start == 1 and np.array_equal(picture.pixels, draw(FORM, 112, 168).pixels)
    assert images_of(a_text().model_copy(update={"image": None}), FORM) == []


@pytest.mark.parametrize(
    ("text", "form", "problem"),
    [
        (a_text(), None, "this server's model sees none: give both ends the same model.path"),
        (a_text(digest="f" * 64), FORM, "ffffffffffff at the learner: run the same Headrace at both ends"),
        (a_text(height=113), FORM, "sides 113 x 168, here they are multiples of 28"),
    ],
)
def test_a_picture_that_cannot_be_drawn_alike_is_refused(
    text: ProbeText, form: ImageFormat | None, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        images_of(text, form)
    assert "\n" not in str(error.value)


def texts_for(longest: int, **keys: Any) -> dict[str, PolicyText]:
    return {text.name: text for text in texts_of(tiny_tokenizer(), longest, keys.pop("vocabulary", 10_000), **keys)}


def test_the_other_texts_are_random_and_the_last_is_longer_than_a_short_window() -> None:
    texts, again = texts_for(10_000), texts_for(10_000)
    assert list(texts) == [LIKELY, RANDOM, REPEATED] and texts == again, "the same on every rank"
    assert len(texts[RANDOM].tokens) == PROBE_TOKENS and texts[RANDOM].compared == PROBE_TOKENS - 1
    last = texts[REPEATED].tokens
    assert last[DISTANCE:] == last[:AGAIN] and len(last) == DISTANCE + AGAIN and texts[REPEATED].compared == AGAIN
    assert [text.likely for text in texts.values()] == [True, False, False]


def test_texts_fit_the_longest_sample() -> None:
    texts = texts_for(50)
    assert list(texts) == [LIKELY, RANDOM] and [len(text.tokens) for text in texts.values()] == [50, 50]
    assert texts[RANDOM].compared == 49


def test_the_shortest_sample_that_is_accepted_has_limits() -> None:
    """Without a log-probability there is no mean to take: `configs/checks.py` refuses shorter samples."""
    texts = texts_for(PROBE_LEAST - 1)
    made = ProbeRow(list(texts.values()), "row")
    asked = Prober([], WeightsConfig(), 0, made).ask(Asked()).texts
    assert [len(text.logprobs) for text in asked] == [1, 1] and all(text.tolerance > 0 for text in asked)
    assert [text.compared for text in texts_for(PROBE_LEAST - 2).values()] == [0, 0]


def test_random_tokens_are_words_of_the_model() -> None:
    """An id beyond the embedding would end the learner, and an image's placeholder without an image the server."""
    tokenizer = tiny_tokenizer()
    words = set(known_tokens(tokenizer))
    assert words and not words & set(tokenizer.added_tokens_decoder)
    few = texts_of(NoDigits(), 500, vocabulary=10, without={1, 2})
    assert {token for text in few for token in text.tokens} == set(range(10)) - {1, 2, 7}
    shown = texts_of(NoDigits(), 500, vocabulary=10, form=FORM)
    assert {token for text in shown for token in text.tokens} == set(range(10)) - {7}
    seen = texts_for(10_000, form=FORM)
    assert not {3, 4, 5} & {*seen[RANDOM].tokens, *seen[REPEATED].tokens} and seen[LIKELY].images
    config = {"image_token_id": 5, "text_config": {"eos_token_id": 2, "pad_token_id": None}, "video_token_index": 9}
    assert placeholders(config | {"hidden_size": 8, "id2label": {0: "LABEL_0"}}) == {2, 5, 9}


class AddedAlone(NoDigits):
    """A tokenizer that has nothing but added tokens."""

    added_tokens_decoder: ClassVar[dict[int, str]] = {0: "a", 1: "b", 2: "c"}


def test_a_tokenizer_of_added_tokens_alone_has_these() -> None:
    assert known_tokens(AddedAlone(3), {1}) == [0, 2] and known_tokens(AddedAlone(3), {0, 1, 2}) == [0, 1, 2]
    assert len(tokens_of(AddedAlone(3), 40, without={0, 1, 2})) == 40


class Asked:
    """A policy that notes what it is asked; its log-probability of token i of the row is -i."""

    def logprobs_of(self, row: Any) -> list[float]:
        self.row = row
        return [float(-place) for place in range(1, 60)]


def test_each_text_has_its_own_part_of_the_row() -> None:
    """The policy predicts no placeholder, so log-probabilities of these would be nothing but noise."""
    tokens, image = shown_tokens(tiny_tokenizer(), 40, FORM)
    texts = [PolicyText(LIKELY, tokens, 14, True, [image]), PolicyText(RANDOM, [7, 8, 9], 2)]
    policy = Asked()
    seen, other = Prober([], WeightsConfig(), 0, ProbeRow([*texts, texts[1]], "row")).ask(policy).texts[:2]
    assert policy.row == "row" and seen.tokens == tokens and seen.image and not other.image
    assert (seen.image.start, seen.image.height, seen.image.width) == (1, 112, 168)
    assert seen.logprobs == [float(-place) for place in range(26, 40)], "of tokens[26:], the first one of the text"
    assert len(tokens) == 40 and len(seen.logprobs) == 14
    assert other.logprobs == [-41.0, -42.0], "of the row's tokens 41 and 42: nothing predicts its token 40"
    (text,) = Prober([], WeightsConfig(), 0, [1, 2, 3]).ask(policy).texts
    assert policy.row == [1, 2, 3] and text.image is None and text.logprobs == [-1.0, -2.0]


BF16, F32 = ROUNDING, 2.0**-22
UNLIKELY = [-14.953, -19.506, -5.121, -19.882]


def test_a_text_that_the_policy_finds_unlikely_may_differ_by_its_rounding() -> None:
    """In bfloat16, two healthy runs differed by 0.061 and 0.113 nat where the mean was about -16."""
    for likely in (True, False):
        assert 2 * 0.113 < limits_of(WeightsConfig(), UNLIKELY, BF16, likely).tolerance < 0.6
        assert limits_of(WeightsConfig(), UNLIKELY, F32, likely).tolerance == pytest.approx(0.05, rel=1e-3)
    assert limits_of(WeightsConfig(), UNLIKELY, BF16, likely=False).shift > 0.113
    assert limits_of(WeightsConfig(), [-0.1, -0.3], BF16, likely=True).tolerance < 0.06


def test_the_tolerance_of_the_run_file_is_that_of_the_likely_text_and_widens_the_others() -> None:
    given = WeightsConfig(probe_tolerance=0.02)
    assert limits_of(given, UNLIKELY, BF16, likely=True) == (0.02, 0.02)
    other = limits_of(given, UNLIKELY, BF16, likely=False)
    assert other.tolerance == pytest.approx(0.02 + (16 + 14.8655) / 64)
    wide = limits_of(WeightsConfig(probe_tolerance=3.0), UNLIKELY, BF16, likely=False)
    assert wide.tolerance > 3 and wide.shift > 1.5


@pytest.mark.parametrize(
    ("given", "rounding"),
    [
        ({"model": {"path": "m"}}, BF16),
        ({"model": {"path": "m", "dtype": "float32"}}, F32),
        ({"rollout": {"engine": {"quantization": "fp8"}}}, FP8_ROUNDING),
        ({"rollout": {"engine": {"kv_cache_dtype": "fp8_e5m2"}}}, FP8_ROUNDING),
        ({"learner": {"matmul": "fp8"}}, FP8_ROUNDING),
    ],
)
def test_the_coarser_end_decides_how_far_uncertain_texts_may_be_off(given: dict[str, Any], rounding: float) -> None:
    """SmolLM2-135M rounded to FP8: up to 0.48 nat on random tokens, -0.22 in the mean, and 0.82 on repeated ones."""
    sections: dict[str, Any] = {
        "data": {"train": "t.parquet"},
        "reward": {"function": "countdown"},
        "model": {"path": "m"},
    }
    config = Config.model_validate(sections | {"weights": {"probe_tolerance": None}} | given)
    assert rounding_of(config) == rounding
    if config.weights.tolerance == 1:
        far, near = (limits_of(config.weights, [-size], rounding, likely=False) for size in (13.7, 2.8))
        assert far.tolerance > 2 * 0.48 and far.shift > 2 * 0.22 and near.tolerance > 2 * 0.82


def confirmed(probe: Probe, ours: Any, version: int = 3, comparison: Comparison | None = None) -> list[Any]:
    """What a server says whose log-probabilities are `ours(tokens)`. Raises WeightsError."""
    said: list[Any] = []

    async def score(tokens: list[int], images: Any) -> list[float]:
        return list(ours(tokens))

    async def sent() -> Probe:
        return probe

    async def test() -> None:
        go = SimpleNamespace(probe=True, version=version, round=1)
        engine: Any = SimpleNamespace(probe=score)
        reception: Any = SimpleNamespace(go=go, probe=sent(), comparison=comparison or Comparison(engine))
        await confirm(reception, said.append, 0.0, 0.0)

    try:
        asyncio.run(test())
    except WeightsError:
        assert said[0].fatal
        raise
    return said


def a_probe(*logprobs: list[float], rounding: float = BF16) -> Probe:
    """The first text is likely. Text i has tokens i, i, ..."""
    texts = [PolicyText(f"text {i}", [i] * (len(each) + 1), len(each), i == 0) for i, each in enumerate(logprobs)]
    policy: Any = SimpleNamespace(logprobs_of=lambda row: [x for each in logprobs for x in (*each, 0.0)])
    return Prober([], WeightsConfig(), 0, ProbeRow(texts, "row", rounding)).ask(policy)


@pytest.mark.parametrize("theirs", [float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 1])
def test_a_policy_without_finite_log_probabilities_passes_no_probe(theirs: float, place: int) -> None:
    """Its limit is infinite, and so is the difference."""
    values = [[-1.0, -2.0], [-1.0, -2.0]]
    values[place] = [-1.0, theirs]
    with pytest.raises(WeightsError, match=rf"log-probabilities differ by (inf|nan) nat.* on text {place} "):
        confirmed(a_probe(*values), lambda tokens: [-1.0, -2.0])


def test_differences_of_one_sign_are_found_where_rounding_of_that_size_is_not() -> None:
    theirs = [-12.0] * 8
    probe, size = a_probe([-1.0] * 8, theirs), 0.3
    signs = [1, -1, -1, 1, -1, 1, 1, -1]

    def ours(tokens: list[int]) -> list[float]:
        return [-12.0 + size * sign for sign in signs] if tokens[0] else [-1.0] * 8

    (loaded,) = confirmed(probe, ours)
    assert loaded.probe == 0.0, "the metric is of the first text"
    signs = [-1] * 8
    with pytest.raises(WeightsError) as error:
        confirmed(probe, ours, version=0)
    assert error.value.final and "\n" not in str(error.value)
    for part in (
        "differ by 0.3 nat on average, mostly with one sign, on text 1",
        "weights.probe_tolerance 0.244 for this text",
        "[-12.300,",
        "[-12.000,",
        "remedy",
    ):
        assert part.replace("remedy", "raise weights.probe_tolerance if it is rounding") in str(error.value)


def test_all_texts_are_compared_until_they_have_agreed_once() -> None:
    """A server that starts later compares them too; each later probe costs one text."""
    probe, wrong, asked = a_probe([-1.0] * 4, [-12.0] * 4), {1}, list[int]()

    async def score(tokens: list[int], images: Any) -> list[float]:
        asked.append(tokens[0])
        return [-11.0 if tokens[0] in wrong else (-12.0 if tokens[0] else -1.0)] * 4

    engine: Any = SimpleNamespace(probe=score)
    comparison = Comparison(engine)
    with pytest.raises(WeightsError, match="differ by 1 nat on average on text 1"):
        confirmed(probe, None, comparison=comparison)
    wrong.clear()
    confirmed(probe, None, comparison=comparison)
    confirmed(probe, None, comparison=comparison)
    assert asked == [0, 1, 0, 1, 0]


def learn(model: Gemma2ForCausalLM, tokens: list[int]) -> None:
    """Train until the model predicts `tokens` well."""
    row, optimizer = torch.tensor([tokens]), torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = model(input_ids=row, labels=row).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class GemmaPolicy:
    """A transformers model that computes each text of a probe alone."""

    def __init__(self, model: Gemma2ForCausalLM) -> None:
        self.model = model

    def logprobs_of(self, row: list[list[int]]) -> list[float]:
        return [value for tokens in row for value in (*scores(self.model, tokens), 0.0)]


EAGER = {"attn_implementation": "eager"}
CAPS = {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0}


@pytest.mark.parametrize("left_out", ["final_logit_softcapping", "attn_logit_softcapping", "scale"])
def test_what_a_server_leaves_out_of_the_logits_shows_in_uncertain_texts_alone(left_out: str) -> None:
    """A Gemma 2 that predicts the first text well, and vLLM without its softcap, or with a scale of its logits."""
    model = tiny_gemma(**EAGER | CAPS)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data *= 2  # scores of attention reach the softcap
    texts = texts_of(NoDigits(320), 400, vocabulary=320)
    learn(model, texts[0].tokens)
    other = tiny_gemma(**EAGER | CAPS | ({left_out: None} if left_out != "scale" else {}))
    other.load_state_dict(model.state_dict())

    def served(tokens: list[int]) -> list[float]:
        if left_out != "scale":
            return scores(other, tokens)
        logits = 0.9 * other(torch.tensor([tokens])).logits[0, :-1]
        return logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()

    row = ProbeRow(texts, [text.tokens for text in texts], F32)
    probe = Prober([], WeightsConfig(), 0, row).ask(GemmaPolicy(model))
    confirmed(probe, lambda tokens: scores(model, tokens))
    confirmed(Probe(texts=probe.texts[:1]), served)
    with pytest.raises(WeightsError, match=f"differ by .* on ({RANDOM}|{REPEATED}) "):
        confirmed(probe, served, version=0)
