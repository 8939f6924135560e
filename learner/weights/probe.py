"""The probe: a fixed text on whose log-probabilities learner and server must agree. For a model that sees, a picture
comes first, which each end draws: a text alone would not show a wrong tower."""

import random
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from buffer.data.images import ImageFormat, Picture, SeenImage
from configs.load import ConfigError
from configs.schema import WeightsConfig
from learner.weights.plan import Spec
from learner.weights.protocol import Probe, ProbeImage

PROBE_TOKENS = 64
TEXT = ", ".join(map(str, range(1, 65)))
"""A text that every model predicts well: rounding to bfloat16 changes its log-probabilities little, wrong weights much
(SmolLM2-135M: 0.005 nat, on sums 0.07)."""
ROUNDING = 2.0**-6
"""Relative error that bfloat16 may cause. A trained policy may find the text very unlikely: at -16 nat in the mean,
correct weights differed by 0.06 and 0.11 nat."""
CAPTION = "The left half of the picture is red, the right half is blue. "
PICTURE = (4, 6)
"""Height and width in tokens; more than one window of Qwen2.5-VL's tower."""
LEFT, RIGHT = (210, 45, 40), (40, 60, 205)


class ShownProbe(NamedTuple):
    """A probe with a picture. `row`: for the policy's `logprobs_of`."""

    tokens: list[int]
    image: SeenImage
    row: Any


class ProbedPolicy(Protocol):
    """A policy as the sender sees it."""

    def full_weights(self, without: Collection[str] = ()) -> Iterator[tuple[str, torch.Tensor]]: ...
    def logprobs_of(self, tokens: Any) -> list[float]: ...


class Prober:
    """Decides when a probe is due, equally on every rank, since its forward pass is collective: at the first version
    published and at multiples of `weights.probe_every`."""

    def __init__(
        self, specs: Sequence[Spec], config: WeightsConfig, seed: int, probe: ShownProbe | Sequence[int] | None
    ) -> None:
        if probe is None:
            rows = next(spec.shape[0] for spec in specs if len(spec.shape) == 2)
            draw = random.Random(seed)
            probe = [draw.randrange(rows) for _ in range(PROBE_TOKENS)]
        self._probe, self._every, self._config = probe, config.probe_every, config
        self._first = True

    def due(self, version: int) -> bool:
        first, self._first = self._first, False
        return self._every > 0 and (first or version % self._every == 0)

    def ask(self, policy: ProbedPolicy) -> Probe:
        if not isinstance(self._probe, ShownProbe):
            tokens = list(self._probe)
            logprobs = policy.logprobs_of(tokens)
            return Probe(tokens=tokens, logprobs=logprobs, tolerance=tolerance_of(self._config, logprobs))
        tokens, (start, picture), row = self._probe
        height, width, _ = picture.pixels.shape
        image = ProbeImage(start=start, height=height, width=width, digest=picture.digest)
        behind = policy.logprobs_of(row)[start + picture.num_tokens :]
        return Probe(tokens=tokens, image=image, logprobs=behind, tolerance=tolerance_of(self._config, behind))


def tolerance_of(config: WeightsConfig, logprobs: Sequence[float]) -> float:
    """Largest mean absolute difference, in nats: what the run file says, or the default and the rounding of `logprobs`
    in bfloat16."""
    if config.probe_tolerance is not None:
        return config.probe_tolerance
    return config.tolerance + ROUNDING * sum(map(abs, logprobs)) / len(logprobs)


def tokens_of(tokenizer: Any, longest: int, text: str = TEXT, without: Collection[int] = ()) -> list[int]:
    """`text` as at most `longest` tokens; random ones for a tokenizer that does not know it. A server samples one token
    more, so `longest` is one less than what every server accepts."""
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)[:PROBE_TOKENS]
    if len(set(tokens)) < PROBE_TOKENS // 8:
        draw, known = random.Random(0), [token for token in range(len(tokenizer)) if token not in without]
        tokens = [draw.choice(known) for _ in range(PROBE_TOKENS)]  # the same on every rank
    return tokens[:longest]


def shown_tokens(tokenizer: Any, longest: int, form: ImageFormat) -> tuple[list[int], SeenImage]:
    """Tokens of a probe with a picture, at most `longest`, and the picture. Raises ConfigError."""
    high, wide = (form.side or sides * form.factor for sides in PICTURE)
    picture = draw(form, high, wide)
    before = [form.vision_start, *[form.image_token] * picture.num_tokens, form.vision_end]
    text = tokens_of(tokenizer, longest - len(before), CAPTION + TEXT, before)
    if longest < len(before) + PROBE_TOKENS // 8:
        short = f"the weights' probe with its picture takes {len(before) + PROBE_TOKENS // 8} tokens"
        raise ConfigError([f"sampling.max_tokens: {short}, and a sample has at most {longest + 1}; raise it"])
    return [*before, *text], SeenImage(1, picture)


def draw(form: ImageFormat, height: int, width: int) -> Picture:
    """Draw a red half and a blue one by arithmetic, the same everywhere."""
    y, x = np.indices((height, width))
    colours = np.where((x < width // 2)[..., None], LEFT, RIGHT)
    return Picture((colours + ((7 * y + 13 * x) % 41 - 20)[..., None]).astype(np.uint8), form)


def images_of(probe: Probe, form: ImageFormat | None) -> list[SeenImage]:
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
