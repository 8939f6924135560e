"""Refuses numbers in a model's config.json that no model has. Pure.

transformers makes lists of so many layers, labels or experts while it reads them, which would fill the memory.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from configs.architecture import QUANTISED

MOST_LAYERS = 1_000
LIMITS: tuple[tuple[re.Pattern[str], int], ...] = (
    (re.compile(r"^(?!max_).*layers?$|depths?$|blocks?$|stages$|cycles$|_replace$|^attention_types$"), MOST_LAYERS),
    (re.compile(r"experts$|heads?$|codebooks$|quantizers$|groups?$"), 100_000),
    (re.compile(r"labels$"), 1_000_000),
    (re.compile(r"hidden_size|intermediate_size|(^|_)dim$|_rank$|^d_model$|^d_ff$|^n_embd$"), 10_000_000),
    (re.compile(r"vocab"), 100_000_000),
)
"""The largest number of a key that is written so: several times what published models have."""
LISTS = re.compile("layer|block")
"""Keys of lists with an entry for each layer."""
WORDS = re.compile("(_map|2id|2label)$")
"""Keys of maps from words or labels to their numbers, such as Chameleon's and Emu3's `vocabulary_map`."""
SHOWN = 20


def oversized(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line for each number, and each list of layers, that is too large; in nested parts too."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        key, value = left.pop()
        if key in QUANTISED or (isinstance(value, Mapping) and WORDS.search(key)):
            continue
        if isinstance(value, Mapping):
            left += value.items()
        elif isinstance(value, list):
            left += ((key, each) for each in value)
            if LISTS.search(key) and len(value) > MOST_LAYERS:
                yield _refusal(f"{key} in its config.json has {len(value):,} entries", MOST_LAYERS)
        elif type(value) in (int, float) and value > (limit := _limit(key)):
            text = json.dumps(value)
            shown = text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
            yield _refusal(f"{key} in its config.json is {shown}", limit)


def _limit(key: str) -> float:
    return next((limit for pattern, limit in LIMITS if pattern.search(key)), float("inf"))


def _refusal(what: str, limit: float) -> str:
    return f"{what}, and at most {limit:,} are read; correct it or download the model again"
