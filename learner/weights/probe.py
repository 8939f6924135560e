"""The probe: fixed texts on whose log-probabilities learner and server must agree.

Every model predicts the first text well. For a model that sees, a picture comes before it, which each end draws: a text
alone would not show a wrong tower. The others are uncertain: a softcap, a scale of logits, attention sinks or a short
window that one end leaves out shows there alone.
"""

import random
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from buffer.data.images import ImageFormat, Picture, SeenImage
from configs.load import ConfigError
from learner.weights.protocol import ProbeText

PROBE_TOKENS = 64
TEXT = ", ".join(map(str, range(1, 65)))
"""A text that every model predicts well: rounding to bfloat16 changes its log-probabilities little, wrong weights much
(SmolLM2-135M: 0.005 nat, on sums 0.07)."""
ROUNDING = 2.0**-6
"""Relative error that bfloat16 may cause. A trained policy may find a text very unlikely: at -16 nat in the mean,
correct weights differed by 0.06 and 0.11 nat."""
LIKELY, RANDOM, REPEATED = "a text that every model predicts", "random tokens", "repeated random tokens"
DISTANCE, AGAIN = 136, 40
"""The last text: random tokens, of which the first AGAIN come once more, DISTANCE tokens later. That is more than a
window of 128 (gpt-oss)."""
CAPTION = "The left half of the picture is red, the right half is blue. "
PICTURE = (4, 6)
"""Height and width in tokens; more than one window of Qwen2.5-VL's tower."""
LEFT, RIGHT = (210, 45, 40), (40, 60, 205)


class PolicyText(NamedTuple):
    """A text of the probe. `compared`: how many of its last tokens count, since a policy predicts no placeholder of an
    image. `likely`: every model predicts it well."""

    name: str
    tokens: list[int]
    compared: int
    likely: bool = False
    images: Sequence[SeenImage] = ()


class ProbeRow(NamedTuple):
    """The texts, and the packed row of all of them for the policy's `logprobs_of`. `rounding`: relative error that
    correct weights may cause."""

    texts: Sequence[PolicyText]
    row: Any
    rounding: float = ROUNDING


def texts_of(
    tokenizer: Any, longest: int, vocabulary: int, form: ImageFormat | None = None, without: Collection[int] = ()
) -> list[PolicyText]:
    """Texts of at most `longest` tokens; see `tokens_of`. `vocabulary`: rows of the embedding. `without`: ids that
    stand for no text. Raises ConfigError."""
    if form is None:
        tokens = tokens_of(tokenizer, longest, without=without, vocabulary=vocabulary)
        first = PolicyText(LIKELY, tokens, len(tokens) - 1, likely=True)
    else:
        tokens, image = shown_tokens(tokenizer, longest, form, vocabulary)
        behind = len(tokens) - image.start - image.picture.num_tokens - 1
        first = PolicyText(LIKELY, tokens, behind, likely=True, images=[image])
        without = {*without, form.vision_start, form.image_token, form.vision_end}
    draw, known = random.Random(1), known_tokens(tokenizer, without, vocabulary)
    uncertain, block = ([draw.choice(known) for _ in range(number)] for number in (PROBE_TOKENS, DISTANCE))
    texts = [first, PolicyText(RANDOM, uncertain[:longest], len(uncertain[:longest]) - 1)]
    if longest >= DISTANCE + AGAIN:
        texts.append(PolicyText(REPEATED, block + block[:AGAIN], AGAIN))
    return texts


def placeholders(config: Mapping[str, Any]) -> set[int]:
    """Ids that stand for no text, by a model's `config.json`: `image_token_id`, `eos_token_id` and others."""
    inner = [placeholders(value) for value in config.values() if isinstance(value, Mapping)]
    ids = {key: value for key, value in config.items() if str(key).endswith(("token_id", "token_index"))}
    named = {value for value in ids.values() if isinstance(value, int)}
    return named.union(*inner)


def known_tokens(tokenizer: Any, without: Collection[int] = (), vocabulary: int | None = None) -> list[int]:
    """Tokens of text: all but added ones, which may stand for an image or a sound; or all, if there are no others."""
    size = len(tokenizer) if vocabulary is None else min(len(tokenizer), vocabulary)
    every = [token for token in range(size) if token not in without] or list(range(size))
    return [token for token in every if token not in tokenizer.added_tokens_decoder] or every


def tokens_of(
    tokenizer: Any,
    longest: int,
    text: str = TEXT,
    without: Collection[int] = (),
    vocabulary: int | None = None,
) -> list[int]:
    """`text` as at most `longest` tokens; random ones for a tokenizer that does not know it. A server samples one token
    more, so `longest` is one less than what every server accepts."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)[:PROBE_TOKENS]
    if len(set(tokens)) < PROBE_TOKENS // 8:
        draw, known = random.Random(0), known_tokens(tokenizer, without, vocabulary)
        tokens = [draw.choice(known) for _ in range(PROBE_TOKENS)]  # the same on every rank
    return tokens[:longest]


def shown_tokens(
    tokenizer: Any, longest: int, form: ImageFormat, vocabulary: int | None = None
) -> tuple[list[int], SeenImage]:
    """Tokens of a probe with a picture, at most `longest`, and the picture. Raises ConfigError."""
    high, wide = (form.side or sides * form.factor for sides in PICTURE)
    picture = draw(form, high, wide)
    before = [form.vision_start, *[form.image_token] * picture.num_tokens, form.vision_end]
    text = tokens_of(tokenizer, longest - len(before), CAPTION + TEXT, before, vocabulary)
    if longest < len(before) + PROBE_TOKENS // 8:
        short = f"the weights' probe with its picture takes {len(before) + PROBE_TOKENS // 8} tokens"
        raise ConfigError([f"sampling.max_tokens: {short}, and a sample has at most {longest + 1}; raise it"])
    return [*before, *text], SeenImage(1, picture)


def draw(form: ImageFormat, height: int, width: int) -> Picture:
    """Draw a red half and a blue one by arithmetic, the same everywhere."""
    y, x = np.indices((height, width))
    colours = np.where((x < width // 2)[..., None], LEFT, RIGHT)
    return Picture((colours + ((7 * y + 13 * x) % 41 - 20)[..., None]).astype(np.uint8), form)


def images_of(probe: ProbeText, form: ImageFormat | None) -> list[SeenImage]:
    """Draw the picture of `probe`. Raises ValueError unless it is the learner's."""
    if probe.image is None:
        return []
    if form is None:
        raise ValueError(
            "the probe has a picture, and this server's model sees none: give both ends the same model.path"
        )
    height, width = probe.image.height, probe.image.width
    if form.side is not None and (height, width) != (form.side, form.side):
        raise ValueError(f"the probe's picture has sides {height} x {width}, here all have {form.side}")
    if height % form.factor or width % form.factor:
        raise ValueError(f"the probe's picture has sides {height} x {width}, here they are multiples of {form.factor}")
    picture = draw(form, height, width)
    if picture.digest != probe.image.digest:
        both = f"{picture.digest[:12]} here and {probe.image.digest[:12]} at the learner"
        raise ValueError(f"the probe's picture has the digest {both}: run the same Headrace at both ends")
    return [SeenImage(probe.image.start, picture)]
