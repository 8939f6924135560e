"""The probe: short enough for every server, digits if the tokenizer has them, a picture for models that see."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from buffer.data.images import ImageFormat
from configs.load import ConfigError
from configs.schema import WeightsConfig
from examples.countdown.make_model import make_tokenizer
from learner.weights.probe import (
    LEFT,
    PICTURE,
    PROBE_TOKENS,
    RIGHT,
    Prober,
    ShownProbe,
    draw,
    images_of,
    shown_tokens,
    tokens_of,
    tolerance_of,
)
from learner.weights.protocol import Probe, ProbeImage
from learner.weights.receiver.staged import WeightsError, confirm
from tests.harness.tiny_vlm import tiny_tokenizer


class NoDigits:
    """A tokenizer without digits."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        return [3] * len(text)

    def __len__(self) -> int:
        return 12


def test_the_probe_leaves_room_for_the_token_that_a_server_samples_after_it(tmp_path: Path) -> None:
    make_tokenizer().save_pretrained(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokens_of(tokenizer, 10_000)) == PROBE_TOKENS
    assert tokens_of(tokenizer, 30) == tokens_of(tokenizer, 10_000)[:30]
    assert tokenizer.decode(tokens_of(tokenizer, 7)) == "1, 2, 3"


def test_a_tokenizer_without_digits_gets_the_same_random_tokens_on_every_rank() -> None:
    tokens = tokens_of(NoDigits(), 40)
    assert tokens == tokens_of(NoDigits(), 40) and len(tokens) == 40
    assert set(tokens) <= set(range(12)) and len(set(tokens)) > 6


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
    assert set(tokens[image.start + image.picture.num_tokens + 1 :]) <= set(range(12)) - {3, 4, 5}


def test_a_sample_too_short_for_the_picture_is_refused_by_its_key() -> None:
    with pytest.raises(ConfigError, match=r"sampling\.max_tokens: .* takes 34 tokens, .* at most 31; raise it"):
        shown_tokens(tiny_tokenizer(), 30, FORM)


def a_probe(**changed: Any) -> Probe:
    image = {"start": 1, "height": 112, "width": 168, "digest": draw(FORM, 112, 168).digest} | changed
    return Probe(tokens=[3, 5, 4], image=ProbeImage.model_validate(image), logprobs=[-1.0], tolerance=0.1)


def test_a_server_draws_the_learner_s_picture() -> None:
    ((start, picture),) = images_of(a_probe(), FORM)
    assert start == 1 and np.array_equal(picture.pixels, draw(FORM, 112, 168).pixels)
    assert images_of(a_probe().model_copy(update={"image": None}), FORM) == []


@pytest.mark.parametrize(
    ("probe", "form", "problem"),
    [
        (a_probe(), None, "this server's model sees none: give both ends the same model.path"),
        (a_probe(digest="f" * 64), FORM, "ffffffffffff at the learner: run the same Headrace at both ends"),
        (a_probe(height=113), FORM, "sides 113 x 168, here they are multiples of 28"),
    ],
)
def test_a_picture_that_cannot_be_drawn_alike_is_refused(probe: Probe, form: ImageFormat | None, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as error:
        images_of(probe, form)
    assert "\n" not in str(error.value)


class Asked:
    """A policy that notes what it is asked."""

    def logprobs_of(self, row: Any) -> list[float]:
        self.row = row
        return [float(-place) for place in range(1, 40)]


def test_only_what_follows_the_picture_is_compared() -> None:
    """The policy predicts no placeholder, so log-probabilities of these would be nothing but noise."""
    tokens, image = shown_tokens(tiny_tokenizer(), 40, FORM)
    prober, policy = Prober([], WeightsConfig(), 0, ShownProbe(tokens, image, "row")), Asked()
    probe = prober.ask(policy)
    assert policy.row == "row" and probe.tokens == tokens and probe.image
    assert (probe.image.start, probe.image.height, probe.image.width) == (1, 112, 168)
    assert probe.logprobs == [float(-place) for place in range(26, 40)], "of tokens[26:], the first one of the text"
    assert len(tokens) == 40 and len(probe.logprobs) == 14
    text = Prober([], WeightsConfig(), 0, [1, 2, 3]).ask(policy)
    assert policy.row == [1, 2, 3] and text.image is None


def test_a_text_that_the_policy_finds_unlikely_may_differ_by_its_rounding() -> None:
    """In bfloat16, two healthy runs differed by 0.061 and 0.113 nat where the mean was about -16."""
    unlikely = [-14.953, -19.506, -5.121, -19.882]
    assert 2 * 0.113 < tolerance_of(WeightsConfig(), unlikely) < 0.5
    assert tolerance_of(WeightsConfig(), [-0.1, -0.3]) < 0.06
    assert tolerance_of(WeightsConfig(probe_tolerance=0.02), unlikely) == 0.02


@pytest.mark.parametrize("theirs", [float("-inf"), float("nan")])
def test_a_policy_without_finite_log_probabilities_passes_no_probe(theirs: float) -> None:
    """Its limit is infinite, and so is the difference."""
    logprobs = [-1.0, theirs]
    probe = Probe(tokens=[1, 2, 3], logprobs=logprobs, tolerance=tolerance_of(WeightsConfig(), logprobs))
    said: list[Any] = []

    async def asked(*given: Any) -> Any:
        return [-1.0, -2.0]

    async def sent() -> Probe:
        return probe

    async def test() -> None:
        go = SimpleNamespace(probe=True, version=3, round=1)
        reception: Any = SimpleNamespace(go=go, probe=sent(), form=None)
        engine: Any = SimpleNamespace(probe=asked)
        await confirm(reception, engine, said.append, 0.0, 0.0)

    with pytest.raises(WeightsError, match=r"log-probabilities differ by (inf|nan) nat"):
        asyncio.run(test())
    assert said[0].fatal
