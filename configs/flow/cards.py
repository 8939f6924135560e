"""The GPUs that forecasts know."""

import re
import sys
from dataclasses import dataclass
from difflib import get_close_matches

from configs.entrypoint import BAD_INPUT
from configs.load import ConfigError
from configs.plain_text import print_visible

MIB = 1 << 20
UNUSABLE = 1 << 30
"""CUDA's context and the driver: 0.7 to 1.1 GiB on H100 and H200."""


@dataclass(frozen=True)
class Card:
    """One kind of GPU."""

    name: str
    total: int
    """Bytes, as `nvidia-smi` lists them."""
    peak: float | None
    """Dense bfloat16 FLOP/s with float32 sums."""
    bandwidth: float | None
    """Bytes/s of the GPU's memory."""
    source: str = ""
    """The vendor's page. Half of a peak with sparsity is dense."""

    @property
    def free(self) -> int:
        return self.total - UNUSABLE


def _nvidia(name: str, mib: int, tflops: float, gb_per_s: float, page: str) -> Card:
    return Card(name, mib * MIB, tflops * 1e12, gb_per_s * 1e9, f"https://www.nvidia.com/{page}")


ADA = "content/PDF/nvidia-ada-gpu-architecture/nvidia-ada-gpu-architecture.pdf"
HOPPER, AMPERE = "en-us/data-center/h100/", "en-us/data-center/a100/"
CARDS = {
    card.name: card
    for card in (
        _nvidia("B200", 183359, 2250, 8000, "en-us/data-center/hgx/"),
        _nvidia("H200", 143771, 989, 4800, "en-us/data-center/h200/"),
        _nvidia("H100", 81559, 989, 3350, HOPPER),
        _nvidia("H800", 81559, 989, 3350, HOPPER),
        _nvidia("H20", 97871, 148, 4000, "en-us/data-center/hgx/"),
        _nvidia("A100-80G", 81920, 312, 2039, AMPERE),
        _nvidia("A100-40G", 40960, 312, 1555, AMPERE),
        _nvidia("A800", 81920, 312, 2039, AMPERE),
        _nvidia("L40S", 46068, 362, 864, "en-us/data-center/l40s/"),
        _nvidia("L4", 23034, 121, 300, "en-us/data-center/l4/"),
        _nvidia("A6000", 49140, 155, 768, "en-us/design-visualization/rtx-a6000/"),
        _nvidia("5090", 32607, 209, 1792, "en-us/geforce/graphics-cards/50-series/rtx-5090/"),
        _nvidia("4090", 24564, 165, 1008, ADA),
        _nvidia("3090", 24576, 71, 936, "en-us/geforce/graphics-cards/30-series/rtx-3090-3090ti/"),
    )
}
"""H100 and H200 are the SXM cards."""
ALIASES = {"A100": "A100-80G", "A100-80GB": "A100-80G", "A100-40GB": "A100-40G"}


def card_named(text: str) -> Card:
    """The card called `text`, such as `RTX 4090`. Raises ConfigError."""
    name = re.sub(r"^(NVIDIA)?[ _-]*(RTX)?[ _-]*", "", text.strip().upper()).replace(" ", "-").replace("_", "-")
    name = ALIASES.get(name, name)
    if name in CARDS:
        return CARDS[name]
    close = get_close_matches(name, CARDS, 1)
    meant = f"did you mean {close[0]}? " if close else ""
    raise ConfigError([f"--gpu: {text!r} is no card that is known here; {meant}Known: {', '.join(CARDS)}"])


def checked_card(name: str | None, prog: str) -> Card | None:
    """The card of `--gpu`; an unknown one ends the process with exit code 2."""
    try:
        return None if name is None else card_named(name)
    except ConfigError as error:
        print_visible(f"{prog}: {error}", sys.stderr)
        sys.exit(BAD_INPUT)


def card_of(name: str, total: int = 0) -> Card | None:
    """The driver's name is such as `NVIDIA A100-SXM4-40GB`."""
    words = name.replace("-", " ").split()
    found = [card for card in CARDS.values() if card.name.partition("-")[0] in words]
    return min(found, key=lambda card: abs(card.total - total), default=None)
